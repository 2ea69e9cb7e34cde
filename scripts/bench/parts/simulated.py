"""Parts whose speed is known: an engine and a trainer that take as long as they are told, between real parts.

The engine is loaded by generator processes (`generator.engine = ".../parts/simulated.py:long_tailed"`), the trainer
takes the place of `System.trainer`. Neither computes anything; weights are really published, pulled and verified.

A simulated engine that never stops before the budget: rollouts of exactly the length that is asked for.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING

from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.generation.config import GeneratorConfig
from titan_rl.generation.engine import StepOutput
from titan_rl.generation.simulated_engine import SimulatedEngine, simulated_engine
from titan_rl.planner.scenario import EngineSpeed, TrainerSpeed
from titan_rl.seeding import derive_seed
from titan_rl.types import GenerationRequest, PolicyVersion, Purpose
from titan_rl.weights.manifest import TIED

if TYPE_CHECKING:
    from torch import Tensor

    from titan_rl.weights.manifest import Publication

ENGINE = EngineSpeed(seconds_per_step=0.012, seconds_per_sequence=0.0001, seconds_per_load=0.05)
TRAINER = TrainerSpeed(
    seconds_per_step=0.4, seconds_per_token=0.0005, seconds_per_publication=0.05, overlap_publication=False
)
MEAN, SPREAD, MOST = 30.0, 1.0, 200
"""Of completions in tokens: log-normal, as answers of reasoning models are; the longest of 64 is 5 times the mean."""
STEADY_SECONDS = 0.04
"""Of a step of `steady`."""


def completion_length(group_id: int, sample: int) -> int:
    """Tokens of the completion of this sample."""
    seed = derive_seed(0, Purpose.TRAIN.value, group_id, sample, 0)
    chance = (seed % (1 << 32) + 0.5) / (1 << 32)
    length = math.exp(math.log(MEAN) - SPREAD**2 / 2 + SPREAD * NormalDist().inv_cdf(chance))
    return min(MOST, max(1, round(length)))


def run_lengths(group_id: int, samples: int) -> list[int]:
    """The same lengths for the planner."""
    return [completion_length(group_id, sample) for sample in range(samples)]


@cache
def _length_of(request_id: str) -> int:
    """Greedy requests, which are evaluations, get one token."""
    purpose, group_id, sample, *_ = request_id.split("-")
    return completion_length(int(group_id), int(sample)) if purpose == Purpose.TRAIN else 1


class Pace:
    """Waits by a schedule that begins when the engine gets something to do. The loop around a step is part of its time,
    as on a device that computes while its host prepares the next step, and a host that was late is made up for."""

    def __init__(self) -> None:
        self._end = 0.0

    def begin(self) -> None:
        self._end = time.monotonic()

    def __call__(self, seconds: float) -> None:
        self._end += seconds
        time.sleep(max(0.0, self._end - time.monotonic()))


class LongTailed(SimulatedEngine):
    """Its completions end when their length says so, not when a stop token happens to be made up."""

    def __init__(self, config: GeneratorConfig, speed: EngineSpeed) -> None:
        super().__init__(max_model_len=config.max_model_len, vocab_size=13, max_num_seqs=config.max_num_seqs)
        self._speed = speed
        self._pace = Pace()

    def length_of(self, request: GenerationRequest) -> int:
        return _length_of(request.request_id)

    def step(self) -> StepOutput:
        self._pace(self._speed.step_seconds(min(len(self.running()), self._max_num_seqs)))
        return super().step()

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: PolicyVersion) -> None:
        if not self.has_work():
            self._pace.begin()
        super().load_weights(tensors, version)
        self._pace(self._speed.seconds_per_load)

    def add(self, request: GenerationRequest) -> None:
        if not self.has_work():
            self._pace.begin()
        super().add(dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, stop_token_ids=())))


def long_tailed(config: GeneratorConfig, model_path: str, device: str) -> SimulatedEngine:
    """For `generator.engine`."""
    return LongTailed(config, ENGINE)


class Steady(LongTailed):
    """Every request gets all its tokens."""

    length_of = SimulatedEngine.length_of


def steady(config: GeneratorConfig, model_path: str, device: str) -> SimulatedEngine:
    """For `generator.engine`, at a pace that four of these keep on two cores."""
    return Steady(config, EngineSpeed(seconds_per_step=STEADY_SECONDS))


class SimulatedTrainer:
    """Takes the place of a `TrainerClient`: one call at a time in the order of arrival, as a rank's thread does."""

    def __init__(self, model_path: Path) -> None:
        import torch

        from titan_rl.weights.publisher import SharedMemoryPublisher
        from titan_rl.weights.tensor_files import shards_of_files

        self._dtype = torch.float32
        self._publisher = SharedMemoryPublisher(channel="simulated", rank=0, group=None, max_live=3)
        self._shards = list(shards_of_files(model_path))
        self._turn = asyncio.Lock()
        self._step = 0
        self.ended_at = 0.0
        """`time.monotonic()` after the last step."""
        self.busy_seconds = 0.0
        """In steps."""
        self.trained: list[int] = []
        """Group ids."""
        self.sampled_tokens = 0

    def require_state(self) -> None: ...

    async def train_step(self, samples: SampleBatch, kept: object = None) -> dict[str, float]:
        async with self._turn:
            seconds = TRAINER.step_seconds(sum(samples.lengths))
            await asyncio.sleep(seconds)
            self._step += 1
            self.busy_seconds += seconds
            self.trained += dict.fromkeys(samples.group_ids)
            self.sampled_tokens += samples.trained_tokens
            self.ended_at = time.monotonic()
            return {"loss": 0.0, "entropy": 0.0}

    async def push_model_state_dict(self) -> Publication:
        async with self._turn:
            await asyncio.sleep(TRAINER.seconds_per_publication)
            return self._publisher.publish(PolicyVersion(0, self._step), self._shards, dtype=self._dtype, aliases=TIED)

    async def release(self, publication: Publication) -> None:
        self._publisher.release(publication.version)

    async def freeze_reference(self) -> None:
        """There is no KL term."""

    async def close(self) -> None:
        self._publisher.close()


class Endless:
    """An engine that forgets stop tokens, and is a simulated one in all else."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def add(self, request: GenerationRequest) -> None:
        self._engine.add(replace(request, sampling=replace(request.sampling, stop_token_ids=(), min_new_tokens=0)))


def endless(config: GeneratorConfig, model_path: str | Path, device: str) -> Endless:
    """For `generator.engine`."""
    return Endless(simulated_engine(config, model_path, device))
