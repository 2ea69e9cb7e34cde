"""What becomes of requests, also when generators die and are replaced: real actors, scripted generators. About 2 s."""

from __future__ import annotations

import asyncio

import pytest
from router_fleet import SECONDS, Fleet, publication, request

from titan_rl.actors.router import GeneratorRouter
from titan_rl.actors.router_client import RouterClient
from titan_rl.errors import ActorFailed, ActorGone, GeneratorFailed, RequestError, WeightsError
from titan_rl.routing.config import RouterConfig
from titan_rl.routing.dispatcher import Dispatcher
from titan_rl.routing.strategies import RoundRobin
from titan_rl.types import FinishReason, GenerationRequest


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


async def test_a_router_that_fails_to_stop_a_request_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(dispatcher: Dispatcher, request_id: str) -> None:
        raise KeyError(request_id)

    monkeypatch.setattr(Dispatcher, "abort", fail)
    async with Fleet(RouterConfig()) as fleet:
        call = fleet.generate(request("r"))
        await fleet.until_runs("r")
        fleet.router.abort(["r"])
        with pytest.raises(ActorFailed, match="router: KeyError"):
            await asyncio.wait_for(call, SECONDS)


class BrokenStart(RoundRobin):
    """Its bookkeeping fails with the first request."""

    def assigned(self, request: GenerationRequest, name: str, load: int) -> None:
        raise KeyError(name)


async def test_a_router_that_has_ended_answers_every_call_that_would_wait() -> None:
    async with Fleet(RouterConfig(strategy=f"{__file__}:BrokenStart"), count=1) as fleet:
        with pytest.raises(ActorFailed, match="router: KeyError"):
            await fleet.router.generate(request("r"))
        for call in (fleet.pull(1), fleet.router.until_unavailable()):
            with pytest.raises(ActorFailed, match="router: KeyError"):
                await asyncio.wait_for(call, SECONDS)


async def test_whoever_watches_a_router_hears_why_it_ended_and_requests_wait_for_the_next_one() -> None:
    broken, sound = Fleet(RouterConfig(strategy=f"{__file__}:BrokenStart"), 1), Fleet(RouterConfig(), 1)
    async with broken, sound:
        client = RouterClient(broken.router.actor, seconds=SECONDS, is_replaced=True)
        watch, call = asyncio.create_task(client.watch()), asyncio.create_task(client.generate(request("r")))
        with pytest.raises(ActorFailed, match="router: KeyError") as raised:
            await asyncio.wait_for(watch, SECONDS)
        assert not isinstance(raised.value, ActorGone), "its process lives, so nobody else reports it"
        client.replace([sound.router.actor])
        await sound.until_runs("r")
        await sound.on(0, "finish", ["r"], 1)
        assert (await asyncio.wait_for(call, SECONDS)).finish_reason is FinishReason.STOP
        await client.disconnect()


async def test_whoever_watches_a_router_hears_that_it_was_closed() -> None:
    async with Fleet(RouterConfig(), count=1) as fleet:
        watch = asyncio.create_task(fleet.router.watch())
        await fleet.router.fleet_status()
        await RouterClient(fleet.router.actor, seconds=SECONDS).close()
        await asyncio.wait_for(watch, SECONDS)


async def test_when_all_are_dead_for_good_requests_fail_at_once_with_the_reasons() -> None:
    async with Fleet(RouterConfig(), count=1) as fleet:
        call = fleet.generate(request("r"))
        await fleet.live(0, 1)
        await fleet.on(0, "die")
        await fleet.router.call(GeneratorRouter.generator_left_out, "g0", "it was killed three times")
        for each in (call, fleet.generate(request("later"))):
            with pytest.raises(GeneratorFailed, match=r"every generator is dead \(g0: it was killed"):
                await each
        with pytest.raises(WeightsError, match="v1 is served by nobody: g0: it was killed"):
            await fleet.router.pull_model_state_dict(publication(1))


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


async def test_requests_wait_for_the_replacement_of_the_last_generator() -> None:
    async with Fleet(RouterConfig(), count=1) as fleet:
        calls = [fleet.generate(request("running"))]
        await fleet.live(0, 1)
        await fleet.kill(0)
        calls.append(await fleet.ask("waiting"))
        pull = fleet.pull(1)
        assert await fleet.states() == ["dead"]
        await fleet.replace(0)
        assert set((await pull).serving) == {"g0"}
        assert sorted(await fleet.live(0, 2)) == ["running~1", "waiting"]
        await fleet.on(0, "finish", ["running~1", "waiting"], 2)
        assert [len(each.token_ids) for each in await asyncio.gather(*calls)] == [2, 2]
        (status,) = await fleet.router.fleet_status()
        assert (status.state, status.served, status.failed, status.last_error) == ("serving", 2, 0, "")


async def test_a_router_that_replaces_one_waits_for_generators_that_are_replaced_too() -> None:
    fleet = Fleet(RouterConfig(), count=0, awaited=("g0",))
    fleet.generators.append(None)
    pull = fleet.pull(1)
    await fleet.router.fleet_status()
    assert not pull.done()
    await fleet.replace(0)
    await asyncio.wait_for(pull, SECONDS)
    assert await fleet.states() == ["serving"]
    await fleet.router.close()


async def test_a_generator_that_dies_on_its_way_back_is_not_taken_for_the_router(draining: Fleet) -> None:
    await draining.router.call(GeneratorRouter.sleep, "g0")
    await draining.on(0, "hold_pulls")
    wake_up = asyncio.create_task(draining.router.call(GeneratorRouter.wake_up, "g0"))
    await draining.on(0, "wait_for_pull")
    await draining.on(0, "fail_pulls", 1, True)
    await draining.on(0, "release_pulls")
    with pytest.raises(GeneratorFailed, match="g0 did not come back: it was killed in its pull"):
        await asyncio.wait_for(wake_up, SECONDS)


async def test_nothing_that_a_dead_generator_still_says_reaches_its_replacement(swapping: Fleet) -> None:
    lost, kept = swapping.generate(request("lost")), swapping.generate(request("kept"))
    await swapping.live(0, 1)
    await swapping.live(1, 1)
    await swapping.on(0, "hold_pulls")
    pull = swapping.pull(1)
    await swapping.on(0, "wait_for_pull")
    await swapping.kill(0)
    await pull  # of the other
    before = await swapping.replace(0, hold_pulls=True)
    await swapping.on(0, "wait_for_pull")
    await before.finish.call_one(["lost"], 5)  # the dead one answers after all, and ends its pull
    await before.release_pulls.call_one()
    await before.wait_for_requests.call_one(0)
    assert list(await swapping.live(1, 2)) == ["kept", "lost~1"]
    assert await swapping.states() == ["pulling", "serving"]
    assert [status.version for status in await swapping.router.fleet_status()] == ["none", "v1"]
    await swapping.on(0, "release_pulls")
    await swapping.until_states("serving", "serving")
    await swapping.on(1, "finish", ["kept", "lost~1"], 2)
    assert [len(each.token_ids) for each in await asyncio.gather(lost, kept)] == [2, 2]


async def test_the_requests_of_a_router_before_this_one_are_forgotten_before_the_first_pull() -> None:
    fleet = Fleet(RouterConfig(), count=1)
    before = RouterClient(fleet.generators[0], seconds=SECONDS)
    left = asyncio.create_task(before.generate(request("r")))
    await fleet.live(0, 1)
    await fleet.router.pull_model_state_dict(publication(0))
    assert await fleet.live(0, 0) == {}
    call = fleet.generate(request("r"))
    await fleet.live(0, 1)
    await fleet.on(0, "finish", ["r"], 1)
    assert len((await call).token_ids) == 1 and len((await left).token_ids) == 0
    await before.disconnect()
    await fleet.router.close()


async def test_the_requests_of_a_lost_client_are_stopped_wherever_they_are() -> None:
    async with Fleet(RouterConfig(), count=1) as fleet:
        running = await fleet.ask("running", who="rollout0")
        waiting = await fleet.ask("waiting", step=1, who="rollout0")
        other = await fleet.ask("other", who="rollout1")
        await fleet.live(0, 2)
        await fleet.router.call(GeneratorRouter.client_lost, "rollout0")
        assert list(await fleet.live(0, 1)) == ["other"]
        again = [await fleet.ask(each) for each in ("running", "waiting")]
        await fleet.live(0, 3)
        await fleet.on(0, "finish", ["running", "waiting", "other"], 1)
        assert [len(each.token_ids) for each in await asyncio.gather(*again, other)] == [1, 1, 1]
        await asyncio.gather(running, waiting)
