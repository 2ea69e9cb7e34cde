"""Decisions over a gloo group: one small broadcast for the usual decision, a second one for a long one.

The first message has a fixed size, because followers must know what to wait for:

    [ length: 8 bytes | payload, if it fits into the rest ]      then, if not:      [ payload: length bytes ]

A decision is pickled (the ranks of one generator trust each other), its requests packed into flat arrays first.
"""

from __future__ import annotations

import dataclasses
import datetime
import pickle

import torch
import torch.distributed as dist

from titan_rl.generation.decisions import LoopDecision
from titan_rl.types import GenerationRequest
from titan_rl.wire import pack

_MESSAGE_BYTES = 2048
"""Holds every decision that admits nothing, and a STEP that admits a few short requests."""
_LENGTH_BYTES = 8
_FAILURE_BYTES = 1024
"""Of a failure's text as other ranks see it; the rest is cut off."""


class GlooChannel:
    """A `DecisionChannel` over the default process group's ranks, which the engine has initialised.

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
