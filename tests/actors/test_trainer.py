"""Trainer ranks: calls in the order of their numbers; a real mesh of two ranks warms up, freezes its reference, trains
against it and publishes. About 20 s.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio

from titan_rl.actors.trainer import CallQueue, PolicyTrainer
from titan_rl.actors.trainer_client import Trainer
from titan_rl.config import RunConfig
from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.errors import ActorFailed, TrainingError, WeightsError
from titan_rl.launch.hosts.facts import detect_host
from titan_rl.launch.placement import plan
from titan_rl.launch.provisioner import Provisioner
from titan_rl.policy.config import KLConfig, OptimizerConfig, TinyPolicyConfig, TrainerConfig, WarmupConfig
from titan_rl.policy.kept_tokens import KeptTokens
from titan_rl.policy.models.tiny import make_tiny_policy
from titan_rl.types import NO_VERSION, PolicyVersion, TrainingSample
from titan_rl.weights.config import WeightsConfig


async def test_calls_that_arrive_out_of_order_run_in_order() -> None:
    queue, ran = CallQueue(rank=0), []
    calls = [
        asyncio.create_task(queue.run(number, lambda number=number: ran.append(number))) for number in (2, 0, 3, 1)
    ]
    await asyncio.gather(*calls)
    assert ran == [0, 1, 2, 3]


async def test_a_number_that_came_before_is_refused() -> None:
    queue = CallQueue(rank=3)
    await queue.run(0, lambda: None)
    with pytest.raises(TrainingError, match="trainer rank 3 got call 0 again"):
        await queue.run(0, lambda: None)


async def test_a_call_that_raises_does_not_stop_the_next() -> None:
    queue = CallQueue(rank=0)

    def fail() -> None:
        raise TrainingError("NaN in the loss")

    first = asyncio.create_task(queue.run(0, fail))
    second = asyncio.create_task(queue.run(1, lambda: "ran"))
    with pytest.raises(TrainingError, match="NaN"):
        await first
    assert await second == "ran"


pytestmark = pytest.mark.asyncio(loop_scope="module")

BOUND = 300.0
"""Seconds for any one call."""


def batch(version: int) -> SampleBatch:
    rng = np.random.default_rng(0)

    def sample(number: int) -> TrainingSample:
        mask = np.arange(8) >= 5
        return TrainingSample(
            group_id=number // 2,
            sample=number % 2,
            token_ids=rng.integers(2, 13, 8).astype(np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, -2.5, 0).astype(np.float32),
            versions=np.where(mask, version, NO_VERSION).astype(np.int64),
            advantage=float(rng.standard_normal()),
            reward=0.0,
        )

    return SampleBatch.of([sample(number) for number in range(8)])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trainer(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Trainer]:
    config = TrainerConfig(
        data_parallel=2,
        optimizer=OptimizerConfig(lr=1e-3),
        kl=KLConfig(coefficient=1e-3),
        warmup=WarmupConfig(steps=3, lr_warmup_steps=1),
    )
    scratch = tmp_path_factory.mktemp("trainer")
    faults: list[ActorFailed] = []
    provisioner = Provisioner(log_directory=str(scratch), imports=(), on_fault=faults.append)
    try:
        mesh = provisioner.spawn(plan(RunConfig(trainer=config), detect_host()).mesh("trainer")).spawn(
            "trainer",
            PolicyTrainer,
            config,
            WeightsConfig(),
            model_path=str(make_tiny_policy(TinyPolicyConfig(), scratch)),
            served_dtype="bfloat16",
            temperature=1.0,
            total_steps=10,
            device="cpu",
            seed=0,
            copies=True,
        )
        handle = Trainer(mesh, config, start_seconds=BOUND, step_seconds=BOUND)
        await handle.setup()
        yield handle
        await handle.close()
    finally:
        await provisioner.stop_all()
    assert not faults


async def test_the_stages_of_a_run_follow_each_other(trainer: Trainer) -> None:
    with pytest.raises(TrainingError, match="freeze_reference"):
        await trainer.train_step(batch(0))

    losses = [(await trainer.warm_up_step(batch(0)))["loss"] for _ in range(3)]
    assert losses[2] < losses[0]
    served = await trainer.push_model_state_dict()
    assert served.version == PolicyVersion(0, 0)  # warm-up steps are no versions

    await trainer.freeze_reference()
    metrics = [await trainer.train_step(batch(step)) for step in range(3)]
    assert metrics[0]["reference_kl_k3"] == 0.0  # float32, although generators are served bfloat16
    assert 0 < metrics[1]["reference_kl_k3"] < metrics[2]["reference_kl_k3"]

    newest = await trainer.push_model_state_dict()
    assert (newest.channel, newest.version) == ("policy", PolicyVersion(0, 3))
    assert {entry.dtype for entry in newest.manifest.entries} == {"bfloat16"}
    await trainer.release(served)
    with pytest.raises(WeightsError, match="cannot be released"):
        await trainer.release(served)

    await trainer.freeze_reference()
    assert (await trainer.train_step(batch(3)))["reference_kl_k3"] == 0.0


class PickledSoOften:
    def __init__(self, times: int) -> None:
        self.times = times

    def __reduce__(self) -> tuple[type, tuple[int]]:
        self.times -= 1
        if self.times < 0:
            raise TypeError("not once more")
        return PickledSoOften, (self.times,)


async def test_a_call_that_cannot_be_sent_is_refused_and_hangs_nobody(trainer: Trainer) -> None:
    hung: list[str] = []
    trainer._on_hung = hung.append
    with pytest.raises(TypeError, match="not once more"):
        await trainer.train_step(batch(4), KeptTokens([PickledSoOften(0)]))  # type: ignore[list-item]
    assert (await trainer.train_step(batch(4)))["loss"] and not hung
    with pytest.raises(TypeError, match="not once more"):
        await trainer.train_step(batch(5), KeptTokens([PickledSoOften(1)]))  # type: ignore[list-item]
    assert hung == ["trainer: a call could not be sent to rank 1: not once more"]
