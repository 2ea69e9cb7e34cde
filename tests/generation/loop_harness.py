"""Requests, publications and engine loops for the tests of generation.

The engines are simulated; a test lets their steps through one by one."""

from __future__ import annotations

import queue
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

from titan_rl.generation.config import GeneratorConfig
from titan_rl.generation.engine import Engine
from titan_rl.generation.engine_loop import EngineLoop
from titan_rl.generation.lockstep import Lockstep
from titan_rl.generation.simulated_engine import SimulatedEngine, simulated_token
from titan_rl.policy.config import TinyPolicyConfig
from titan_rl.policy.models.tiny import make_tiny_policy
from titan_rl.types import Completion, GenerationRequest, Piece, PolicyVersion, SamplingParams
from titan_rl.weights.manifest import Manifest, Publication
from titan_rl.weights.ranks import Ranks

PROMPT = (2, 3, 4, 5, 12)
LONG_PROMPT = tuple(2 + index * 7 % 11 for index in range(40))
"""Longer than a KV block, so that the prefix cache has something to keep."""

SHARPER = 8.0
"""Factor on the matrices of a fresh policy, whose next-token distribution would be almost uniform otherwise."""

SWAPS = (
    ("tied", "float32", "plain"),
    ("untied", "float32", "plain"),
    ("tied", "bfloat16", "plain"),
    ("untied", "bfloat16", "plain"),
    ("tied", "float32", "packed"),
    ("untied", "bfloat16", "packed"),
    ("llama", "float32", "packed"),
    ("llama", "bfloat16", "plain"),
    ("moe", "float32", "plain"),
    ("moe", "bfloat16", "packed"),
)
"""Engines that take new weights: of which models, dtype, linear layers."""
SWAPS_OF_CI = (SWAPS[0], SWAPS[4], SWAPS[6], SWAPS[8])


def sharper_policy(config: TinyPolicyConfig, directory: Path) -> str:
    """A checkpoint of a tiny policy in a new directory."""
    shutil.copytree(make_tiny_policy(config, directory.parent), directory)
    tensors = load_file(directory / "model.safetensors")
    sharper = {name: tensor * SHARPER if tensor.ndim == 2 else tensor for name, tensor in tensors.items()}
    save_file(sharper, directory / "model.safetensors", metadata={"format": "pt"})
    return str(directory)


def make_request(
    name: str,
    *,
    prompt: Sequence[int] = PROMPT,
    new: int = 8,
    seed: int = 0,
    min_version: tuple[int, int] = (0, 0),
    **sampling: Any,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=np.array(prompt, dtype=np.int32),
        sampling=SamplingParams(max_new_tokens=new, **sampling),
        seed=seed,
        min_version=PolicyVersion(*min_version),
    )


def streaming(name: str, *, start: int = 0, new: int = 8, seed: int = 0) -> GenerationRequest:
    return replace(make_request(name, new=new, seed=seed), stream_from=start)


def simulated_tokens(seed: int, count: int, vocab_size: int) -> list[int]:
    """What a simulated engine samples for `PROMPT`."""
    return [simulated_token(seed, len(PROMPT) + index, vocab_size) for index in range(count)]


def make_publication(step: int, *, incarnation: int = 0, location: str = "") -> Publication:
    return Publication(
        channel="policy",
        version=PolicyVersion(incarnation, step),
        manifest=Manifest(entries=(), nbytes=64),
        location=location,
    )


BOUND = 30.0
"""Seconds after which a test that waits for something fails."""
VOCAB = 13


class Turnstile:
    """Stands in for `sleep`: every engine step stops here until the test lets it through."""

    def __init__(self) -> None:
        self._arrived = threading.Semaphore(0)
        self._allowed = threading.Semaphore(0)
        self._open = False

    def __call__(self, seconds: float) -> None:
        self._arrived.release()
        if not self._open:
            assert self._allowed.acquire(timeout=BOUND), "a step was never let through"

    def wait_for_step(self) -> None:
        """Until the engine is inside of a step."""
        assert self._arrived.acquire(timeout=BOUND), "no step came"

    def let_through(self, steps: int = 1) -> None:
        """Let the current step end, and `steps - 1` more after it; the engine then waits in the next one."""
        for index in range(steps):
            if index:
                self.wait_for_step()
            self._allowed.release()

    def open(self) -> None:
        self._open = True
        self._allowed.release()


class Collector:
    """`on_completions`, `on_pieces` and `on_fatal` of a loop, and its lockstep."""

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self.completions: dict[str, Completion] = {}
        self.pieces: dict[str, list[Piece]] = {}
        self.errors: queue.Queue[BaseException] = queue.Queue()
        self.lockstep: Lockstep | None = None  # of its loop, once that is started

    @property
    def digest(self) -> int:
        assert self.lockstep is not None
        return self.lockstep.digest

    def add(self, completions: list[Completion]) -> None:
        with self._arrived:
            for completion in completions:
                assert completion.request_id not in self.completions, "answered twice"
                self.completions[completion.request_id] = completion
            self._arrived.notify_all()

    def add_pieces(self, pieces: list[Piece]) -> None:
        with self._arrived:
            for piece in pieces:
                assert piece.request_id not in self.completions, "a piece after the completion"
                self.pieces.setdefault(piece.request_id, []).append(piece)
            self._arrived.notify_all()

    def wait_for_pieces(self, name: str, end: int) -> list[Piece]:
        """All pieces of a request, once they reach to position `end`."""
        with self._arrived:
            assert self._arrived.wait_for(
                lambda: name in self.pieces and self.pieces[name][-1].end >= end, timeout=BOUND
            )
            return list(self.pieces[name])

    def wait_for(self, *names: str) -> list[Completion]:
        with self._arrived:
            assert self._arrived.wait_for(lambda: all(name in self.completions for name in names), timeout=BOUND)
            return [self.completions[name] for name in names]

    def fatal(self) -> BaseException:
        return self.errors.get(timeout=BOUND)


class Wires:
    """Between ranks that are threads of one process."""

    def __init__(self, ranks: int) -> None:
        self.decisions = [queue.Queue[Any]() for _ in range(ranks)]
        self.values: list[Any] = [None] * ranks
        self.barrier = threading.Barrier(ranks, timeout=BOUND)


class InProcessRanks(Ranks):
    """One rank's end of the wires."""

    def __init__(self, wires: Wires, rank: int) -> None:
        super().__init__(None)
        self._wires = wires
        self._rank = rank

    def broadcast(self, value: Any) -> Any:
        if self._rank:
            return self._wires.decisions[self._rank].get(timeout=BOUND)
        for each in self._wires.decisions[1:]:
            each.put(value)
        return value

    def gather(self, value: Any) -> list[Any]:
        self._wires.values[self._rank] = value
        self._wires.barrier.wait()
        gathered = list(self._wires.values)
        self._wires.barrier.wait()
        return gathered

    def maximum(self, values: Tensor) -> None:
        values.copy_(torch.stack(self.gather(values.clone())).amax(0))


def no_tensors(publication: Publication) -> Iterable[tuple[str, Any]]:
    return ()


def all_well(publication: Publication, engine: Engine) -> int:
    return 7


MADE: list[EngineLoop] = []
"""By `make_loop`, during this test."""


def make_loop(
    collector: Collector,
    *,
    engine: Callable[[], Engine] = SimulatedEngine,
    rank: int = 0,
    device: str = "cpu",
    burst_steps: int = 1,
    heartbeat_seconds: float = 5.0,
    ranks: Ranks | None = None,
    load: Callable[[Publication], Iterable[tuple[str, Any]]] = no_tensors,
    verify: Callable[[Publication, Engine], int] = all_well,
) -> EngineLoop:
    def make_lockstep(*_: object) -> Lockstep:
        collector.lockstep = Lockstep(
            engine(), rank=rank, ranks=ranks or Ranks(None), load_publication=load, verify=verify
        )
        return collector.lockstep

    tensor_parallel = 2 if ranks else 1
    loop = EngineLoop(
        GeneratorConfig(burst_steps=burst_steps, heartbeat_seconds=heartbeat_seconds, tensor_parallel=tensor_parallel),
        rank=rank,
        model_path=Path(),
        device=device,
        make_lockstep=make_lockstep,
        on_completions=collector.add,
        on_pieces=collector.add_pieces,
        on_fatal=collector.errors.put,
    )
    MADE.append(loop)
    return loop


def make_ranks(
    collectors: list[Collector], engines: list[Callable[[], Engine]], *, burst_steps: int = 4, **kwargs: Any
) -> tuple[EngineLoop, EngineLoop]:
    """Rank 0 and its follower, started."""
    wires = Wires(2)
    loops = [
        make_loop(
            collectors[rank],
            engine=engines[rank],
            rank=rank,
            ranks=InProcessRanks(wires, rank),
            burst_steps=burst_steps,
            **{name: value[rank] if isinstance(value, tuple) else value for name, value in kwargs.items()},
        )
        for rank in range(2)
    ]
    for loop in loops:
        loop.start().result(timeout=BOUND)
    return loops[0], loops[1]
