"""What could go wrong between a run and the one that goes on from it, and must not."""

import asyncio
from pathlib import Path

import pytest
from scripted_system import World

from titan_rl.controller.checkpoint_files import checkpoints
from titan_rl.errors import CheckpointError


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
