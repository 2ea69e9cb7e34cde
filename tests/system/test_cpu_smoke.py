"""The single-node guard: 2 FSDP ranks and 2 generators of 2 tensor-parallel ranks, every part real.

One system is brought up (about 30 s); each test looks at one thing that flowed through it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from titan_rl import config_registry
from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.data_plane.store import SharedMemorySource
from titan_rl.policy.token_score_recorder import TokenScoreRecorder
from titan_rl.rollout.report import GroupReport
from titan_rl.run.start import start
from titan_rl.types import PolicyVersion, TrainingSample

TRUNCATION = {"top_p": 0.8, "top_k": 5}
TOLERANCE = 2e-5
"""Largest float32 difference between an engine's logprob and the trainer's at the same version."""

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Step:
    """What one step produced, and how the trainer scores its trained tokens."""

    reports: list[GroupReport]
    samples: tuple[TrainingSample, ...]
    version: PolicyVersion
    at_version: dict[tuple[int, int], np.ndarray]
    after_update: dict[tuple[int, int], np.ndarray]
    metrics: dict[str, float]
    held: int
    """Samples in the stores after the step."""


@dataclass
class Flow:
    """Everything that the tests look at."""

    steps: list[Step]
    truncated: tuple[tuple[TrainingSample, np.ndarray, np.ndarray], ...]
    """Of another batch, sampled with `TRUNCATION`: each sample with the trainer's logprobs, and with those over the
    whole vocabulary."""
    fleet: list[Any]
    ends: list[BaseException | None]
    """Of each generator's engine loops."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def flow() -> AsyncIterator[Flow]:
    config = config_registry.cpu_smoke()
    steps: list[Step] = []
    source = SharedMemorySource()
    async with start(config) as system:
        publication = await system.trainer.push_model_state_dict()
        await system.router.pull_model_state_dict(publication)
        for step in range(config.loop.steps):
            groups = config.loop.groups_per_step
            requests = [
                system.train_group(prompt, publication.version, config.rollout.samples_per_group)
                for prompt in range(step * groups, (step + 1) * groups)
            ]
            reports = await system.rollouts.run_groups(requests)
            batch = SampleBatch.concat(report.samples for report in reports)
            samples = source.fetch(batch)
            names = [(sample.group_id, sample.sample) for sample in samples]
            at_version, after_update = TokenScoreRecorder(names), TokenScoreRecorder(names)
            metrics = await system.trainer.train_step(batch, at_version)
            await system.trainer.train_step(batch, after_update)
            held = await system.rollouts.release(batch)
            steps.append(
                Step(
                    reports,
                    samples,
                    publication.version,
                    {name: scores.logprobs for name, scores in at_version.scores.items()},
                    {name: scores.logprobs for name, scores in after_update.scores.items()},
                    metrics,
                    sum(store.samples for store in held),
                )
            )
            previous, publication = publication, await system.trainer.push_model_state_dict()
            await system.router.pull_model_state_dict(publication)
            await system.trainer.release(previous)
        request = system.train_group(100, publication.version, config.rollout.samples_per_group)
        request = replace(request, sampling=replace(request.sampling, **TRUNCATION))
        (report,) = await system.rollouts.run_groups([request])
        samples = source.fetch(report.samples)
        await system.rollouts.release(report.samples)
        whole = [replace(sample, group_id=101, supports=None) for sample in samples]
        scored = TokenScoreRecorder((each.group_id, each.sample) for each in (*samples, *whole))
        await system.trainer.train_step(SampleBatch.of([*samples, *whole]), scored)
        by_name = {name: scores.logprobs for name, scores in scored.scores.items()}
        truncated = tuple((each, by_name[100, each.sample], by_name[101, each.sample]) for each in samples)
        fleet = await system.router.fleet_status()
        generators = system.generators().values()
        ends = await asyncio.gather(*(each.close() for each in generators), return_exceptions=True)
    yield Flow(steps, truncated, fleet, ends)


async def test_the_engine_and_the_trainer_agree_at_the_sampling_version(flow: Flow) -> None:
    for step in flow.steps:
        for sample in step.samples:
            trained = step.at_version[sample.group_id, sample.sample]
            assert np.abs(trained - sample.logprobs[sample.loss_mask]).max() <= TOLERANCE


async def test_they_agree_about_tokens_that_were_drawn_from_a_part_of_the_vocabulary(flow: Flow) -> None:
    behaviour = np.concatenate([sample.logprobs[sample.loss_mask] for sample, _, _ in flow.truncated])
    over_support, over_all = (np.concatenate(each) for each in list(zip(*flow.truncated, strict=True))[1:])
    assert len(behaviour) > 16
    assert np.exp(over_support - behaviour).mean() == pytest.approx(1, abs=1e-5)
    assert np.exp(over_all - behaviour).mean() < 0.95, "otherwise this proves nothing"


async def test_they_differ_from_the_version_before(flow: Flow) -> None:
    """Otherwise agreement would prove nothing: an engine that never took new weights would pass."""
    for before, step in zip(flow.steps[:-1], flow.steps[1:], strict=True):
        assert step.version == PolicyVersion(0, before.version.step + 2)
        differences = [np.abs(before.after_update[key] - before.at_version[key]).max() for key in before.at_version]
        assert max(differences) > 10 * TOLERANCE


async def test_every_sampled_token_carries_the_version_that_sampled_it(flow: Flow) -> None:
    for step in flow.steps:
        for sample in step.samples:
            assert set(sample.versions[sample.loss_mask].tolist()) == {step.version.encode()}
            assert set(sample.versions[~sample.loss_mask].tolist()) == {-1}


async def test_the_mask_covers_exactly_what_the_engine_sampled(flow: Flow) -> None:
    """A prompt of four digits and an equals sign, then what was sampled: as many tokens as the engines counted."""
    for step in flow.steps:
        samples = {(sample.group_id, sample.sample): sample for sample in step.samples}
        for report in step.reports:
            for rollout in report.rollouts:
                sample = samples[report.group_id, rollout.sample]
                sampled = int(sample.loss_mask.sum())
                assert sampled == rollout.sampled_tokens
                assert sample.loss_mask.tolist() == [False] * 5 + [True] * sampled


async def test_the_controller_saw_references_and_the_stores_are_empty(flow: Flow) -> None:
    for step in flow.steps:
        assert {report.samples.samples for report in step.reports} == {None}
        assert step.held == 0


async def test_the_ranks_of_each_generator_did_the_same(flow: Flow) -> None:
    """A rank that closes compares its digest of everything with rank 0's, and fails if they differ."""
    assert flow.ends == [None, None]


async def test_both_generators_served_and_nothing_is_in_flight(flow: Flow) -> None:
    assert [status.state for status in flow.fleet] == ["serving", "serving"]
    assert [status.version for status in flow.fleet] == [f"v{2 * len(flow.steps)}"] * 2
    assert all(status.served > 0 and status.failed == 0 for status in flow.fleet)
    assert all(status.in_flight == 0 and status.load == 0 for status in flow.fleet)


async def test_the_trainer_measured_the_same_agreement(flow: Flow) -> None:
    for step in flow.steps:
        assert step.metrics["on_policy_tokens"] == step.metrics["trained_tokens"] > 0
        assert step.metrics["logprob_difference_max"] <= TOLERANCE
        assert step.metrics["grad_norm"] > 0
