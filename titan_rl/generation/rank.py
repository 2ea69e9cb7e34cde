"""Builds one rank of a generator: engine, weight reader, and the group that carries decisions to all ranks."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from titan_rl.generation.config import ENGINES, GeneratorConfig
from titan_rl.generation.engine import Engine
from titan_rl.generation.engine_loop import EngineLoop
from titan_rl.generation.lockstep import Lockstep
from titan_rl.importing import import_name
from titan_rl.types import Completion, Piece
from titan_rl.weights.puller import SharedMemoryReader, verify
from titan_rl.weights.ranks import Ranks

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

    def make_lockstep() -> Lockstep:
        engine: Engine = import_name(config.engine, ENGINES)(config, model_path, device)
        # It ends with the process groups that the engine has made: to destroy it earlier breaks the engine's own exit.
        group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT) if world_size > 1 else None
        return Lockstep(
            engine,
            rank=rank,
            ranks=Ranks(group),
            load_publication=SharedMemoryReader().tensors,
            verify=lambda publication, engine: verify(publication, engine.served_shards(), group),
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
