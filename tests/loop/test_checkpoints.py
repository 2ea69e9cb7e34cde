"""When a checkpoint is cut, what it keeps, and that a run which goes on from one trains every prompt once."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from scripted_system import World, holding, settle

from titan_rl.config import RunConfig
from titan_rl.errors import CallTimeout, CheckpointError, SampleError, StorageError, TaskError, TrainingError
from titan_rl.loop.checkpoint_files import checkpoints
from titan_rl.loop.ledger import GroupOutcome, Ledger, new_ledger, read_ledger
from titan_rl.run.runs import Resume
from titan_rl.types import FailureKind, PolicyVersion


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


async def test_what_failed_in_a_group_that_is_not_decided_is_kept():
    ledger = new_ledger(RunConfig())
    ledger.outcomes[3] = GroupOutcome(None, "", rollouts=((FailureKind.TOOL, "it raised"), None))
    ledger.summary.filtered_lengths += [7, 9]
    kept = Ledger.decode(ledger.encode())
    assert (kept.outcomes, kept.summary.filtered_lengths) == (ledger.outcomes, [7, 9])
    assert kept.outcomes[3].rollouts[0][0] is FailureKind.TOOL


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


async def test_groups_grow_while_most_of_a_step_have_equal_rewards(tmp_path: Path):
    def different(group: int) -> float:  # in the first step one, in the second all
        return float(group in {0, 3, 4, 5})

    asked = {}
    for begun in (True, False):
        world = World(steps=5, groups=3, staleness=1, most_samples=6, directory=tmp_path, restore=not begun)
        world.rollouts.outcome = lambda request: (0.0,) * (request.samples - 1) + (different(request.group_id),)
        if begun:
            world.script.holds = lambda name: name == "train 4"
            async with world.running():
                pass  # killed where it is held
        else:
            await world.run()
        asked |= {each.group_id: (each.samples, each.min_version.step) for each in world.rollouts.started}
    assert {samples for samples, step in asked.values() if step == 0} == {2}
    assert {samples for samples, step in asked.values() if step in (1, 2)} == {4}, "after the first step, not the next"
    assert {samples for samples, step in asked.values() if step == 3} == {6}
    shown = {step: numbers["groups/samples"] for step, numbers in world.metrics.written if "train/loss" in numbers}
    assert shown.items() >= {4: 4, 5: 6}.items()


async def test_groups_do_not_grow_where_a_teacher_teaches_without_different_rewards():
    world = World(steps=3, groups=3, most_samples=8)
    world.rollouts.outcome = lambda request: (0.0,) * request.samples
    world.system.config.trainer.kl.teacher = "teacher"
    await world.run()
    assert {each.samples for each in world.rollouts.started} == {2}


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("gate", ["play 6", "play 9", "train 2", "train 3", "publish v2", "pull v2", "evaluate v2"])
async def test_every_prompt_is_trained_once_and_every_step_evaluated_once(tmp_path: Path, staleness: int, gate: str):
    first = World(steps=5, every=2, staleness=staleness, directory=tmp_path)
    first.script.holds = lambda name: name == gate
    async with first.running():
        pass  # killed where it is held
    cut = Resume(tmp_path).checkpoint(pytest.fail)
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


# --- samples and versions ---


async def test_a_cut_holds_the_samples_of_every_finished_group_and_of_no_other(tmp_path: Path) -> None:
    world = World(steps=3, staleness=2, directory=tmp_path, checkpoint_every=1)
    world.script.holds = lambda gate: gate in ("train 2", "play 5", "write 1")
    async with world.running():
        while "write 1" not in world.script.held:
            await settle()
        step, samples = world.trainer.copied
        assert step == 1
        assert sorted({*samples.group_ids}) == [2, 3, 4], "0 and 1 are trained, 5 is being played"
        assert len(samples) == 2 * 3, "two rollouts each"
        assert {*samples.group_ids} == {*world.loop.ledger.reports}


async def test_a_deterministic_cut_holds_the_versions_that_groups_in_flight_are_played_by(tmp_path: Path) -> None:
    world = World(steps=6, staleness=2, directory=tmp_path, checkpoint_every=3, deterministic=True)
    world.script.holds = lambda gate: gate == "train 4"
    async with world.running():
        while not steps_of(tmp_path):
            await asyncio.sleep(0.01)
    resumed = World(steps=6, staleness=2, directory=tmp_path, deterministic=True, restore=True)
    await resumed.run()
    kept = {*resumed.trainer.kept}
    assert {PolicyVersion(0, 1), PolicyVersion(0, 2)} <= kept, "of steps 4 and 5"
    assert max(kept) < PolicyVersion(0, 3), "the trainer's own is in its state"


# --- a run that goes on ---


async def written(directory: Path, step: int) -> None:
    """Wait for a checkpoint; a thread commits it."""
    while not any(each.name.endswith(f"{step:08d}") for each in checkpoints(directory)):
        await asyncio.sleep(0.01)


async def killed_at_step_2(directory: Path) -> None:
    """A run with finished groups in its checkpoint of step 1."""
    world = World(steps=6, staleness=2, directory=directory)
    world.script.holds = lambda gate: gate in ("train 2", "play 9")
    async with world.running():
        await written(directory, 1)


async def test_a_restore_that_fails_releases_no_sample_of_the_process_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    await killed_at_step_2(tmp_path)
    world = World(steps=6, staleness=2, directory=tmp_path, restore=True)
    assert world.loop.ledger.reports
    world.script.errors["restore"] = [CheckpointError("another policy")]
    with pytest.raises(CheckpointError):
        await world.run()
    assert "were not released" not in caplog.text


@pytest.mark.parametrize("steps", [1, 2, 3])
async def test_a_run_may_go_on_for_fewer_steps(tmp_path: Path, steps: int):
    await killed_at_step_2(tmp_path)
    world = World(steps=steps, staleness=2, directory=tmp_path, restore=True)
    assert (await world.run()).steps == steps
    assert world.rollouts.owned == {}


@pytest.mark.parametrize("error", [CallTimeout("no answer within 600 s"), ValueError("a bug")])
async def test_a_checkpoint_that_is_not_written_in_time_keeps_no_publication(tmp_path: Path, error: Exception):
    world = World(steps=6, staleness=2, every=2, directory=tmp_path, checkpoint_every=4)
    world.script.holds = lambda gate: gate in ("evaluate v2", "write 4")
    world.script.errors["write 4"] = [error]
    async with world.running() as task:
        while "write 4" not in world.script.held:
            await settle()
        await world.script.open("evaluate v2", "write 4")
        done, _ = await asyncio.wait({task}, timeout=5)
        assert done, "the publisher waits for a free slot"
        await task
    assert world.trainer.live == [PolicyVersion(0, 6)]
    assert f"no checkpoint of step 4, the run goes on: {error}" in world.printed
    assert await world.loop.save()


async def test_a_step_whose_answer_came_too_late_is_not_saved_under_the_number_of_the_one_before(tmp_path: Path):
    world = World(steps=3, directory=tmp_path, checkpoint_every=0)
    world.script.errors["news of 2"] = [CallTimeout("no answer within 600 s")]
    with pytest.raises(CallTimeout):
        await world.loop.run()
    with pytest.raises(TrainingError, match="no checkpoint of step 1: the trainer is at step 2"):
        await world.loop.save()
    assert checkpoints(tmp_path) == []


async def stopped_at(world: World, gate: str) -> asyncio.Task[str]:
    """A run that was stopped when somebody was there, and is now being saved."""
    world.script.holds = lambda name: name == gate
    task = asyncio.create_task(world.loop.run())
    while world.script.held != [gate]:
        await settle()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    saving = asyncio.create_task(world.loop.save())
    await settle()
    world.script.holds = lambda name: False
    return saving


async def test_a_cut_that_is_under_way_when_the_run_is_stopped_comes_to_its_end(tmp_path: Path):
    world = World(steps=3, directory=tmp_path)
    saving = await stopped_at(world, "copy 1")
    assert world.script.held == ["copy 1"]
    assert "copy 1" not in world.script.cancelled, "its draft is still being written to"
    await world.script.open("copy 1")
    assert await saving
    assert [each.name for each in checkpoints(tmp_path)] == ["step-00000001"]


async def test_a_step_that_fails_while_a_stopped_run_waits_for_it_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    world = World(steps=3, directory=tmp_path)
    world.script.errors["train 2"] = [TrainingError("NaN in the loss")]
    saving = await stopped_at(world, "train 2")
    await world.script.open("train 2")
    assert await saving
    assert "the last step failed: NaN in the loss" in caplog.text
