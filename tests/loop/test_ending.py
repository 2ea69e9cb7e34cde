"""However a run ends: its cause is said at once, the newest weights are saved, and its result is the right one."""

import asyncio
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from scripted_system import World, holding, settle

from titan_rl.errors import MeshFailed, Stopped, TaskError, TitanError, TrainingError
from titan_rl.run.training import train_and_save
from titan_rl.supervision.run_end import RunEnd, announcer, until_either

T = TypeVar("T")

CHECKPOINT = Path("checkpoint")
WORKER_DIED = MeshFailed("rollout rank 0 (pid 7) was killed by signal 9 (SIGKILL)", "rollout")
TRAINER_DIED = MeshFailed("trainer rank 0 (pid 8) was killed by signal 9 (SIGKILL)", "trainer")


class Meshes:
    """The trainer is lost when a test says so."""

    def __init__(self, run_end: RunEnd) -> None:
        self.run_end, self.trainer = run_end, asyncio.get_running_loop().create_future()

    async def unless_lost(self, mesh: str, work: Coroutine[Any, Any, T]) -> T:
        assert mesh == "trainer"
        if self.trainer.done():
            work.close()
            raise self.trainer.result()
        async with until_either(work, self.trainer) as task:
            return task.result()


class Run:
    """A run whose parts are scripted, from its loop to its saved weights."""

    def __init__(self, world: World, *, checkpoint: Path | None = CHECKPOINT) -> None:
        self.world = world
        self.said: list[str] = []
        self.end = RunEnd(announcer(self.said.append, stopping="saving"))
        self.meshes = Meshes(self.end)

        async def save() -> str:
            return f"the weights after step {await world.trainer.save(CHECKPOINT)} are in {checkpoint}"

        saves = {} if checkpoint is None else {"the weights were": save}
        self.task = asyncio.create_task(train_and_save(world.loop, self.meshes, saves, self.said.append))

    async def hear(self, fault: TitanError) -> None:
        self.end.report(fault)
        await settle()


async def at(*gates: str, steps: int = 2) -> Run:
    """A run that has come to these gates."""
    world = World(steps=steps)
    world.script.holds = lambda gate: gate in gates
    run = Run(world)
    await settle()
    assert set(world.script.held) == set(gates)
    return run


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_is_answered_at_once_and_the_finished_step_is_saved(number):
    run = await at("train 2")
    await run.hear(Stopped(number))
    with pytest.raises(Stopped) as stop:
        await run.task
    assert stop.value.exit_code == 128 + number
    assert run.said == [f"{stop.value}: saving", "the weights after step 1 are in checkpoint"]


async def test_another_signal_does_not_wait_for_the_weights():
    run = await at("train 2")
    run.world.script.holds = holding("save")
    await run.hear(Stopped(signal.SIGINT))
    assert run.world.script.held == ["train 2", "save"]
    await run.hear(Stopped(signal.SIGINT))
    with pytest.raises(Stopped):
        await run.task
    assert run.said[1:] == ["the weights were not saved: another signal asked not to wait for it"]


async def test_and_a_second_one_gives_them_up_which_is_no_success():
    run = await at("save")
    await run.hear(Stopped(signal.SIGTERM))
    await run.hear(Stopped(signal.SIGTERM))
    with pytest.raises(Stopped):
        await run.task
    assert "were not saved" in run.said[-1]


@pytest.mark.parametrize("error", [TaskError("the reward raised"), OSError(28, "No space left on device")])
async def test_a_failure_is_said_before_the_weights_are_saved(error):
    world = World(steps=3)
    world.script.errors["evaluate v0"] = [error]
    run = Run(world)
    with pytest.raises(type(error)):
        await run.task
    assert run.said[0] == f"failed: {type(error).__name__}: {error}"
    assert run.said[1].startswith("the weights after step ")


async def test_nobody_waits_for_weights_from_a_dead_trainer():
    run = await at("train 2")
    run.meshes.trainer.set_result(TRAINER_DIED)
    await run.hear(TRAINER_DIED)
    with pytest.raises(MeshFailed):
        await run.task
    assert run.said[1:] == [f"the weights were not saved: {TRAINER_DIED}"]
    assert "save" not in run.world.script.events


async def test_a_run_that_is_done_waits_for_the_successor_of_a_trainer_that_dies_while_it_saves():
    run = await at("save")
    run.meshes.trainer.set_result(TRAINER_DIED)
    await settle()
    assert not run.task.done()
    await run.world.script.open("save")
    await run.task
    assert run.said == ["the weights after step 2 are in checkpoint"]


async def test_nor_does_it_wait_for_one_that_will_not_come():
    run = await at("save")
    run.end.end(MeshFailed("trainer failed 6 times in a row", "trainer"))
    with pytest.raises(MeshFailed, match="6 times"):
        await asyncio.wait_for(run.task, 5)
    assert "the weights were not saved: trainer failed 6 times in a row" in run.said


async def test_a_rank_that_dies_before_the_weights_are_saved_fails_the_run_and_they_are_saved():
    run = await at("save")
    await run.hear(WORKER_DIED)
    await run.world.script.open("save")
    with pytest.raises(MeshFailed):
        await run.task
    assert run.said == [f"failed: MeshFailed: {WORKER_DIED}", "the weights after step 2 are in checkpoint"]


async def test_a_rank_that_dies_while_a_finished_run_is_closed_is_only_logged(caplog):
    run = Run(World(steps=2))
    await run.task
    await run.hear(WORKER_DIED)
    assert run.said == ["the weights after step 2 are in checkpoint"]
    assert str(WORKER_DIED) in caplog.text


async def test_weights_that_cannot_be_saved_fail_a_run_that_went_well():
    world = World(steps=2)
    world.script.errors["save"] = [TrainingError("the disk is full")]
    run = Run(world)
    with pytest.raises(TrainingError, match="the disk is full"):
        await run.task
