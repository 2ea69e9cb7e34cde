"""The trainer's state is lost in the middle of a run: another loop over the same parts goes on from an earlier step.
It finds nothing of the first one in its way."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
from scripted_system import World, holding, settle

from titan_rl.errors import ActorGone, RollbackNeeded
from titan_rl.loop.checkpoint_files import checkpoints
from titan_rl.run.training import train_and_save
from titan_rl.supervision.run_end import RunEnd, announcer
from titan_rl.types import PolicyVersion

LOST = RollbackNeeded("no copy of v3 is usable: rank 0: the copy is torn")


async def lost(world: World, gate: str) -> None:
    """Run until the state is lost there."""
    world.script.errors[gate] = [LOST]
    with pytest.raises(RollbackNeeded):
        await world.loop.run()
    assert world.trainer.live == [] and world.rollouts.owned == {}


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("gate", ["train 4", "publish v3"])
async def test_the_run_goes_on_from_its_newest_checkpoint(tmp_path: Path, staleness: int, gate: str) -> None:
    world = World(steps=6, staleness=staleness, directory=tmp_path, checkpoint_every=2)
    await lost(world, gate)
    world.begin(tmp_path, restore=True)
    assert (await world.run()).steps == 6
    assert world.trainer.restored == ["step-00000002 v1.2"]
    assert world.loop.ledger.buffer.trainer_version == PolicyVersion(1, 6)
    trained = world.trainer.batches[:2] + world.trainer.batches[-4:]
    assert sorted(group for batch in trained for group in batch) == list(range(12))
    assert world.trainer.live == [PolicyVersion(1, 6)] and world.rollouts.owned == {}


async def test_the_run_goes_back_even_if_no_group_ends_any_more(tmp_path: Path) -> None:
    """As where the host of the trainer is lost with the weights, and with all generators that had them."""
    world = World(steps=4, directory=tmp_path, checkpoint_every=2)
    world.script.holds = holding("play")
    running = asyncio.ensure_future(world.loop.run())
    await settle()
    world.trainer.lost = LOST
    world.trainer.on_state_lost()
    with pytest.raises(RollbackNeeded):
        await asyncio.wait_for(running, 5)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("gate", ["evaluate v0", "play 9", "evaluate v6"])
async def test_a_version_that_was_served_and_that_nobody_can_load_again_sends_the_run_back(
    tmp_path: Path, gate: str, deterministic: bool
) -> None:
    """As where its publication is damaged and the generators that had loaded it are gone."""
    world = World(steps=6, staleness=2, max_live=4, directory=tmp_path, checkpoint_every=2, deterministic=deterministic)
    world.script.holds = lambda each: each == gate
    running = asyncio.ensure_future(world.loop.run())
    await settle()
    assert gate in world.script.held
    world.router.say_unavailable("v0 is served by nobody any more: g0: bad bytes")
    with pytest.raises(RollbackNeeded, match="v0 is served by nobody any more"):
        await asyncio.wait_for(running, 5)
    assert world.trainer.live == [] and world.rollouts.owned == {}
    world.script.holds = lambda each: False
    world.begin(tmp_path, restore=True, incarnation=1)
    assert (await world.run()).steps == 6
    assert [each.version.step for each in world.loop.summary.evaluations] == [0, 6]


async def test_a_version_that_is_evaluated_again_may_be_unavailable_again(tmp_path: Path) -> None:
    world = World(steps=6, staleness=2, every=2, max_live=3, directory=tmp_path, checkpoint_every=3)
    world.script.holds = lambda gate: gate == "evaluate v2"
    await lost(world, "train 5")
    world.begin(tmp_path, restore=True)
    world.script.holds = lambda gate: gate == "evaluate v2"
    running = asyncio.ensure_future(world.loop.run())
    await settle()
    assert "evaluate v2" in world.script.held
    world.router.say_unavailable("v2 is served by nobody any more")
    with pytest.raises(RollbackNeeded, match="v2 is served by nobody"):
        await asyncio.wait_for(running, 5)


async def test_a_publication_that_is_under_way_when_the_run_goes_back_is_freed(tmp_path: Path) -> None:
    """The trainer's ranks do not hear that nobody waits for it any more."""
    world = World(steps=6, max_live=2, directory=tmp_path, checkpoint_every=2)
    push = world.trainer.push_model_state_dict
    world.trainer.push_model_state_dict = lambda: asyncio.shield(asyncio.ensure_future(push()))
    world.script.holds = lambda gate: gate == "publish v3"
    running = asyncio.ensure_future(world.loop.run())
    await settle()
    assert "publish v3" in world.script.held
    world.router.say_unavailable("v0 is served by nobody any more")
    await settle()
    await world.script.open("publish v3")
    with pytest.raises(RollbackNeeded):
        await asyncio.wait_for(running, 5)
    assert world.trainer.live == []


async def test_without_a_checkpoint_the_run_begins_again_with_its_warm_up(tmp_path: Path) -> None:
    world = World(steps=3, warmup=2, directory=tmp_path, checkpoint_every=0)
    await lost(world, "train 2")
    world.begin(tmp_path, restore=True, incarnation=1)
    assert (await world.run()).steps == 3
    assert world.trainer.restored == ["v1.0"]
    assert [event for event in world.script.events if event in ("warm up 0", "warm up 1")] == [
        "warm up 0",
        "warm up 1",
    ] * 2
    assert world.trainer.live == [PolicyVersion(1, 3)]


async def test_a_state_that_is_lost_in_the_warm_up_leaves_no_demonstrations(tmp_path: Path) -> None:
    await lost(World(steps=3, warmup=2), "warm up 1")


async def test_an_incarnation_is_never_used_twice(tmp_path: Path) -> None:
    """Not even by two loops that go on from the same checkpoint."""
    world = World(steps=6, directory=tmp_path, checkpoint_every=2)
    for gate in ("train 4", "publish v2"):
        await lost(world, gate)
        world.begin(tmp_path, restore=True)
    await world.run()
    assert world.trainer.restored == ["step-00000002 v1.2", "step-00000002 v2.2"]


async def test_a_version_that_was_being_evaluated_then_is_evaluated_though_newer_ones_were_served(
    tmp_path: Path,
) -> None:
    world = World(steps=6, staleness=2, every=2, max_live=3, directory=tmp_path, checkpoint_every=3)
    world.script.holds = lambda gate: gate == "evaluate v2"
    await lost(world, "train 5")
    world.script.holds = lambda gate: False
    world.begin(tmp_path, restore=True)
    assert (await world.run()).steps == 6
    assert {"publish v2 again", "pull v1.3"} <= set(world.script.events)


async def test_a_checkpoint_that_is_being_written_comes_to_its_end_first(tmp_path: Path) -> None:
    world = World(steps=6, directory=tmp_path, checkpoint_every=2)
    world.script.holds = holding("write")
    world.script.errors["train 3"] = [LOST]
    run = asyncio.create_task(world.loop.run())
    await settle()
    assert world.script.held == ["write 2"] and not run.done()
    await world.script.open("write 2")
    with pytest.raises(RollbackNeeded):
        await run
    assert [each.name for each in checkpoints(tmp_path)] == ["step-00000002"]


async def test_a_trainer_that_dies_while_a_checkpoint_is_cut_costs_the_checkpoint(tmp_path: Path) -> None:
    world = World(steps=4, directory=tmp_path, checkpoint_every=2)
    world.script.errors["copy 2"] = [ActorGone("trainer rank 0 was killed")]
    assert (await world.run()).steps == 4
    assert "no checkpoint of step 2, the run goes on: trainer rank 0 was killed" in world.printed
    assert world.trainer.live == [PolicyVersion(0, 4)]


async def test_nothing_is_announced_or_saved_when_another_loop_goes_on(tmp_path: Path) -> None:
    world, said = World(steps=3, directory=tmp_path), []
    world.script.errors["train 2"] = [LOST]
    meshes = SimpleNamespace(run_end=RunEnd(announcer(said.append, stopping="saving")))

    async def save() -> str:
        return await world.loop.save()

    with pytest.raises(RollbackNeeded):
        await train_and_save(world.loop, meshes, {"it was": save}, said.append)
    assert said == []
    world.begin(tmp_path, restore=True)
    await train_and_save(world.loop, meshes, {"it was": save}, said.append)
    assert len(said) == 1 and "checkpoints/step-00000003" in said[0]
