"""How a fleet comes to serve new weights, as the router's users see it: real actors, scripted generators. About 2 s."""

from __future__ import annotations

import asyncio

import pytest
from router_fleet import Fleet, request

from titan_rl.actors.router import GeneratorRouter
from titan_rl.errors import WeightsError
from titan_rl.routing.config import RouterConfig
from titan_rl.types import FinishReason, PolicyVersion
from titan_rl.weights.manifest import FleetPull


async def test_a_failed_pull_serves_nothing_is_retried_and_names_itself(draining: Fleet) -> None:
    await draining.on(0, "fail_pulls", 2)
    report = await draining.pull(1)
    assert set(report.serving) == {"g1"}
    assert "lm_head.weight" in report.failures["g0"]
    assert await draining.on(0, "pulls") == ["v0", "v1", "v1"]
    assert await draining.states() == ["stale", "serving"]
    calls = [draining.generate(request(f"r{index}", step=1)) for index in range(3)]
    await draining.live(1, 3)
    assert await draining.live(0, 0) == {}
    await draining.on(1, "finish", ["r0", "r1", "r2"], 1)
    await asyncio.gather(*calls)
    assert set((await draining.pull(2)).serving) == {"g0", "g1"}
    for index in range(2):
        await draining.on(index, "fail_pulls", 2)
    with pytest.raises(WeightsError, match=r"v3 is served by nobody: g0: .*lm_head.*g1: .*lm_head"):
        await draining.pull(3)


async def test_a_version_that_was_served_and_that_nobody_can_load_again_is_named_and_the_next_is_served(
    draining: Fleet,
) -> None:
    """Its publication is damaged, or was freed, because the trainer goes on from an earlier state."""
    told = asyncio.create_task(draining.router.until_unavailable())
    for index in range(2):
        await draining.kill(index)
    for index in range(2):
        await draining.replace(index, hold_pulls=True)
        await draining.on(index, "fail_pulls", 2)
        await draining.on(index, "release_pulls")
    assert "v0 is served by nobody any more: g0: " in await asyncio.wait_for(told, 10)
    assert await draining.states() == ["stale", "stale"]
    assert set((await draining.pull(1)).serving) == {"g0", "g1"}


async def test_a_generator_whose_pull_never_ends_is_told_to_end_and_its_replacement_serves() -> None:
    async with Fleet(RouterConfig(drain_seconds=0.01, pull_seconds=0.05)) as fleet:
        await fleet.on(0, "hold_pulls")
        assert set((await fleet.pull(1)).serving) == {"g1"}
        assert "g0 takes new weights for longer than 5 times router.pull_seconds" in await fleet.on(0, "until_failed")
        assert await fleet.on(1, "pulls") == ["v0", "v1"]
        await fleet.kill(0)
        await fleet.replace(0)
        await fleet.until_states("serving", "serving")


async def test_a_cancelled_pull_leaves_nothing_behind(draining: Fleet) -> None:
    await draining.on(0, "hold_pulls")
    pull = draining.pull(1)
    await draining.on(0, "wait_for_pull")
    pull.cancel()
    await asyncio.gather(pull, return_exceptions=True)
    await draining.on(0, "release_pulls")
    assert set((await draining.pull(2)).serving) == {"g0", "g1"}
    assert await draining.states() == ["serving", "serving"]


async def test_a_sleeping_generator_serves_nothing_and_wakes_through_a_pull(draining: Fleet) -> None:
    call = draining.generate(request("r"))
    await draining.live(0, 1)
    await draining.on(0, "progress", 1)
    assert await draining.router.call(GeneratorRouter.sleep, "g0") == 0
    (attempt,) = (await draining.live(1, 1)).values()
    assert attempt.prompt_token_ids.tolist() == [0, 1, 2, 3]
    await draining.on(1, "finish", [attempt.request_id], 1)
    await call
    assert (await draining.pull(1)).failures == {"g0": "it is asleep"}
    assert await draining.states() == ["asleep", "serving"]
    assert await draining.router.call(GeneratorRouter.wake_up, "g0") == PolicyVersion(0, 1)
    assert await draining.states() == ["serving", "serving"]


async def test_a_late_generator_is_not_dead_and_serves_once_its_pull_has_ended() -> None:
    fleet = Fleet(RouterConfig(pull_seconds=0.01), count=1)
    await fleet.on(0, "hold_pulls")
    pull = fleet.pull(0)
    await fleet.until_states("late")
    (late,) = await fleet.router.fleet_status()
    assert "g0 takes new weights for longer than router.pull_seconds (0.01)" in late.last_error
    call = fleet.generate(request("r"))
    await fleet.on(0, "release_pulls")
    assert set((await pull).serving) == {"g0"}
    await fleet.live(0, 1)
    await fleet.on(0, "finish", ["r"], 1)
    assert (await call).finish_reason is FinishReason.STOP
    assert await fleet.states() == ["serving"] and await fleet.on(0, "pulls") == ["v0"]
    await fleet.router.close()


async def test_what_runs_on_a_generator_that_dies_in_its_pull_goes_on_elsewhere(swapping: Fleet) -> None:
    call = swapping.generate(request("r"))
    await swapping.live(0, 1)
    await swapping.on(0, "fail_pulls", 1, True)
    pull = swapping.pull(1)
    assert await swapping.until_runs("r~1") == 1
    assert (await pull).failures == {"g0": "it was killed in its pull"}
    await swapping.on(1, "finish", ["r~1"], 2)
    assert (await call).request_id == "r"
    assert await swapping.states() == ["dead", "serving"]


@pytest.mark.parametrize("held", [False, True])
async def test_where_the_trainer_goes_on_from_an_earlier_state_older_weights_are_served(held: bool) -> None:
    async with Fleet(RouterConfig(), count=1) as fleet:
        if held:
            await fleet.on(0, "hold_pulls")
        newer = fleet.pull(7)
        if held:
            await fleet.on(0, "wait_for_pull")
        else:
            await newer
        pull = fleet.pull(5)
        await fleet.router.fleet_status()  # the router has heard of it: it takes messages in order
        await fleet.on(0, "release_pulls")
        assert await pull == FleetPull(version=PolicyVersion(0, 5), serving=("g0",), failures={})
        await newer
        assert await fleet.on(0, "pulls") == ["v0", "v7", "v5"]
