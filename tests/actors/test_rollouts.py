"""Real rollout workers behind the handle that the controller has: who holds which sample, whatever happens (30 s)."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import pickle
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from scripted_router import VERSION, ScriptedRouter
from support.meshes import mesh_plan
from support.processes import halt

from titan_rl.actors.rollout_worker import RolloutWorker
from titan_rl.actors.rollouts import RolloutWorkerClient, RolloutWorkers
from titan_rl.config import DataPlaneConfig, RunConfig
from titan_rl.config_registry import copy4
from titan_rl.data_plane.store import SharedMemorySource
from titan_rl.errors import ActorGone, GatewayGone, GroupStopped, SampleStoreFull, TaskError, TitanError
from titan_rl.generation.config import GeneratorConfig
from titan_rl.policy.config import PolicyConfig, TinyPolicyConfig, TrainerConfig
from titan_rl.policy.models.tiny import make_tiny_policy
from titan_rl.rollout.config import RolloutConfig
from titan_rl.rollout.report import GroupReport, unplayed
from titan_rl.rpc.connection import bounded
from titan_rl.supervision.provisioner import Provisioner
from titan_rl.types import GroupRequest, PolicyVersion, Purpose, SamplingParams
from titan_rl.weights.segment_files import remove_segments_of

SECONDS = 120.0
SAMPLES = 4
serial = itertools.count()  # of the meshes

SHORT, LONG, POSITIONS = 16, 16_000, 16_384
KIBIBYTE = 1024

pytestmark = pytest.mark.asyncio(loop_scope="module")


def run_config(**settings: Any) -> RunConfig:
    generator = GeneratorConfig(max_model_len=POSITIONS, max_num_batched_tokens=POSITIONS)
    policy = PolicyConfig(tiny=TinyPolicyConfig(max_length=POSITIONS))
    trainer = TrainerConfig(max_tokens_per_microbatch=POSITIONS)
    return dataclasses.replace(copy4(), policy=policy, trainer=trainer, generator=generator, **settings)


def group(group_id: int, *, tokens: int = SHORT, attempt: int = 0) -> GroupRequest:
    return GroupRequest(
        group_id=group_id,
        purpose=Purpose.TRAIN,
        samples=SAMPLES,
        sampling=SamplingParams(max_new_tokens=tokens),
        min_version=PolicyVersion(0, 0),
        attempt=attempt,
    )


class Workers:
    """Two workers, their client and their router, each worker in a process of its own."""

    def __init__(self, spawn: Callable[[int], Any], router: Any) -> None:
        self.rollouts = RolloutWorkers(RunConfig(rollout=RolloutConfig(workers=2)))
        self.pids: list[int] = [0, 0]
        self._spawn = spawn
        self._router = router

    async def start(self, number: int) -> None:
        """A worker, or the next one of its mesh."""
        worker = self.rollouts.workers[number]
        if worker.files_left:  # as the owner of its mesh does when it has ended the processes
            remove_segments_of(os.getpid(), channel=worker.files_left)
        worker.replace([self._spawn(number)])
        (self.pids[number],) = await worker.setup(router=self._router)

    async def route(self, endpoint: str, *args: Any) -> None:
        await bounded(getattr(self._router, endpoint).call_one(*args), what=endpoint, seconds=SECONDS)

    async def held(self) -> int:
        return sum(report.samples for report in await self.rollouts.held())

    async def begin(self, group_ids: Sequence[int]) -> list[asyncio.Task[GroupReport]]:
        """Groups that wait for their completions. Nothing else may be under way."""
        await self.route("hold")
        plays = [asyncio.create_task(self.rollouts.run_group(group(group_id))) for group_id in group_ids]
        await self.route("wait_for_requests", SAMPLES * len(plays))
        return plays

    async def release_all(self, outcomes: Sequence[Any]) -> None:
        for outcome in outcomes:
            if isinstance(outcome, GroupReport):
                await self.rollouts.release(outcome.samples)


@asynccontextmanager
async def workers(config: RunConfig, model_path: Path, number: int) -> AsyncIterator[Workers]:
    provisioner = Provisioner(log_directory="", imports=(), on_fault=lambda fault: None)
    try:
        router = provisioner.spawn(mesh_plan(f"router{number}", beside=__file__)).spawn("router", ScriptedRouter)[0]

        def spawn(worker: int) -> Any:
            plan = mesh_plan(f"rollout{next(serial)}", beside=__file__)
            settings = {"mesh": f"rollout{worker}", "model_path": str(model_path)}
            return provisioner.spawn(plan).spawn("rollout", RolloutWorker, config, **settings)[0]

        up = Workers(spawn, router)
        await asyncio.gather(*map(up.start, range(2)))
        stores = list(up.rollouts.stores)
        yield up
        await asyncio.gather(*(worker.close() for worker in up.rollouts.workers if worker.store))
        assert [file for store in [*stores, *up.rollouts.stores] for file in files(store)] == []
    finally:
        await provisioner.stop_all()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_policy(TinyPolicyConfig(), tmp_path_factory.mktemp("cache"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def up(model_path: Path) -> AsyncIterator[Workers]:
    async with workers(run_config(), model_path, 0) as started:
        yield started


def files(store: str) -> list[str]:
    """In shared memory, of one worker's samples."""
    return [path.name for path in Path("/dev/shm").glob(f"titan_rl-{os.getpid()}-samples.{store}-*")]


async def test_a_report_has_references_and_no_tokens_and_the_stores_have_them(up: Workers) -> None:
    report = await up.rollouts.run_group(group(1))
    assert report.samples.samples is None
    assert [ref.sample for ref in report.samples.refs] == list(range(SAMPLES))
    assert {ref.trained_tokens for ref in report.samples.refs} == {SHORT}
    assert report.oldest_version == VERSION.encode()
    assert [rollout.sampled_tokens for rollout in report.rollouts] == [SHORT] * SAMPLES
    fetched = SharedMemorySource().fetch(report.samples)
    assert [int(np.count_nonzero(sample.loss_mask)) for sample in fetched] == [SHORT] * SAMPLES
    assert [sample.reward for sample in fetched] == [rollout.reward for rollout in report.rollouts]
    assert await up.held() == SAMPLES
    left = await up.rollouts.release(report.samples)
    assert [(store.samples, store.nbytes) for store in left] == [(0, 0)]


async def test_a_report_is_as_small_for_16000_tokens_as_for_16(up: Workers) -> None:
    sizes = []
    for number, tokens in enumerate((SHORT, LONG)):
        report = await up.rollouts.run_group(group(10 + number, tokens=tokens))
        assert set(report.samples.lengths) == {tokens + 5}  # four digits and "="
        sizes.append(len(pickle.dumps(report)) / SAMPLES)
        await up.rollouts.release(report.samples)
    assert max(sizes) < KIBIBYTE
    assert abs(sizes[1] - sizes[0]) <= 72  # numbers that happen to be alike in a group travel once


async def test_stopping_ends_every_play_and_leaves_nothing(up: Workers) -> None:
    plays = await up.begin([30, 31, 32])
    late = asyncio.create_task(up.rollouts.run_group(group(33)))  # asked for in the tick of the stop
    await asyncio.gather(*(up.rollouts.stop_groups() for _ in range(2)))
    outcomes = await asyncio.gather(*plays, late, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [GroupStopped] * 4
    assert await up.held() == 0


async def test_stopping_while_groups_finish_gives_a_report_or_an_error_for_each(up: Workers) -> None:
    plays = await up.begin(range(40, 52))
    _, *outcomes = await asyncio.gather(
        asyncio.gather(up.route("let_go"), up.rollouts.stop_groups()), *plays, return_exceptions=True
    )
    assert all(isinstance(outcome, GroupReport | GroupStopped) for outcome in outcomes)
    await up.release_all(outcomes)
    assert await up.held() == 0


async def test_a_play_whose_caller_is_cancelled_leaves_nothing(up: Workers) -> None:
    plays = await up.begin([60, 61])
    for play in plays:
        play.cancel()
    await asyncio.wait(plays)
    again = asyncio.create_task(up.rollouts.run_group(group(60, attempt=1)))
    await up.route("wait_for_requests", 3 * SAMPLES)
    await up.route("let_go")
    report = await again
    assert report.attempt == 1
    await up.rollouts.release(report.samples)
    await nothing_is_held(up)


async def test_a_worker_that_is_stopped_while_answers_come_to_it_reports_when_it_goes_on(up: Workers) -> None:
    plays = await up.begin([62, 63])  # one on each
    halt(up.pids[0])
    await up.route("let_go")
    await asyncio.wait(plays, timeout=SECONDS, return_when=asyncio.FIRST_COMPLETED)
    assert sum(play.done() for play in plays) == 1
    os.kill(up.pids[0], signal.SIGCONT)
    await up.release_all(await asyncio.gather(*plays))
    assert await up.held() == 0


async def nothing_is_held(up: Workers) -> None:
    """What nobody waits for is released by messages of their own, which this waits for."""

    async def wait() -> None:
        while await up.held():
            pass  # each look is a round trip

    await asyncio.wait_for(wait(), SECONDS)


async def test_a_group_that_is_played_already_is_refused(up: Workers) -> None:
    (play,) = await up.begin([65])
    with pytest.raises(ValueError, match="train group 65 is being played already"):
        await up.rollouts.run_group(group(65))
    await up.route("let_go")
    await up.rollouts.release((await play).samples)


async def test_a_killed_worker_costs_its_groups_and_samples_and_its_successor_plays_on(model_path: Path) -> None:
    async with workers(run_config(), model_path, 1) as up:
        lost = asyncio.Event()
        up.rollouts.on_lost = lambda reason: lost.set()
        kept = await up.rollouts.run_groups([group(1), group(2)])
        first, second = (next(iter(report.samples.stored_ids)) for report in kept)
        plays = await up.begin([3, 4])  # one on each
        assert files(first) and files(second)
        victim = list(up.rollouts.stores).index(first)

        os.kill(up.pids[victim], signal.SIGKILL)
        (gone,), _ = await asyncio.wait(plays, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(ActorGone, match=f"rollout{victim}"):
            await gone
        await lost.wait()
        assert [up.rollouts.holds(report.samples) for report in kept] == [False, True]
        assert await up.rollouts.release(kept[0].samples) == [], "what is lost is free already"

        await up.route("let_go")
        (survivor,) = (play for play in plays if play is not gone)
        again = await up.rollouts.run_group(group(1, attempt=1))
        assert {store for report in (await survivor, again) for store in report.samples.stored_ids} == {second}

        await up.start(victim)
        assert not files(first)
        reports = await up.rollouts.run_groups([group(5), group(6)])
        assert len(up.rollouts.stores) == len({next(iter(report.samples.stored_ids)) for report in reports}) == 2
        await up.release_all([kept[1], await survivor, again, *reports])
        assert await up.held() == 0


async def test_without_a_worker_a_group_waits_for_the_next_one(model_path: Path) -> None:
    async with workers(run_config(), model_path, 3) as up:
        for worker in up.rollouts.workers:
            worker.lose("it does not answer")
        play = asyncio.create_task(up.rollouts.run_group(group(1)))
        await up.start(1)
        await up.rollouts.release((await play).samples)


async def test_a_store_without_room_names_its_setting_and_keeps_nothing(model_path: Path) -> None:
    async with workers(run_config(data_plane=DataPlaneConfig(store_mib=1)), model_path, 2) as up:
        with pytest.raises(SampleStoreFull, match="data_plane.store_mib") as error:
            await up.rollouts.run_groups([group(1), group(2, tokens=LONG)])
        assert isinstance(error.value, TitanError)
        await nothing_is_held(up)


class Fragile(RolloutWorkerClient):
    """Dies of the groups `deadly`, and is there again at once."""

    lives, deadly = 1, frozenset({3})

    async def run_group(self, request: GroupRequest) -> GroupReport:
        self.playing[request.key] = asyncio.get_running_loop().create_future()
        try:
            if request.group_id in self.deadly:
                await asyncio.sleep(0)
                self.lives += 1
                self.store = f"store.{self.lives}"
                for each in self.playing.values():
                    each.cancel()
                raise ActorGone("rollout0 was killed")
            if any(key.group_id in self.deadly for key in self.playing):
                await self.playing[request.key]
            return unplayed(request, TaskError("nothing to play"))
        except asyncio.CancelledError:
            raise ActorGone("rollout0 was killed") from None
        finally:
            del self.playing[request.key]


@pytest.mark.parametrize(("groups", "deadly"), [([3], {3}), (range(8), {3, 5})])
async def test_groups_that_end_their_worker_each_time_are_named_and_cost_no_other(
    groups: Sequence[int], deadly: set[int]
) -> None:
    rollouts = RolloutWorkers(RunConfig())
    rollouts.workers = [worker := Fragile("rollout0", rollouts)]
    worker.store, worker.deadly = "store.1", frozenset(deadly)
    reports = await asyncio.wait_for(rollouts.run_groups([group(each) for each in groups]), SECONDS)
    errors = {report.group_id: report.first_error for report in reports}
    guilty = [errors.pop(each) for each in deadly]
    assert all(each.startswith("infrastructure: ") and "ends what plays it" in each for each in guilty)
    assert worker.lives <= 8 * len(deadly) + 2
    assert set(errors.values()) <= {"task: nothing to play"} and len(errors) == len(groups) - len(deadly)


async def test_a_group_is_not_to_blame_for_the_end_of_its_gateway() -> None:
    class Gatewayless(RolloutWorkerClient):
        async def run_group(self, request: GroupRequest) -> GroupReport:
            raise GatewayGone("the gateway was killed")

    rollouts = RolloutWorkers(RunConfig())
    rollouts.workers = [worker := Gatewayless("rollout0", rollouts)]
    worker.store = "store.1"
    for attempt in range(50):
        with pytest.raises(GatewayGone):
            await rollouts.run_group(group(1, attempt=attempt))
