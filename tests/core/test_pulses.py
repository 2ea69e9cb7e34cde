"""When something that should make progress is taken for hung, and how little goes with a pulse over a slow link."""

from __future__ import annotations

import asyncio
import time

import pytest

from titan_rl.hosts.shipped_logs import LEAST_BYTES, MOST_BYTES, Pace
from titan_rl.metrics.timeline import Pulse
from titan_rl.rpc.mesh_client import LOOKS, until_still

BOUND = 0.25


class Parts:
    """Two parts of a mesh; after `looks` looks the second stands still, or does not answer."""

    def __init__(self, looks: int, silent: bool) -> None:
        self.looks, self.silent, self.seen = looks, silent, 0

    async def pulse(self) -> list[Pulse]:
        self.seen += 1
        if self.silent and self.seen > self.looks:
            await asyncio.Event().wait()
        return [Pulse(progress=self.seen), Pulse(progress=min(self.seen, self.looks))]


async def test_a_mesh_of_which_one_part_stands_still_is_found_within_the_bound() -> None:
    for silent in (False, True):
        parts = Parts(looks=3, silent=silent)
        began = time.monotonic()
        await asyncio.wait_for(until_still(parts.pulse, BOUND), 20 * BOUND)
        assert time.monotonic() - began >= BOUND * (LOOKS - 2) / LOOKS
        assert parts.seen >= 3 + LOOKS - 2, "one late look proves nothing"


async def test_what_moves_is_never_taken_for_hung() -> None:
    parts = Parts(looks=10**9, silent=False)
    watch = asyncio.create_task(until_still(parts.pulse, BOUND))
    while parts.seen < 4 * LOOKS:
        await asyncio.sleep(0)
    assert not watch.done()
    watch.cancel()


SECONDS = 10.0


@pytest.mark.parametrize("bytes_per_second", [64 << 10, 300 << 10, 1 << 20, 100 << 20])
def test_no_pulse_is_missed_on_a_slow_link_and_a_fast_one_is_used(bytes_per_second: int) -> None:
    pace, sent, took = Pace(SECONDS), [], []
    for _ in range(50):
        sent.append(pace.nbytes)
        took.append(pace.nbytes / bytes_per_second)
        pace.took(took[-1])
    assert max(took) <= SECONDS / LOOKS
    assert sent[0] == LEAST_BYTES and max(sent) >= min(MOST_BYTES, bytes_per_second // 2)


def test_after_a_late_pulse_little_is_sent() -> None:
    pace = Pace(SECONDS)
    for _ in range(10):
        pace.took(0.0)
    assert pace.nbytes == MOST_BYTES
    pace.took(SECONDS / LOOKS)
    assert pace.nbytes == LEAST_BYTES
