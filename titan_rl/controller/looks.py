"""What the processes of each mesh report: how long they waited, and their memory.

The controller asks all processes at the end of a step, at most once a second, and never waits for the answers: the
numbers of a step are those of the newest look that was answered before its end. A process that was replaced, or does
not answer, is left out of a look.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Protocol

from titan_rl.controller.system import System
from titan_rl.errors import TitanError
from titan_rl.observability.activity import activity
from titan_rl.observability.memory import memory
from titan_rl.observability.timeline import Pulse, timeline

LOOK_SECONDS = 1.0
"""Least pause between two looks."""
LOOK_SHARE = 0.01
"""Most of the time that looks may take; with many processes they are rarer."""
ANSWER_SECONDS = 10.0
"""Bound on a look."""

Look = dict[str, list[Pulse]]
"""Per mesh, of each rank."""


def idle_shares(before: Look, after: Look) -> dict[str, float]:
    """`idle/MESH`: the share of the time between two looks in which its ranks waited."""
    shares: dict[str, float] = {}
    for mesh, ranks in after.items():
        pairs = [(old.lived, new.lived) for old, new in zip(before.get(mesh, ()), ranks, strict=False)]
        seconds = [new.seconds - old.seconds for old, new in pairs]
        if len(pairs) == len(ranks) and min(seconds, default=0.0) > 0:
            shares[f"idle/{mesh}"] = sum(new.waited - old.waited for old, new in pairs) / sum(seconds)
    return shares


def memory_of(look: Look) -> dict[str, float]:
    """`memory/MESH/…`: bytes of all its processes together."""
    numbers = {}
    for mesh, ranks in look.items():
        numbers[f"memory/{mesh}/resident"] = float(sum(rank.memory.resident for rank in ranks))
        if device := sum(rank.memory.device for rank in ranks):
            numbers[f"memory/{mesh}/device"] = float(device)
    return numbers


class Asked(Protocol):
    """The client of a mesh."""

    async def pulse(self) -> list[Pulse]: ...


class Looks:
    """Looks at all meshes again and again. Belongs to one event loop."""

    def __init__(self) -> None:
        self._before: Look = {}
        self._looking: asyncio.Task[Look] | None = None
        self._next = 0.0

    def take(self, system: System) -> dict[str, float]:
        """`idle/MESH` and `memory/MESH/…`, if a look was answered since the last call. May begin the next one."""
        numbers: dict[str, float] = {}
        if not timeline.is_on:
            return numbers
        if self._looking is not None and self._looking.done():
            before, self._before = self._before, self._looking.result()
            numbers = idle_shares(before, self._before) | memory_of(self._before)
            self._looking = None
        if self._looking is None and time.monotonic() >= self._next:
            self._looking = asyncio.ensure_future(self._look(system))
        return numbers

    async def _look(self, system: System) -> Look:
        began = time.monotonic()
        found: Look = {"controller": [Pulse(0, memory=memory())]}

        async def ask(mesh: str, client: Asked) -> None:
            with suppress(TitanError, TimeoutError):
                async with asyncio.timeout(ANSWER_SECONDS):
                    found[mesh] = await client.pulse()

        meshes: dict[str, Asked] = {"trainer": system.trainer, "router": system.router, **system.generators}
        meshes |= {worker.name: worker for worker in system.rollouts.workers}
        if system.gateway is not None:
            meshes["gateway"] = system.gateway
        with activity("look"):
            await asyncio.gather(*(ask(mesh, client) for mesh, client in meshes.items()))
        now = time.monotonic()
        self._next = now + max(LOOK_SECONDS, (now - began) / LOOK_SHARE)
        return found
