"""When a checkpoint is cut, what it keeps, and that a run which goes on from one trains every prompt once."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from scripted_system import World, holding, settle

from titan_rl.controller.checkpoint_files import checkpoints, newest_sound
from titan_rl.controller.ledger import read_ledger
from titan_rl.errors import SampleError, StorageError, TaskError
from titan_rl.types import PolicyVersion


class Inline(ThreadPoolExecutor):
    """Does everything at once, so that `settle` waits for it too."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


@pytest.fixture(autouse=True)
async def no_threads() -> None:
    asyncio.get_running_loop().set_default_executor(Inline())


def steps_of(directory: Path) -> list[int]:
    return [int(each.name.rpartition("-")[2]) for each in checkpoints(directory)]


async def test_training_waits_for_the_copy_and_not_for_the_disk(tmp_path: Path):
    world = World(steps=3, directory=tmp_path)
    world.script.holds = lambda gate: gate in ("copy 1", "write 1")
    async with world.running() as task:
        assert world.script.held == ["copy 1"], "step 2 does not begin"
        await world.script.open("copy 1")
        assert world.script.held == ["write 1"] and world.trainer.step == 3
        assert "no checkpoint of step 2: the one before is still being written" in world.printed
        await world.script.open("write 1")
        await task
    assert steps_of(tmp_path) == [1]


async def test_a_checkpoint_is_written_after_every_so_many_steps(tmp_path: Path):
    world = World(steps=5, directory=tmp_path, checkpoint_every=2)
    await world.run()
    assert steps_of(tmp_path) == [2, 4]
    assert await world.loop.save() and steps_of(tmp_path) == [2, 4, 5]


@pytest.mark.parametrize(
    ("gate", "error"),
    [("copy 1", StorageError("full")), ("copy 1", SampleError("gone", 3, 0)), ("write 1", StorageError("full"))],
)
async def test_a_checkpoint_that_fails_costs_a_sentence(tmp_path: Path, gate: str, error: Exception):
    world = World(steps=3, directory=tmp_path, staleness=1)
    world.script.errors[gate] = [error]
    await world.run()
    assert f"no checkpoint of step 1, the run goes on: {error}" in world.printed
    assert steps_of(tmp_path) == [2]
    assert not list((tmp_path / "checkpoints").glob(".*")), "and no draft is left"


async def test_before_the_first_step_there_is_nothing_to_keep(tmp_path: Path):
    world = World(directory=tmp_path)
    world.script.errors["play 0"] = [TaskError("the task raised")]
    with pytest.raises(TaskError):
        await world.run()
    assert await world.loop.save() == "" and steps_of(tmp_path) == []


async def test_a_run_that_fails_keeps_the_step_that_is_under_way(tmp_path: Path):
    world = World(steps=3, directory=tmp_path, checkpoint_every=0, staleness=1)
    world.script.holds = lambda gate: gate == "train 2"
    world.script.errors["play 4"] = [TaskError("the task raised")]
    task = asyncio.create_task(world.loop.run())
    await settle()
    with pytest.raises(TaskError):
        await task
    saving = asyncio.create_task(world.loop.save())
    await settle()
    await world.script.open("train 2")
    await saving
    assert steps_of(tmp_path) == [2]
    assert [step for step, numbers in world.metrics.written if "train/loss" in numbers] == [1, 2]


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("gate", ["play 6", "play 9", "train 2", "train 3", "publish v2", "pull v2", "evaluate v2"])
async def test_every_prompt_is_trained_once_and_every_step_evaluated_once(tmp_path: Path, staleness: int, gate: str):
    first = World(steps=5, every=2, staleness=staleness, directory=tmp_path)
    first.script.holds = lambda name: name == gate
    async with first.running():
        pass  # killed where it is held
    cut = newest_sound(tmp_path, pytest.fail)
    assert cut is not None
    ledger = read_ledger(cut.directory)
    second = World(steps=5, every=2, staleness=staleness, directory=tmp_path, restore=True)
    summary = await second.run()
    trained = [*first.trainer.batches[: cut.step], *second.trainer.batches]
    assert sorted(group for batch in trained for group in batch) == list(range(10))
    written = [*first.metrics.written[: ledger.metrics_bytes], *second.metrics.written]
    assert [step for step, numbers in written if "train/loss" in numbers] == [1, 2, 3, 4, 5]
    assert sorted(step for step, numbers in written if "evaluation/reward" in numbers) == [0, 2, 4, 5]
    assert sorted(each.version.step for each in summary.evaluations) == [0, 2, 4, 5]
    assert all(asked.step == served.step for asked, served in second.rollouts.evaluated_at)
    assert second.trainer.live == [PolicyVersion(1, 5)] and second.rollouts.owned == {}
    assert not {request.group_id for request in second.rollouts.started} & ledger.reports.keys()


async def test_an_evaluation_that_was_under_way_is_done_first_and_by_its_own_weights(tmp_path: Path):
    first = World(steps=6, every=2, staleness=2, directory=tmp_path)
    first.script.holds = holding("evaluate")
    async with first.running():
        await first.script.open("evaluate v0")
        assert first.script.held == ["evaluate v2"] and first.trainer.step == 4
    second = World(steps=6, every=2, staleness=2, directory=tmp_path, restore=True)
    await second.run()
    events = second.script.events
    assert events.index("publish v2 again") < events.index("pull v2 done") < events.index("evaluate v2 done")
    assert events.index("evaluate v2 done") < events.index("pull v1.4")
    assert PolicyVersion(0, 2) in second.trainer.freed


async def test_a_run_that_was_done_goes_on_for_more_steps(tmp_path: Path):
    first = World(steps=2, directory=tmp_path)
    await first.run()
    await first.loop.save()
    second = World(steps=4, directory=tmp_path, restore=True)
    summary = await second.run()
    assert summary.steps == 4 and second.trainer.batches == [[4, 5], [6, 7]]
    assert [each.version.step for each in summary.evaluations] == [0, 2, 4]


async def test_a_run_that_ends_where_it_was_cut_has_that_checkpoint(tmp_path: Path):
    world = World(steps=3, directory=tmp_path, checkpoint_every=2)
    world.script.errors["play 5"] = [TaskError("the task raised")]
    with pytest.raises(TaskError):
        await world.run()
    assert (
        world.trainer.step == 2
        and await world.loop.save() == f"the newest checkpoint is {tmp_path}/checkpoints/step-00000002"
    )
    assert world.script.events.count("copy 2") == 1
