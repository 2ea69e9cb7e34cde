"""Trainer ranks: calls in the order of their numbers; a real mesh of two ranks warms up, freezes its reference, trains
against it and publishes; then one of them dies again and again, which changes no bit. About 35 s.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from dying_trainer import DEATH, DyingTrainer
from monarch.actor import this_proc
from support.meshes import mesh_plan

from titan_rl.actors.trainer import PolicyTrainer
from titan_rl.actors.trainer_client import TrainerClient
from titan_rl.config import LoopConfig, PlacementConfig, RunConfig, WeightsConfig
from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.errors import ActorFailed, RollbackNeeded, TrainingError, WeightsError
from titan_rl.generation.config import GeneratorConfig
from titan_rl.policy.config import KLConfig, OptimizerConfig, TinyPolicyConfig, TrainerConfig, WarmupConfig
from titan_rl.policy.models.tiny import make_tiny_policy
from titan_rl.policy.token_score_recorder import TokenScoreRecorder
from titan_rl.rpc.connection import ConnectedActor, endpoint
from titan_rl.rpc.mesh_client import until_still
from titan_rl.supervision.fork_server import Stage
from titan_rl.supervision.placement import Kind
from titan_rl.supervision.provisioner import Provisioner
from titan_rl.types import NO_VERSION, PolicyVersion, TrainingSample
from titan_rl.weights.manifest import Publication
from titan_rl.weights.puller import SharedMemoryReader
from titan_rl.weights.segment_files import DIRECTORY, remove_segments_of


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> PolicyTrainer:
    monkeypatch.setenv("RANK", "3")
    return PolicyTrainer(RunConfig(), model_path="", device="cpu")


async def test_calls_run_in_the_order_in_which_they_arrive(rank: PolicyTrainer) -> None:
    ran: list[int] = []
    calls = [asyncio.create_task(rank.in_turn(number, lambda number=number: ran.append(number))) for number in range(4)]
    await asyncio.gather(*calls)
    assert ran == [0, 1, 2, 3]


@pytest.mark.parametrize("number", [0, 2])
async def test_a_call_whose_turn_it_is_not_is_refused(rank: PolicyTrainer, number: int) -> None:
    await rank.in_turn(0, lambda: None)
    with pytest.raises(TrainingError, match=f"trainer rank 3 got call {number}, and the next is 1"):
        await rank.in_turn(number, lambda: None)
    assert await rank.in_turn(1, lambda: "ran") == "ran"


async def test_a_call_that_raises_does_not_stop_the_next(rank: PolicyTrainer) -> None:
    def fail() -> None:
        raise TrainingError("NaN in the loss")

    first = asyncio.create_task(rank.in_turn(0, fail))
    second = asyncio.create_task(rank.in_turn(1, lambda: "ran"))
    with pytest.raises(TrainingError, match="NaN"):
        await first
    assert await second == "ran"


class Rank(ConnectedActor):
    """Notes its peers, and never answers those that are called old. It saves what it was set up to be."""

    def __init__(self) -> None:
        self.peers: list[dict[str, str]] = []
        self.is_set_up = False

    @endpoint
    async def open_rendezvous(self) -> str:
        return ""

    @endpoint
    async def setup(self, sequence: int, *settings: object) -> int:
        self.is_set_up = True
        return 0

    @endpoint
    async def save(self, sequence: int, directory: str) -> int:
        assert self.is_set_up
        return 7

    @endpoint
    async def set_peers(self, sequence: int, stores: dict[str, str]) -> None:
        self.peers.append(stores)
        if "old" in stores:
            await asyncio.Event().wait()

    @endpoint
    async def noted(self) -> list[dict[str, str]]:
        return self.peers


async def test_peers_that_changed_while_the_ranks_were_replaced_are_not_overwritten_by_those_before() -> None:
    first, second = (this_proc().spawn(name, Rank) for name in ("first", "second"))
    trainer = TrainerClient(RunConfig(), start_seconds=BOUND)
    trainer.replace([first])
    await trainer.setup(stores={"first": "worker"})
    waiting = asyncio.create_task(trainer.set_peers(stores={"old": "worker"}))
    await asyncio.sleep(0)
    trainer.lose("it was killed")
    trainer.replace([second])
    await trainer.setup(stores={"new": "worker"})
    await asyncio.wait_for(waiting, BOUND)
    sent = await trainer.ranks[0].call(BOUND, Rank.noted)
    assert set().union(*sent) == {"new"}
    await trainer.set_peers(stores={"new": "worker"})
    assert await trainer.ranks[0].call(BOUND, Rank.noted) == sent, "peers that have not changed are not sent"
    await trainer.ranks[0].close()


async def test_no_call_reaches_ranks_before_they_are_set_up() -> None:
    first, second = (this_proc().spawn(name, Rank) for name in ("dies", "follows"))
    trainer = TrainerClient(RunConfig(), start_seconds=BOUND)
    trainer.replace([first])
    await trainer.setup()
    trainer.replace([second])  # the first died before the supervisor heard that it was set up
    saving = asyncio.create_task(trainer.save(Path("anywhere")))
    await asyncio.sleep(0)
    await trainer.setup()
    assert await asyncio.wait_for(saving, BOUND) == 7
    await trainer.ranks[0].close()


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
            advantages=float(rng.standard_normal()),
            reward=0.0,
        )

    return SampleBatch.of([sample(number) for number in range(8)])


CONFIG = RunConfig(
    trainer=TrainerConfig(
        data_parallel=2,
        optimizer=OptimizerConfig(lr=1e-3, warmup_steps=2, decay_ratio=0.5),
        kl=KLConfig(coefficient=1e-2),
        warmup=WarmupConfig(steps=3, lr_warmup_steps=1),
    ),
    weights=WeightsConfig(max_live=3),
    generator=GeneratorConfig(dtype="bfloat16"),
    loop=LoopConfig(steps=10),
    placement=PlacementConfig(step_seconds=BOUND),
)


class Lossy:
    """A trainer that is spawned again whenever one of its ranks ends."""

    def __init__(self, scratch: Path) -> None:
        self.model = make_tiny_policy(TinyPolicyConfig(), scratch)
        self._loop = asyncio.get_running_loop()
        self.said: list[str] = []
        self.pids: list[int] = []
        self.deaths = 0
        self._replacing: asyncio.Task[None] | None = None
        self._plan = mesh_plan("trainer", 2, beside=__file__)
        imports = ("titan_rl.policy.updater:import_torchtitan", "titan_rl.weights.fingerprint")
        stage = Stage(name="torchtitan", kinds=tuple(Kind), environment=self._plan.env[0], imports=imports)
        self._provisioner = Provisioner(
            log_directory=str(scratch), imports=(), on_fault=self._heard, stage=lambda host: stage
        )
        self.trainer = TrainerClient(CONFIG, start_seconds=BOUND, on_hung=self._lost, say=self.said.append)
        self.trainer.replace(self._spawn())

    def _spawn(self) -> Any:
        return self._provisioner.spawn(self._plan).spawn(
            "trainer", DyingTrainer, CONFIG, model_path=str(self.model), device="cpu"
        )

    def _heard(self, fault: ActorFailed) -> None:
        self._loop.call_soon_threadsafe(self._lost, str(fault))

    def _lost(self, reason: str, kind: object = None) -> None:
        if self._replacing is None or self._replacing.done():
            self.deaths += 1
            self.trainer.lose(reason)
            self._replacing = asyncio.ensure_future(self._replace())

    async def _replace(self) -> None:
        await self._provisioner.stop("trainer")
        self.trainer.replace(self._spawn())
        self.pids = await self.trainer.setup()

    def dies(self, when: str) -> None:
        (self.model / DEATH).write_text(when)

    async def close(self) -> None:
        await self._provisioner.stop_all()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lossy(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lossy]:
    """Its ranks are forked from a process that has imported torchtitan, as those of a run are."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in mesh_plan("trainer", beside=__file__).env[0].items():
            patch.setenv(name, value)
        lossy = Lossy(tmp_path_factory.mktemp("trainer"))
        try:
            lossy.pids = await lossy.trainer.setup()
            yield lossy
        finally:
            await lossy.close()
            remove_segments_of(os.getpid())


async def test_the_stages_of_a_run_follow_each_other(lossy: Lossy) -> None:
    trainer = lossy.trainer
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
    await trainer.release(newest)


async def test_a_checkpoint_of_another_step_is_refused(lossy: Lossy, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"no checkpoint of step 99: the trainer is at step \d+"):
        await lossy.trainer.begin_checkpoint(tmp_path, 99, SampleBatch.of(()))
    assert list(tmp_path.iterdir()) == []


class PickledSoOften:
    def __init__(self, times: int) -> None:
        self.times = times

    def __reduce__(self) -> tuple[type, tuple[int]]:
        self.times -= 1
        if self.times < 0:
            raise TypeError("not once more")
        return PickledSoOften, (self.times,)


async def test_a_call_that_cannot_be_sent_is_refused_and_hangs_nobody(
    lossy: Lossy, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, hung = lossy.trainer, []
    monkeypatch.setattr(trainer, "_on_hung", hung.append)
    with pytest.raises(TypeError, match="not once more"):
        await trainer.train_step(batch(4), TokenScoreRecorder([PickledSoOften(0)]))  # type: ignore[list-item]
    assert (await trainer.train_step(batch(4)))["loss"] and not hung
    with pytest.raises(TypeError, match="not once more"):
        await trainer.train_step(batch(5), TokenScoreRecorder([PickledSoOften(1)]))  # type: ignore[list-item]
    assert hung == ["trainer: a call could not be sent to rank 1: not once more"]


def content(publication: Publication) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in SharedMemoryReader().tensors(publication)}


def fingerprints(publication: Publication) -> list[int]:
    return [entry.fingerprint for entry in publication.manifest.entries]


async def trained(trainer: TrainerClient, step: int) -> dict[str, float]:
    return await trainer.train_step(batch(step))


async def test_ranks_stand_still_while_one_hangs_in_a_step_and_only_then(lossy: Lossy) -> None:
    trainer = lossy.trainer
    await trainer.start_over(7)
    await trainer.freeze_reference()
    before, after = await trainer.pulse(), await trainer.pulse()
    assert all(now.progress > then.progress for then, now in zip(before, after, strict=True))
    assert trainer.has_worked is False
    lossy.dies("hang of rank 1")
    step = asyncio.create_task(trainer.train_step(batch(0)))
    await asyncio.wait_for(until_still(trainer.pulse, 3.0), BOUND)
    assert not step.done()
    os.kill(lossy.pids[1], signal.SIGKILL)
    assert (await asyncio.wait_for(step, BOUND))["loss"]
    assert trainer.has_worked


async def test_a_rank_that_dies_costs_a_retry_and_no_bit(lossy: Lossy) -> None:
    trainer = lossy.trainer
    await trainer.start_over(1)
    lossy.deaths = 0
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
    os.kill(lossy.pids[0], signal.SIGKILL)
    with pytest.raises(RollbackNeeded, match=r"no copy of v1.4 is usable: rank 1: the copy at .*1-0 is damaged"):
        await trainer.train_step(batch(4))
    assert lossy.deaths == 1
    assert all(torch.equal(tensor, weights[name]) for name, tensor in content(kept).items())

    trainer.outdate()  # the ranks that have replaced the lost ones are not those to begin with either
    await trainer.start_over(2)
    assert lossy.deaths == 2
    await trainer.freeze_reference()
    again = [await trained(trainer, 0)]
    lossy.dies("before copy 2 of rank 1")
    again.append(await trained(trainer, 1))
    await trainer.release(kept)
    again.append(await trained(trainer, 2))
    again.append(await trained(trainer, 3))
    assert lossy.deaths == 3
    assert again == reports
    end = await trainer.push_model_state_dict()
    assert end.version == PolicyVersion(2, 4)
    assert fingerprints(end) == fingerprints(expected)

    for _ in range(2):  # both other slots are free
        await trained(trainer, 4)
        await trainer.push_model_state_dict()
    assert lossy.said == []
    await trainer.close()
    assert not list(DIRECTORY.glob(f"titan_rl-{os.getpid()}-*"))
