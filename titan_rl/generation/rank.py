"""Builds one rank of a generator: engine, decision channel, weight reader. `GlooChannel` carries decisions to ranks."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from titan_rl.generation.config import ENGINES, GeneratorConfig
from titan_rl.generation.decisions import LoopDecision
from titan_rl.generation.engine import Engine
from titan_rl.generation.engine_loop import EngineLoop
from titan_rl.generation.lockstep import DecisionChannel, Lockstep
from titan_rl.importing import import_name
from titan_rl.types import Completion, Piece
from titan_rl.weights.manifest import Publication
from titan_rl.weights.puller import SharedMemoryReader, verify

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=10)
"""Followers wait in one collective for as long as rank 0 takes for a decision (a burst of steps, a pull) or, when idle,
for a heartbeat. A dead rank is noticed at once."""


def make_engine_loop(
    config: GeneratorConfig,
    *,
    model_path: Path,
    device: str,
    on_completions: Callable[[list[Completion]], None],
    on_pieces: Callable[[list[Piece]], None],
    on_fatal: Callable[[BaseException], None],
) -> EngineLoop:
    """The engine loop of this process, whose environment must be that of `join_world`.

    The engine is built when the loop starts, in the loop's thread.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    gloo = GlooChannel() if world_size > 1 else None
    channel = gloo or DecisionChannel()
    reader = SharedMemoryReader()

    def check(publication: Publication, engine: Engine) -> int:
        return verify(publication, engine.served_shards(), gloo.group if gloo is not None else None)

    def make_lockstep() -> Lockstep:
        return Lockstep(
            import_name(config.engine, ENGINES)(config, model_path, device),
            rank=rank,
            channel=channel,
            load_publication=reader.tensors,
            verify=check,
            keep_cache=config.keep_prefix_cache,
        )

    return EngineLoop(
        make_lockstep,
        rank=rank,
        burst_steps=config.burst_steps if world_size > 1 else 1,  # alone, there is no broadcast to amortise
        heartbeat_seconds=config.heartbeat_seconds,
        on_completions=on_completions,
        on_pieces=on_pieces,
        on_fatal=on_fatal,
    )


class GlooChannel(DecisionChannel):
    """Over the ranks of the default process group, which the engine has initialised. Decisions are pickled, because the
    ranks of one generator trust each other."""

    group: dist.ProcessGroup | None = None
    """The generator's ranks, for other collectives of the engine thread; None before `open`. It ends with the engine's
    process groups: destroying it earlier breaks the engine's own exit."""

    def open(self) -> None:
        self.group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)

    def send(self, decision: LoopDecision) -> None:
        dist.broadcast_object_list([decision], src=0, group=self.group)

    def receive(self) -> LoopDecision:
        received: list[Any] = [None]
        dist.broadcast_object_list(received, src=0, group=self.group)
        decision: LoopDecision = received[0]
        return decision

    def gather_failures(self, failure: str) -> list[str]:
        failures = [""] * dist.get_world_size(self.group)
        dist.all_gather_object(failures, failure, group=self.group)
        return failures
