"""Puts one rank of a generator together: engine, decision channel, weight reader, verification."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from titan_rl.generation.config import ENGINES, GeneratorConfig
from titan_rl.generation.engine import Engine
from titan_rl.generation.engine_loop import EngineLoop
from titan_rl.generation.gloo_channel import GlooChannel
from titan_rl.generation.lockstep import DecisionChannel, Lockstep, SoloChannel
from titan_rl.importing import import_name
from titan_rl.types import Completion, Piece
from titan_rl.weights.manifest import Publication
from titan_rl.weights.transport import WeightPuller


def make_engine_loop(
    config: GeneratorConfig,
    *,
    model_path: Path,
    device: str,
    on_completions: Callable[[list[Completion]], None],
    on_pieces: Callable[[list[Piece]], None],
    on_fatal: Callable[[BaseException], None],
) -> EngineLoop:
    """The engine loop of this process, which needs the environment of `join_world`.

    Nothing is built before the loop is started, and then in its own thread.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    gloo = GlooChannel() if world_size > 1 else None
    channel: DecisionChannel = gloo if gloo is not None else SoloChannel()
    puller = WeightPuller()

    def check(publication: Publication, engine: Engine) -> int:
        return puller.verify(publication, engine.served_shards(), gloo.group if gloo is not None else None)

    def make_lockstep() -> Lockstep:
        return Lockstep(
            import_name(config.engine, ENGINES)(config, model_path, device),
            rank=rank,
            channel=channel,
            load_publication=puller.tensors,
            verify=check,
            keep_cache=config.keep_prefix_cache,
        )

    return EngineLoop(
        make_lockstep,
        rank=rank,
        world_size=world_size,
        burst_steps=config.burst_steps,
        heartbeat_seconds=config.heartbeat_seconds,
        channel=channel,
        on_completions=on_completions,
        on_pieces=on_pieces,
        on_fatal=on_fatal,
    )
