"""Everything that is up during a run: the handles a training loop works with, all of them public.

`close` never raises and leaves no process and no shared memory behind, whatever state the parts are in. It waits for no
part that has lost a process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from titan_rl.actors.connection import Connection
from titan_rl.actors.gateway import Gateway
from titan_rl.actors.generator import GeneratorMesh
from titan_rl.actors.rollouts import Rollouts
from titan_rl.actors.router_client import Router
from titan_rl.actors.trainer import Trainer
from titan_rl.config import RunConfig
from titan_rl.controller.faults import FaultBoard
from titan_rl.errors import CallTimeout
from titan_rl.types import GroupRequest, PolicyVersion, Purpose, SamplingParams
from titan_rl.weights.transports.segment_files import remove_segments_of

_log = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
"""Bound on the polite part of closing, which goes on in all meshes at once."""


class Spawner(Protocol):
    """What the controller needs of a provisioner."""

    async def stop_all(self) -> None:
        """Stop every process that was spawned."""
        ...


@dataclass(slots=True)
class System:
    """The running parts."""

    config: RunConfig
    model_path: Path
    trainer: Trainer
    router: Router
    rollouts: Rollouts
    generators: dict[str, GeneratorMesh]
    """By name."""
    gateway: Any = None
    """Handle of the `Gateway` actor; None where the config starts none."""
    pids: dict[str, list[int]] = field(default_factory=dict)
    """Process ids by mesh."""

    def train_group(self, prompt: int, version: PolicyVersion, *, attempt: int = 0) -> GroupRequest:
        """A training group of this run's config for one prompt of the stream."""
        return GroupRequest(
            group_id=prompt,
            purpose=Purpose.TRAIN,
            samples=self.config.rollout.samples_per_group,
            sampling=self._sampling(self.config.rollout.sampling.temperature),
            min_version=version,
            attempt=attempt,
        )

    def held_out_group(self, prompt: int, version: PolicyVersion, *, pinned_to: str | None = None) -> GroupRequest:
        """One greedy rollout of one held-out prompt."""
        return GroupRequest(
            group_id=prompt,
            purpose=Purpose.EVALUATE,
            samples=1,
            sampling=self._sampling(0.0),
            min_version=version,
            pinned_to=pinned_to,
        )

    def demonstration_group(self, step: int) -> GroupRequest:
        """The demonstrations of one warm-up step."""
        return GroupRequest(
            group_id=step,
            purpose=Purpose.DEMONSTRATE,
            samples=self.config.trainer.warmup.batch,
            sampling=self._sampling(1.0),
            min_version=PolicyVersion(0, 0),
        )

    def _sampling(self, temperature: float) -> SamplingParams:
        return SamplingParams(max_new_tokens=self.config.rollout.sampling.max_new_tokens, temperature=temperature)


async def close(system: System | None, spawner: Spawner, faults: FaultBoard) -> None:
    """Take everything down: politely what still answers, then every process."""
    faults.settle()
    if system is not None:
        parts: dict[str, Callable[[], Awaitable[Any]]] = {
            "router": system.router.close,
            "rollout": system.rollouts.close,
            "trainer": system.trainer.close,
            **{name: generator.close for name, generator in system.generators.items()},
        }
        if system.gateway is not None:
            gateway = Connection(system.gateway, what="gateway.{}")
            parts["gateway"] = lambda: gateway.call(None, Gateway.close)
        await close_parts(parts, faults)
    await spawner.stop_all()
    remove_segments_of(os.getpid())


async def close_parts(parts: Mapping[str, Callable[[], Awaitable[Any]]], faults: FaultBoard) -> None:
    """Close all of these at once, each by the name of its mesh. Never raises: their processes are stopped next."""

    async def ask(mesh: str, close: Callable[[], Awaitable[Any]]) -> None:
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await close()
        except TimeoutError:
            raise CallTimeout(f"{mesh}.close: no answer within {CLOSE_SECONDS:g} s") from None

    async def close_one(mesh: str, close: Callable[[], Awaitable[Any]]) -> None:
        started = time.monotonic()
        try:
            await faults.unless_lost(mesh, ask(mesh, close))
        except Exception as error:
            _log.warning("closing %s: %s", mesh, error)
        _log.info("closing %s took %.1f s", mesh, time.monotonic() - started)

    await asyncio.gather(*(close_one(mesh, close) for mesh, close in parts.items()))
