"""A run that loses workers, gateways and samples, over scripted parts (1 s)."""

from __future__ import annotations

import asyncio

import pytest
from scripted_system import World, holding, plays

from titan_rl.errors import ActorGone, RollbackNeeded, SamplesLost
from titan_rl.scheduling.group import MAX_ATTEMPTS

GONE = ActorGone("rollout0.run_group: the process or actor is gone")


def asked(world: World) -> list[tuple[int, int]]:
    return [(request.group_id, request.attempt) for request in world.rollouts.started]


async def finish(world: World) -> None:
    world.script.holds = lambda gate: False
    await world.script.open(*world.script.held)


@pytest.mark.parametrize(("staleness", "deterministic"), [(1, False), (0, True)])
async def test_a_group_whose_worker_is_gone_is_played_again_under_its_id_by_the_same_version(staleness, deterministic):
    world = World(steps=4, staleness=staleness, deterministic=deterministic)
    world.script.errors["play 1"] = [GONE]
    world.script.errors["play 5"] = [GONE]
    await world.run()
    assert sorted(asked(world)) == [(0, 0), (1, 0), (1, 1), (2, 0), (3, 0), (4, 0), (5, 0), (5, 1), (6, 0), (7, 0)]
    wanted: dict[int, set] = {}
    for request in world.rollouts.started:
        wanted.setdefault(request.group_id, set()).add((request.min_version, request.exact_version))
    assert all(len(versions) == 1 for versions in wanted.values())
    assert sorted(sum(world.trainer.batches, [])) == list(range(8))
    if deterministic:
        assert world.trainer.batches == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert world.rollouts.owned == {} and world.loop.summary.lost == 2


async def test_groups_of_a_version_that_is_not_served_yet_take_no_place_from_older_ones_that_are_played_again():
    world = World(steps=4, staleness=1, deterministic=True)
    world.script.holds = lambda gate: gate == "pull v1" or gate.startswith("play")
    async with world.running() as run:
        await world.script.open(*plays([0, 1]))  # step 1 is trained, v1 is published
        assert "pull v1" in world.script.held and set(asked(world)) == {(group, 0) for group in range(4)}
        world.script.errors["play 2"] = [GONE]
        await world.script.open("play 2")
        assert asked(world)[-1] == (2, 1), "it is played again, and nothing of v1 was begun before"
        await world.script.open("pull v1")
        assert set(asked(world)[5:]) == {(4, 0), (5, 0)}
        await finish(world)
        await run


async def test_losses_of_what_plays_a_group_never_fail_it():
    world = World(steps=1)
    losses = 3 * MAX_ATTEMPTS
    for attempt in range(losses):
        world.script.errors[f"play 1 again {attempt}" if attempt else "play 1"] = [GONE]
    await world.run()
    assert [request for request in asked(world) if request[0] == 1] == [(1, attempt) for attempt in range(losses + 1)]
    assert world.trainer.batches == [[0, 1]]
    assert world.metrics.written[-2][1]["groups/failed"] == 0 and world.loop.summary.lost == losses


async def test_a_deterministic_run_goes_back_where_a_group_that_it_counted_on_cannot_be_played_again():
    world = World(steps=1, groups=2, deterministic=True)
    world.script.holds = lambda gate: gate == "play 1"
    plays_well = world.rollouts.outcome
    world.rollouts.outcome = lambda request: () if request.key[1:] == (0, 1) else plays_well(request)
    async with world.running() as run:
        world.rollouts.lose()
        with pytest.raises(RollbackNeeded, match="group 0 was lost after later groups"):
            await run
    assert "the task raised" in world.printed


async def test_finished_groups_are_lost_with_their_worker_and_a_batch_that_was_read_is_trained():
    world = World(steps=2, groups=2, staleness=1)
    world.script.holds = holding("play", "train")
    async with world.running() as run:
        await world.script.open(*plays([0, 1, 2]))
        assert "train 1" in world.script.held
        world.rollouts.lose()
        assert world.loop.ledger.reports.keys() == {0, 1}
        assert "groups 2 were finished and are played again: rollout0 was killed" in world.printed
        await world.script.open("train 1")
        assert world.trainer.batches == [[0, 1]]
        await finish(world)
        await run
    assert sorted(asked(world)) == [(0, 0), (1, 0), (2, 0), (2, 1), (3, 0)]
    assert world.rollouts.owned == {}


async def test_a_batch_that_could_not_be_read_in_time_is_played_again_with_all_that_its_worker_held():
    world = World(steps=1, groups=3)
    world.script.holds = holding("train")
    async with world.running() as run:
        world.rollouts.lose()
        world.script.errors["train 1"] = [SamplesLost("its file is gone", (1,))]
        await finish(world)
        await run
    assert sorted(asked(world)) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert world.trainer.batches == [[0, 1, 2]] and world.rollouts.owned == {}


async def test_workers_that_end_with_a_stopped_run_lose_nothing():
    world = World(steps=2, staleness=1)
    world.script.holds = holding("train")
    async with world.running() as run:
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    world.rollouts.lose()
    assert "played again" not in world.printed and world.loop.summary.lost == 0


async def test_lost_demonstrations_are_made_again():
    world = World(steps=1, warmup=2)
    world.script.errors["warm up 1"] = [SamplesLost("its file is gone", (1,))]
    await world.run()
    assert [each for each in world.rollouts.started if each.purpose == "demonstrate"][-1].key[1:] == (1, 1)
    assert world.rollouts.owned == {}
