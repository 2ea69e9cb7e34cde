"""What becomes of requests, as the router's users see it: real actors, scripted generators. About 2 s."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from router_fleet import SECONDS, Fleet, request
from scripted_generator import publication

from titan_rl.errors import ActorFailed, GeneratorFailed, RequestError, RequestLost, RequestTimeout, WeightsError
from titan_rl.routing.config import RouterConfig
from titan_rl.routing.strategies import RoundRobin
from titan_rl.types import FinishReason, GenerationRequest


async def test_a_cancelled_generate_frees_its_slot(draining: Fleet) -> None:
    call = draining.generate(request("r"))
    await draining.live(0, 1)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await draining.live(0, 0)
    await draining.in_flight(0)


async def test_a_request_that_is_cancelled_in_the_tick_it_was_sent_frees_its_slot(draining: Fleet) -> None:
    call = draining.generate(request("r"))
    other = draining.generate(request("other"))
    await asyncio.sleep(0)  # both are in the outbox of this tick
    call.cancel()
    home = await draining.until_runs("other")
    assert await draining.in_flight(1) == [home]
    assert list(await draining.live(home, 1)) == ["other"]
    await draining.on(home, "finish", ["other"], 1)
    await other
    await draining.in_flight(0)


async def test_a_session_waits_for_its_syncing_generator_and_stays() -> None:
    config = RouterConfig(strategy="sticky_session", max_syncing=1, strategy_kwargs={"sync_wait_seconds": SECONDS})
    async with Fleet(config) as fleet:
        first = fleet.generate(request("turn0", session="s"))
        home = await fleet.until_runs("turn0")
        await fleet.on(home, "finish", ["turn0"], 1)
        await first
        await fleet.on(home, "hold_pulls")
        pull = fleet.pull(1)
        await fleet.on(home, "wait_for_pull")
        second = fleet.generate(request("turn1", session="s"))
        other = fleet.generate(request("other"))
        await fleet.live(1 - home, 1)
        await fleet.on(1 - home, "finish", ["other"], 1)
        await other
        await fleet.on(home, "release_pulls")
        assert list(await fleet.live(home, 1)) == ["turn1"]
        await fleet.on(home, "finish", ["turn1"], 1)
        await second
        await pull


async def test_a_session_that_was_ended_is_not_kept_where_it_was() -> None:
    async with Fleet(RouterConfig(strategy="sticky_session")) as fleet:
        first = fleet.generate(request("turn0", session="s"))
        home = await fleet.until_runs("turn0")
        await fleet.on(home, "finish", ["turn0"], 1)
        await first
        await fleet.in_flight(0)
        fleet.router.end_sessions(["s", "of nobody"])
        again = fleet.generate(request("turn1", session="s"))
        assert await fleet.until_runs("turn1") == 1 - home, "of two idle generators the other was chosen less recently"
        await fleet.on(1 - home, "finish", ["turn1"], 1)
        await again


async def test_a_session_that_ends_with_a_request_in_flight_is_not_kept_afterwards() -> None:
    """Whether the request left in an earlier tick or not."""
    async with Fleet(RouterConfig(strategy="sticky_session")) as fleet:
        first = fleet.generate(request("turn0", session="s"))
        await asyncio.sleep(0)  # the request is queued in the tick in which its session ends
        fleet.router.end_sessions(["s"])
        home = await fleet.until_runs("turn0")
        await fleet.on(home, "finish", ["turn0"], 1)
        await first
        await fleet.in_flight(0)
        again = fleet.generate(request("turn1", session="s"))
        assert await fleet.until_runs("turn1") == 1 - home
        await fleet.on(1 - home, "finish", ["turn1"], 1)
        await again


async def test_sampling_that_depends_on_past_output_is_refused_where_resumption_is_on(draining: Fleet) -> None:
    with pytest.raises(RequestError, match="router.resume = false"):
        await draining.generate(request("r", penalty=0.5))
    async with Fleet(RouterConfig(resume=False)) as fleet:
        call = fleet.generate(request("r", penalty=0.5))
        await fleet.on(await fleet.until_runs("r"), "finish", ["r"], 1)
        assert (await call).finish_reason is FinishReason.STOP


async def test_closing_the_router_fails_what_is_open(draining: Fleet) -> None:
    calls = [draining.generate(request(f"r{index}")) for index in range(4)]
    await draining.live(0, 2)
    await draining.live(1, 2)
    await draining.router.close()
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(outcome, GeneratorFailed) and "the router was closed" in str(outcome)


class Broken(RoundRobin):
    """Its bookkeeping fails when a request ends."""

    def released(self, request: GenerationRequest, name: str, load: int) -> None:
        raise KeyError(name)


async def test_a_router_whose_bookkeeping_fails_ends_and_nobody_waits_for_ever() -> None:
    async with Fleet(RouterConfig(strategy=f"{__file__}:Broken")) as fleet:
        calls = [fleet.generate(request(f"r{index}")) for index in range(2)]
        home = await fleet.until_runs("r0")
        await fleet.on(home, "finish", ["r0"], 1)
        for each in (*calls, fleet.generate(request("later"))):
            with pytest.raises(ActorFailed, match="router: KeyError"):
                await asyncio.wait_for(each, SECONDS)


async def test_when_all_are_dead_for_good_requests_fail_at_once_with_the_reasons() -> None:
    async with Fleet(RouterConfig(), count=1) as fleet:
        call = fleet.generate(request("r"))
        await fleet.live(0, 1)
        await fleet.on(0, "die")
        await fleet.router.generator_left_out("g0", "it was killed three times")
        for each in (call, fleet.generate(request("later"))):
            with pytest.raises(GeneratorFailed, match=r"every generator is dead \(g0: it was killed"):
                await each
        with pytest.raises(WeightsError, match="v1 is served by nobody: g0: it was killed"):
            await fleet.router.pull_model_state_dict(publication(1))


async def test_what_a_lost_generator_runs_goes_on_elsewhere_without_its_word() -> None:
    async with Fleet(RouterConfig()) as fleet:
        call = fleet.generate(request("r"))
        lost = await fleet.until_runs("r")
        await fleet.kill(lost)
        attempts = list(await fleet.live(1 - lost, 1))
        await fleet.on(1 - lost, "finish", attempts, 2)
        assert (await call).token_ids.tolist() == [3, 4]
        status = (await fleet.router.fleet_status())[lost]
        assert (status.state, status.last_error, status.in_flight) == ("dead", "it was killed", 0)


async def test_a_request_whose_time_is_over_is_stopped_and_fails_alone() -> None:
    async with Fleet(RouterConfig(request_seconds=0.05), count=3) as fleet:
        with pytest.raises(RequestTimeout, match=r"request r: not finished after 0\.05 s .*router\.request_seconds"):
            await fleet.router.generate(request("r"))
        await fleet.in_flight(0)  # its engine has stopped it
        for index in range(3):
            await fleet.live(index, 0)
        statuses = await fleet.router.fleet_status()
        assert [status.state for status in statuses] == ["serving"] * 3
        assert [(status.served, status.failed) for status in statuses] == [(0, 0)] * 3


async def test_a_request_under_which_generators_die_does_not_kill_the_whole_fleet() -> None:
    async with Fleet(RouterConfig(request_retries=1), count=3) as fleet:
        call = fleet.generate(request("poison"))
        first = await fleet.until_runs("poison")
        await fleet.on(first, "die")
        second = await fleet.until_runs("poison~1")
        await fleet.on(second, "die")
        with pytest.raises(RequestLost, match=r"2 generators died under it .*router\.request_retries = 1"):
            await call
        (survivor,) = {0, 1, 2} - {first, second}
        assert [state for state in await fleet.states() if state != "dead"] == ["serving"]
        other = fleet.generate(request("other"))
        await fleet.live(survivor, 1)
        await fleet.on(survivor, "finish", ["other"], 1)
        await other


async def test_an_id_that_is_in_use_is_refused_and_is_free_again_after_an_abort() -> None:
    async with Fleet(RouterConfig(), count=1) as fleet:
        await fleet.on(0, "hold_pulls")
        pull = fleet.pull(1)
        await fleet.on(0, "wait_for_pull")
        given_up, other = await fleet.ask("r"), await fleet.ask("other")
        with pytest.raises(RequestError, match="request id r is already live"):
            await (await fleet.ask("r"))
        await fleet.abort(given_up)
        again = await fleet.ask("r")
        await fleet.on(0, "release_pulls")
        await pull
        assert sorted(await fleet.live(0, 2)) == ["other", "r"]
        await fleet.on(0, "finish", ["r", "other"], 1)
        assert [each.finish_reason for each in await asyncio.gather(again, other)] == [FinishReason.STOP] * 2


async def test_the_length_of_an_answer_that_was_given_up_is_counted(draining: Fleet) -> None:
    given_up = await draining.ask("r")
    home = await draining.until_runs("r")
    await draining.on(home, "progress", 3)
    await draining.abort(given_up)
    await draining.in_flight(0)
    status = (await draining.router.fleet_status())[home]
    assert (status.aborted, status.aborted_tokens) == (1, 3)


async def test_a_malformed_request_is_refused_alone(draining: Fleet) -> None:
    odd = [dataclasses.replace(request("r"), request_id=5), dataclasses.replace(request("p"), pinned_to=["g0"])]
    good = draining.generate(request("good"))
    for outcome in await asyncio.gather(*map(draining.generate, odd), return_exceptions=True):
        assert isinstance(outcome, RequestError) and "TypeError" in str(outcome)
    home = await draining.until_runs("good")
    await draining.on(home, "finish", ["good"], 1)
    assert (await good).finish_reason is FinishReason.STOP
