"""Tells when something that should make progress has stopped, and limits what travels with the question."""

from __future__ import annotations

import asyncio
import operator
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from titan_rl.errors import CallTimeout
from titan_rl.metrics.timeline import Pulse

LOOKS = 5
"""How often to look within the bound. One look that comes late, because this process had no time, proves nothing."""


async def until_still(pulse: Callable[[], Awaitable[list[Pulse]]], seconds: float) -> None:
    """Return when nothing has moved for so long.

    Args:
        pulse: of each part; raises if there is nothing to look at any more.
    """
    before: list[int] = []
    still = 0  # looks in a row at which a part did not answer, or had not moved
    while still < LOOKS - 1:
        now: list[int] = []
        with suppress(TimeoutError, CallTimeout):
            async with asyncio.timeout(seconds / LOOKS):
                now = [part.progress for part in await pulse()]
        moved = bool(now) and all(map(operator.ne, now, before))
        still = 0 if moved else still + 1
        if now:
            before = now
            await asyncio.sleep(seconds / LOOKS)


LEAST_BYTES, MOST_BYTES = 16 << 10, 1 << 20
"""The least takes a quarter of a second at 0.5 Mbit/s."""


class Pace:
    """How many bytes go with the next pulse: few after a late one, so that they never make a link look dead.

    with pace as nbytes: await pulse(nbytes)        16 KiB, 32 KiB, … 1 MiB, late, 16 KiB, 32 KiB, …
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            seconds: bound of `until_still`.
        """
        self._late_seconds = seconds / LOOKS / 2
        self._clock = clock
        self._nbytes = LEAST_BYTES
        self._began = 0.0

    def __enter__(self) -> int:
        self._began = self._clock()
        return self._nbytes

    def __exit__(self, *error: object) -> None:
        late = self._clock() - self._began > self._late_seconds
        self._nbytes = LEAST_BYTES if late else min(MOST_BYTES, 2 * self._nbytes)
