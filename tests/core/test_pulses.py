"""When something that should make progress is taken for hung."""

from __future__ import annotations

import asyncio
import time

import pytest

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


@pytest.mark.parametrize("period", [2, 3, 5])
async def test_parts_that_move_one_after_another_are_never_taken_for_hung(period: int) -> None:
    looks = 0

    async def pulse() -> list[Pulse]:
        nonlocal looks
        looks += 1
        return [Pulse(progress=(looks + part) // period) for part in range(period)]

    watch = asyncio.create_task(until_still(pulse, BOUND, every=BOUND / (4 * LOOKS)))
    while looks < 12 * LOOKS:
        assert not watch.done()
        await asyncio.sleep(0)
    watch.cancel()
