"""Builds one rank of a generator: engine, decision channel, weight reader. `GlooChannel` carries decisions to ranks."""

from __future__ import annotations

import dataclasses
import datetime
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from titan_rl.generation.config import ENGINES, GeneratorConfig
from titan_rl.generation.decisions import LoopDecision
from titan_rl.generation.engine import Engine
from titan_rl.generation.engine_loop import EngineLoop
from titan_rl.generation.lockstep import DecisionChannel, Lockstep, SoloChannel
from titan_rl.importing import import_name
from titan_rl.types import Completion, GenerationRequest, Piece
from titan_rl.weights.manifest import Publication
from titan_rl.weights.puller import SharedMemoryReader, verify
from titan_rl.wire import pack

_MESSAGE_BYTES = 2048
"""Holds every decision that admits nothing, and a STEP that admits a few short requests."""
_LENGTH_BYTES = 8
_FAILURE_BYTES = 1024
"""Of a failure's text as other ranks see it; the rest is cut off."""


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
    channel: DecisionChannel = gloo if gloo is not None else SoloChannel()
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
        world_size=world_size,
        burst_steps=config.burst_steps,
        heartbeat_seconds=config.heartbeat_seconds,
        channel=channel,
        on_completions=on_completions,
        on_pieces=on_pieces,
        on_fatal=on_fatal,
    )


class GlooChannel:
    """A `DecisionChannel` over the ranks of the default process group, which the engine has initialised.

    Most decisions take one small broadcast, a long one takes a second. The first message has a fixed size, because
    followers must know what to wait for:

        [ length: 8 bytes | payload, if it fits into the rest ]      then, if not:      [ payload: length bytes ]

    A decision is pickled (the ranks of one generator trust each other); its requests are packed into flat arrays first.

    Args:
        timeout_seconds: bound on one collective. Followers wait in one for as long as rank 0 takes for a decision
            (a burst of steps, a pull) or, when idle, for a heartbeat; a dead rank is noticed at once.
    """

    def __init__(self, timeout_seconds: float = 600.0) -> None:
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        self._group: dist.ProcessGroup | None = None
        self._message = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The generator's ranks, for other collectives of the engine thread; None before `open`."""
        return self._group

    def open(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=self._timeout)

    def send(self, decision: LoopDecision) -> None:
        payload = _encode(decision)
        message = self._message.numpy()
        message[:_LENGTH_BYTES] = memoryview(len(payload).to_bytes(_LENGTH_BYTES, "little"))
        fits = len(payload) <= _MESSAGE_BYTES - _LENGTH_BYTES
        if fits:
            message[_LENGTH_BYTES : _LENGTH_BYTES + len(payload)] = memoryview(payload)
        dist.broadcast(self._message, src=0, group=self._group)
        if not fits:
            dist.broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8), src=0, group=self._group)

    def receive(self) -> LoopDecision:
        dist.broadcast(self._message, src=0, group=self._group)
        message = self._message.numpy()
        length = int.from_bytes(message[:_LENGTH_BYTES].tobytes(), "little")
        if length <= _MESSAGE_BYTES - _LENGTH_BYTES:
            return _decode(message[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes())
        payload = torch.empty(length, dtype=torch.uint8)
        dist.broadcast(payload, src=0, group=self._group)
        return _decode(payload.numpy().tobytes())

    def gather_failures(self, failure: str) -> list[str]:
        text = failure.encode()[:_FAILURE_BYTES]
        mine = torch.zeros(_FAILURE_BYTES, dtype=torch.uint8)
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else mine[:0]
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(gathered, mine, group=self._group)
        return [each.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for each in gathered]

    def close(self) -> None:
        # The group goes with the engine's process groups; destroying it earlier breaks the engine's own exit.
        self._group = None


def _encode(decision: LoopDecision) -> bytes:
    packed = pack(GenerationRequest, decision.admit) if decision.admit else None
    return pickle.dumps((dataclasses.replace(decision, admit=()), packed), protocol=pickle.HIGHEST_PROTOCOL)


def _decode(payload: bytes) -> LoopDecision:
    decision, packed = pickle.loads(payload)
    return decision if packed is None else dataclasses.replace(decision, admit=tuple(packed.unpack()))
