"""Two trainer ranks, of which one dies again and again: what that costs, and that it changes no bit. About 40 s."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from dying_trainer import DEATH, DyingTrainer
from support.meshes import mesh_plan
from test_trainer import batch

from titan_rl.actors.trainer_client import Trainer
from titan_rl.errors import ActorFailed, TrainerStateLost
from titan_rl.launch.provisioner import Provisioner
from titan_rl.policy.config import KLConfig, OptimizerConfig, TinyPolicyConfig, TrainerConfig, WarmupConfig
from titan_rl.policy.models.tiny import make_tiny_policy
from titan_rl.types import PolicyVersion
from titan_rl.weights.config import WeightsConfig
from titan_rl.weights.manifest import Publication
from titan_rl.weights.puller import SharedMemoryReader
from titan_rl.weights.segment_files import DIRECTORY, remove_segments_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

BOUND = 300.0
"""Seconds for any one call."""

CONFIG = TrainerConfig(
    data_parallel=2,
    optimizer=OptimizerConfig(lr=1e-3, warmup_steps=2, decay_ratio=0.5),
    kl=KLConfig(coefficient=1e-2),
    warmup=WarmupConfig(steps=3, lr_warmup_steps=1),
)


class Lossy:
    """A trainer that is spawned again whenever one of its ranks ends."""

    def __init__(self, scratch: Path) -> None:
        self.model = make_tiny_policy(TinyPolicyConfig(), scratch)
        self._loop = asyncio.get_running_loop()
        self.said: list[str] = []
        self.deaths = 0
        self._replacing: asyncio.Task[None] | None = None
        self._provisioner = Provisioner(log_directory=str(scratch), imports=(), on_fault=self._heard)
        self.trainer = Trainer(
            self._spawn(), CONFIG, start_seconds=BOUND, step_seconds=BOUND, on_hung=self._lost, say=self.said.append
        )

    def _spawn(self) -> Any:
        return self._provisioner.spawn(mesh_plan("trainer", 2, beside=__file__)).spawn(
            "trainer",
            DyingTrainer,
            CONFIG,
            WeightsConfig(max_live=3),
            model_path=str(self.model),
            served_dtype="float32",
            temperature=1.0,
            total_steps=10,
            device="cpu",
            seed=0,
            copies=True,
        )

    def _heard(self, fault: ActorFailed) -> None:
        self._loop.call_soon_threadsafe(self._lost, str(fault))

    def _lost(self, reason: str) -> None:
        if self._replacing is None or self._replacing.done():
            self.deaths += 1
            self.trainer.lose(reason)
            self._replacing = asyncio.ensure_future(self._replace())

    async def _replace(self) -> None:
        await self._provisioner.stop("trainer")
        self.trainer.replace(self._spawn())
        await self.trainer.setup()

    def dies(self, when: str) -> None:
        (self.model / DEATH).write_text(when)

    async def close(self) -> None:
        await self._provisioner.stop_all()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lossy(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lossy]:
    lossy = Lossy(tmp_path_factory.mktemp("trainer"))
    try:
        await lossy.trainer.setup()
        yield lossy
    finally:
        await lossy.close()
        remove_segments_of(os.getpid())


def content(publication: Publication) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in SharedMemoryReader().tensors(publication)}


def fingerprints(publication: Publication) -> list[int]:
    return [entry.fingerprint for entry in publication.manifest.entries]


async def trained(trainer: Trainer, step: int) -> dict[str, float]:
    report = await trainer.train_step(batch(step))
    del report["seconds"]
    return report


async def test_a_rank_that_dies_costs_a_retry_and_no_bit(lossy: Lossy) -> None:
    trainer = lossy.trainer
    await trainer.freeze_reference()
    kept = await trainer.push_model_state_dict()
    weights = content(kept)
    reports = [await trained(trainer, step) for step in range(4)]
    expected = await trainer.push_model_state_dict()
    await trainer.release(expected)

    for copy in DIRECTORY.glob(f"titan_rl-{os.getpid()}-state.1-[01]"):
        with open(copy, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
    os.kill(trainer.pids[0], signal.SIGKILL)
    with pytest.raises(TrainerStateLost, match=r"no copy of v4 is usable: rank 1: the copy at .*1-0 is damaged"):
        await trainer.train_step(batch(4))
    assert lossy.deaths == 1
    assert all(torch.equal(tensor, weights[name]) for name, tensor in content(kept).items())

    await trainer.restore(None, 1)
    await trainer.freeze_reference()
    again = [await trained(trainer, 0)]
    lossy.dies("before copy 2 of rank 1")
    again.append(await trained(trainer, 1))
    await trainer.release(kept)
    again.append(await trained(trainer, 2))
    again.append(await trained(trainer, 3))
    assert lossy.deaths == 2
    assert again == reports
    end = await trainer.push_model_state_dict()
    assert end.version == PolicyVersion(1, 4)
    assert fingerprints(end) == fingerprints(expected)

    for _ in range(2):  # both other slots are free
        await trained(trainer, 4)
        await trainer.push_model_state_dict()
    assert lossy.said == []
    await trainer.close()
    assert not list(DIRECTORY.glob(f"titan_rl-{os.getpid()}-*"))
