"""The asynchronous loop at max_staleness 0 and the plain synchronous script train bit for bit the same.

Two real runs, about 10 s each on free cores.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from rich.console import Console

from titan_rl.config import EvaluationConfig, RunConfig
from titan_rl.config_registry import copy4
from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.data_plane.store import SharedMemorySource
from titan_rl.loop.loop import TrainingLoop
from titan_rl.loop.recording import Recorder
from titan_rl.loop.system import System
from titan_rl.metrics.rollout_record import ROLLOUTS, RolloutWriter, read_records
from titan_rl.metrics.writer import MetricsWriter
from titan_rl.run.start import start
from titan_rl.types import NO_VERSION, PolicyVersion, TrainingSample
from titan_rl.view.display import RunDisplay

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "minimal_loop.py"


class Trained(NamedTuple):
    """Of one step: everything that reached the trainer."""

    groups: list[int]
    tokens: list[bytes]
    logprobs: list[bytes]
    versions: list[bytes]
    rewards: list[float]
    advantages: list[float]


class Outcome(NamedTuple):
    steps: list[Trained]
    weights: bytes
    """Of the last step."""
    weights_after_one_more: bytes
    """After one more step on samples that are always the same: a function of the optimizer's moments and schedule."""
    next_prompt: int
    exact_match: float
    """Of held-out prompts, after the last step."""


def small(seed: int = 0, generators: int = 2) -> RunConfig:
    recipe = copy4()
    return dataclasses.replace(
        recipe,
        seed=seed,
        deterministic=True,
        loop=dataclasses.replace(recipe.loop, steps=4, groups_per_step=8),
        evaluation=EvaluationConfig(every=2, prompts=20),
        generator=dataclasses.replace(recipe.generator, count=generators),
    )


def record(system: System) -> list[Trained]:
    """What is trained from now on, step by step."""
    steps: list[Trained] = []
    train_step, source = system.trainer.train_step, SharedMemorySource()

    async def recorded(batch: SampleBatch, *kept: Any) -> dict[str, float]:
        samples = source.fetch(batch)
        steps.append(
            Trained(
                groups=[sample.group_id for sample in samples],
                tokens=[sample.token_ids.tobytes() + sample.loss_mask.tobytes() for sample in samples],
                logprobs=[sample.logprobs.tobytes() for sample in samples],
                versions=[sample.versions.tobytes() for sample in samples],
                rewards=[sample.reward for sample in samples],
                advantages=[sample.advantage for sample in samples],
            )
        )
        return await train_step(batch, *kept)

    system.trainer.train_step = recorded  # type: ignore[method-assign]
    return steps


async def by_script(config: RunConfig, directory: Path) -> Outcome:
    minimal_loop, outcomes = load(SCRIPT), []

    @asynccontextmanager
    async def looked_at(config: RunConfig) -> AsyncIterator[System]:
        async with start(config, log_directory=directory / "logs") as system:
            steps = record(system)
            yield system
            prompts = config.loop.steps * config.loop.groups_per_step
            outcomes.append(Outcome(steps[:], *await weights_of(system, directory), prompts, exact_match=-1.0))

    minimal_loop.start = looked_at
    exact_match = await minimal_loop.main(config)
    return outcomes[0]._replace(exact_match=exact_match)


async def by_loop(config: RunConfig, directory: Path) -> Outcome:
    display = RunDisplay(steps=config.loop.steps, live=False, console=Console(file=io.StringIO()))
    async with start(config, log_directory=directory / "logs") as system:
        steps = record(system)
        recorder = Recorder(system.rollouts, RolloutWriter(directory), each=1)
        metrics = MetricsWriter(directory, tensorboard=False)
        loop = TrainingLoop(system, display=display, metrics=metrics, recorder=recorder)
        evaluations = (await loop.run()).evaluations
        await recorder.settled()
        recorded = [each.step for each in read_records(directory / ROLLOUTS) if "best" in each.kept]
        assert recorded == [*range(1, config.loop.steps + 1)]
        await loop.end(failed=False)
        trained, admitted = steps[:], loop.ledger.buffer.counts["admitted"]
        return Outcome(trained, *await weights_of(system, directory), admitted, evaluations[-1].exact_match)


async def weights_of(system: System, directory: Path) -> tuple[bytes, bytes]:
    await system.trainer.save(directory / "end")
    await system.trainer.train_step(SampleBatch.of(sample(number) for number in range(2)))
    await system.trainer.save(directory / "one_more")
    return tuple((directory / name / "model.safetensors").read_bytes() for name in ("end", "one_more"))


def sample(number: int) -> TrainingSample:
    mask = np.arange(8) >= 5
    return TrainingSample(
        group_id=10_000,
        sample=number,
        token_ids=np.array([6, 4, 9, 3, 12, 6, 4 + number, 9], np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -2.5, 0).astype(np.float32),
        versions=np.where(mask, PolicyVersion(0, 4).encode(), NO_VERSION),
        advantages=1.0 - 2 * number,
        reward=1.0 - number,
    )


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_at_staleness_0_the_loop_trains_what_the_plain_script_trains(tmp_path: Path) -> None:
    """Token ids, logprobs, versions, rewards, advantages, weights, optimizer and the place in the stream of prompts."""
    loop = await by_loop(small(generators=1), tmp_path / "loop")
    script = await by_script(small(generators=1), tmp_path / "script")
    assert [step.groups[0] for step in loop.steps] == [0, 8, 16, 24]
    assert loop == script


@pytest.mark.acceptance
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_the_same_seed_twice_is_the_same_run_and_another_seed_is_not(tmp_path: Path, dtype: str) -> None:
    def config(seed: int) -> RunConfig:
        plain = small(seed)
        return dataclasses.replace(plain, generator=dataclasses.replace(plain.generator, dtype=dtype))

    first, again, other = [
        await by_loop(config(seed), tmp_path / name) for seed, name in ((0, "a"), (0, "b"), (1, "c"))
    ]
    assert first == again
    assert other.weights != first.weights
