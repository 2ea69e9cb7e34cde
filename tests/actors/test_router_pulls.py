"""How a fleet comes to serve new weights, as the router's users see it: real actors, scripted generators. About 2 s."""

from __future__ import annotations

import asyncio

import pytest
from router_fleet import Fleet, request

from titan_rl.errors import GeneratorNotServing, WeightsError
from titan_rl.routing.config import RouterConfig
from titan_rl.types import FinishReason, PolicyVersion


async def test_one_generator_serves_while_the_other_drains_and_syncs(draining: Fleet) -> None:
    old = [draining.generate(request(f"old{index}")) for index in range(2)]
    on_g0, on_g1 = await draining.live(0, 1), await draining.live(1, 1)
    pull = draining.pull(1)
    await draining.until_states("syncing", "serving")
    late = draining.generate(request("late"))
    await draining.live(1, 2)
    assert await draining.on(0, "pulls") == ["v0"]  # it waits until it is idle

    await draining.on(0, "finish", list(on_g0), 4)
    after = draining.generate(request("after", step=1))
    await draining.live(0, 1)
    assert await draining.states() == ["serving", "syncing"]  # then they change places
    await draining.on(1, "finish", [*on_g1, "late"], 4)
    await draining.on(0, "finish", ["after"], 4)
    report = await pull
    assert set(report.reports) == {"g0", "g1"} and report.failures == {}
    for completion, version in ((await old[0], 0), (await late, 0), (await after, 1)):
        assert set(completion.versions.tolist()) == {PolicyVersion(0, version).encode()}


async def test_what_does_not_drain_in_time_goes_on_elsewhere_from_its_own_tokens() -> None:
    async with Fleet(RouterConfig(strategy="round_robin", max_syncing=1, drain_seconds=0.05)) as fleet:
        call = fleet.generate(request("slow"))
        await fleet.live(0, 1)
        await fleet.on(0, "progress", 4)
        await fleet.on(0, "hold_pulls")  # while it syncs the other one is not asked to
        pull = fleet.pull(1)
        (attempt,) = (await fleet.live(1, 1)).values()
        assert attempt.request_id != "slow"
        assert attempt.prompt_token_ids.tolist() == [0, 1, 2, 3, 4, 5, 6]
        assert attempt.sampling.max_new_tokens == 9 - 4
        assert attempt.seed == 7
        await fleet.on(1, "finish", [attempt.request_id], 2)
        completion = await call
        assert completion.request_id == "slow"
        assert completion.token_ids.tolist() == [3, 4, 5, 6, 7, 8]
        assert len(completion.logprobs) == len(completion.versions) == 6
        assert completion.finish_reason is FinishReason.STOP
        await fleet.on(0, "release_pulls")
        await pull


async def test_a_hot_swap_does_not_interrupt_what_runs(swapping: Fleet) -> None:
    call = swapping.generate(request("r"))
    await swapping.live(0, 1)
    report = await swapping.pull(1)
    assert report.reports["g0"].requests_in_flight == 1
    assert list(await swapping.live(0, 1)) == ["r"]
    await swapping.on(0, "finish", ["r"], 3)
    assert (await call).request_id == "r"


async def test_a_failed_pull_serves_nothing_is_retried_and_names_itself(draining: Fleet) -> None:
    await draining.on(0, "fail_pulls", 2)
    report = await draining.pull(1)
    assert set(report.reports) == {"g1"}
    assert "lm_head.weight" in report.failures["g0"]
    assert await draining.on(0, "pulls") == ["v0", "v1", "v1"]
    assert await draining.states() == ["stale", "serving"]
    calls = [draining.generate(request(f"r{index}", step=1)) for index in range(3)]
    await draining.live(1, 3)
    assert await draining.live(0, 0) == {}
    await draining.on(1, "finish", ["r0", "r1", "r2"], 1)
    await asyncio.gather(*calls)
    assert set((await draining.pull(2)).reports) == {"g0", "g1"}


async def test_a_hot_swap_that_fails_moves_the_running_requests(swapping: Fleet) -> None:
    call = swapping.generate(request("r"))
    await swapping.live(0, 1)
    await swapping.on(0, "progress", 2)
    await swapping.on(0, "fail_pulls", 2)
    pull = swapping.pull(1)
    (attempt,) = (await swapping.live(1, 1)).values()
    assert attempt.prompt_token_ids.tolist() == [0, 1, 2, 3, 4]
    await swapping.on(1, "finish", [attempt.request_id], 1)
    assert (await call).token_ids.tolist() == [3, 4, 5]
    assert set((await pull).reports) == {"g1"}


async def test_a_pull_that_nobody_takes_is_an_error_with_every_reason(draining: Fleet) -> None:
    await draining.on(0, "fail_pulls", 2)
    await draining.on(1, "fail_pulls", 2)
    with pytest.raises(WeightsError, match=r"v1 is served by nobody: g0: .*lm_head.*g1: .*lm_head"):
        await draining.pull(1)


async def test_a_generator_whose_pull_never_ends_is_told_to_end_and_its_replacement_serves() -> None:
    async with Fleet(RouterConfig(drain_seconds=0.01, pull_seconds=0.05)) as fleet:
        await fleet.on(0, "hold_pulls")
        assert set((await fleet.pull(1)).reports) == {"g1"}
        assert "g0 takes new weights for longer than 5 times router.pull_seconds" in await fleet.on(0, "until_failed")
        assert await fleet.on(1, "pulls") == ["v0", "v1"]
        await fleet.kill(0)
        await fleet.replace(0)
        await fleet.until_states("serving", "serving")


async def test_requests_wait_while_all_sync_and_then_go_through() -> None:
    async with Fleet(RouterConfig()) as fleet:
        for index in range(2):
            await fleet.on(index, "hold_pulls")
        pull = fleet.pull(1)
        for index in range(2):
            await fleet.on(index, "wait_for_pull")
        call = fleet.generate(request("r"))
        given_up = fleet.generate(request("given up"))
        await asyncio.sleep(0)
        assert await fleet.states() == ["syncing", "syncing"]
        given_up.cancel()
        for index in range(2):
            await fleet.on(index, "release_pulls")
        await pull
        (index,) = await fleet.in_flight(1)
        assert list(await fleet.live(index, 1)) == ["r"]
        await fleet.on(index, "finish", ["r"], 2)
        assert set((await call).versions.tolist()) == {PolicyVersion(0, 1).encode()}


async def test_overlapping_pulls_coalesce_to_the_newest_version(draining: Fleet) -> None:
    await draining.on(0, "hold_pulls")
    first = draining.pull(1)
    await draining.on(0, "wait_for_pull")
    second, third = draining.pull(2), draining.pull(3)
    await asyncio.sleep(0)
    await draining.router.fleet_status()  # the router has heard of both: it takes messages in order
    while not third.done():
        await draining.on(0, "release_pulls")
        await asyncio.sleep(0)
    for pull in (first, second, third):
        assert all(report.version >= PolicyVersion(0, 1) for report in (await pull).reports.values())
    assert (await draining.on(0, "pulls"))[-1] == (await draining.on(1, "pulls"))[-1] == "v3"
    assert "v2" not in await draining.on(0, "pulls")


async def test_an_older_version_is_refused_and_a_new_incarnation_is_taken(draining: Fleet) -> None:
    await draining.pull(5)
    with pytest.raises(WeightsError, match="v4 is older than v5"):
        await draining.pull(4)
    assert set((await draining.pull(3, incarnation=1)).reports) == {"g0", "g1"}


async def test_a_cancelled_pull_leaves_nothing_behind(draining: Fleet) -> None:
    await draining.on(0, "hold_pulls")
    pull = draining.pull(1)
    await draining.on(0, "wait_for_pull")
    pull.cancel()
    await asyncio.gather(pull, return_exceptions=True)
    await draining.on(0, "release_pulls")
    assert set((await draining.pull(2)).reports) == {"g0", "g1"}
    assert await draining.states() == ["serving", "serving"]


async def test_a_generator_that_fell_asleep_is_not_reported_as_serving(draining: Fleet) -> None:
    await draining.pull(1)
    await draining.router.sleep("g0")
    report = await draining.pull(1)
    assert set(report.reports) == {"g1"}
    assert report.failures == {"g0": "it is asleep"}


async def test_a_sleeping_generator_serves_nothing_and_wakes_through_a_pull(draining: Fleet) -> None:
    call = draining.generate(request("r"))
    await draining.live(0, 1)
    await draining.on(0, "progress", 1)
    assert await draining.router.sleep("g0") == 0
    (attempt,) = (await draining.live(1, 1)).values()
    assert attempt.prompt_token_ids.tolist() == [0, 1, 2, 3]
    await draining.on(1, "finish", [attempt.request_id], 1)
    await call
    await draining.pull(1)
    assert await draining.states() == ["asleep", "serving"]
    report = await draining.router.wake_up("g0")
    assert report.version == PolicyVersion(0, 1)
    assert await draining.states() == ["serving", "serving"]


async def test_a_pinned_generator_serves_only_its_own_at_its_version_and_then_comes_back(draining: Fleet) -> None:
    router = draining.router
    name = await router.pin(PolicyVersion(0, 0))
    assert name == "g0"
    assert set((await draining.pull(1)).reports) == {"g1"}
    assert await draining.states() == ["pinned", "serving"]
    calls = [draining.generate(request(f"r{index}")) for index in range(2)]
    judged = draining.generate(request("judged", pinned_to=name))
    await draining.live(1, 2)
    assert list(await draining.live(0, 1)) == ["judged"]
    back = asyncio.create_task(router.unpin(name))
    await draining.until_states("syncing", "serving")
    with pytest.raises(GeneratorNotServing, match="g0 is not pinned"):
        await draining.generate(request("late", pinned_to=name))
    await draining.on(0, "finish", ["judged"], 2)
    assert set((await judged).versions.tolist()) == {PolicyVersion(0, 0).encode()}
    assert (await back).version == PolicyVersion(0, 1)
    assert await draining.states() == ["serving", "serving"]
    await draining.on(1, "finish", ["r0", "r1"], 1)
    await asyncio.gather(*calls)
    await draining.in_flight(0)


async def test_a_pinned_generator_serves_while_all_others_sync() -> None:
    async with Fleet(RouterConfig()) as fleet:
        name = await fleet.router.pin(PolicyVersion(0, 0))
        await fleet.on(1, "hold_pulls")
        pull = fleet.pull(1)
        await fleet.on(1, "wait_for_pull")
        waiting = fleet.generate(request("r"))
        judged = fleet.generate(request("judged", pinned_to=name))
        await fleet.live(0, 1)
        await fleet.on(0, "finish", ["judged"], 1)
        await judged
        await fleet.on(1, "release_pulls")
        await pull
        await fleet.live(1, 1)
        await fleet.on(1, "finish", ["r"], 1)
        await waiting


async def test_a_late_generator_is_not_dead_and_serves_once_its_pull_has_ended() -> None:
    fleet = Fleet(RouterConfig(pull_seconds=0.01), count=1)
    await fleet.on(0, "hold_pulls")
    pull = fleet.pull(0)
    await fleet.until_states("stale")
    (late,) = await fleet.router.fleet_status()
    assert "g0 takes new weights for longer than router.pull_seconds (0.01)" in late.last_error
    call = fleet.generate(request("r"))
    await fleet.on(0, "release_pulls")
    assert set((await pull).reports) == {"g0"}
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


async def test_requests_are_served_though_every_pull_is_overtaken() -> None:
    async with Fleet(RouterConfig(), count=1) as fleet:
        pulls = []
        for step in range(1, 4):
            await fleet.on(0, "hold_pulls")
            pulls.append(fleet.pull(step))
            await fleet.on(0, "wait_for_pull")
            pulls.append(fleet.pull(step + 1))
            await asyncio.sleep(0)
            call = await fleet.ask(f"r{step}", step=step)
            await fleet.on(0, "release_pulls")
            await fleet.live(0, 1)
            await fleet.on(0, "hold_pulls")
            await fleet.on(0, "finish", [f"r{step}"], 1)
            assert set((await call).versions.tolist()) == {PolicyVersion(0, step).encode()}
            await fleet.on(0, "wait_for_pull")
        await fleet.on(0, "release_pulls")
        await asyncio.gather(*pulls)


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
        await fleet.router.start_over()
        pull = fleet.pull(5)
        await fleet.on(0, "release_pulls")
        assert (await pull).reports["g0"].version == PolicyVersion(0, 5)
        await asyncio.gather(newer, return_exceptions=True)
        assert await fleet.on(0, "pulls") == ["v0", "v7", "v5"]
