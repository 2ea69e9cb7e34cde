"""What could go wrong between a run and the one that goes on from it, and must not."""

import asyncio
from pathlib import Path

import pytest
from script import settle
from scripted_system import World

from titan_rl.controller.checkpoint_files import checkpoints
from titan_rl.errors import CallTimeout, CheckpointError, TrainingError
from titan_rl.types import PolicyVersion


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
