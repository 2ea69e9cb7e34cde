"""When something that should make progress has stopped to."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Awaitable, Callable
from contextlib import suppress

from titan_rl.errors import CallTimeout

LOOKS = 5
"""How often to look within the bound. One look that comes late, because this process had no time, proves nothing."""


async def until_still(pulse: Callable[[], Awaitable[list[int]]], seconds: float) -> None:
    """Return when nothing has moved for so long.

    Args:
        pulse: per part, a number that grows while it makes progress; raises if there is nothing to look at any more.
    """
    before: list[int] = []
    still = 0  # looks in a row at which a part did not answer, or had not moved
    while still < LOOKS - 1:
        now: list[int] = []
        with suppress(TimeoutError, CallTimeout):
            async with asyncio.timeout(seconds / LOOKS):
                now = await pulse()
        moved = bool(now) and all(map(operator.ne, now, before))
        still = 0 if moved else still + 1
        if now:
            before = now
            await asyncio.sleep(seconds / LOOKS)
