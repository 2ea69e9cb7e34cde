"""Generators that die and are replaced, as the router's users see it: real actors, scripted generators. About 1 s."""

from __future__ import annotations

import asyncio

import pytest
from router_fleet import SECONDS, Fleet, request
from scripted_generator import publication

from titan_rl.actors.router_client import RouterClient
from titan_rl.errors import GeneratorFailed
from titan_rl.routing.config import RouterConfig
from titan_rl.types import PolicyVersion


async def test_requests_wait_for_the_replacement_of_the_last_generator() -> None:
    async with Fleet(RouterConfig(), count=1) as fleet:
        calls = [fleet.generate(request("running"))]
        await fleet.live(0, 1)
        await fleet.kill(0)
        calls.append(await fleet.ask("waiting"))
        pull = fleet.pull(1)
        assert await fleet.states() == ["dead"]
        await fleet.replace(0)
        assert set((await pull).reports) == {"g0"}
        assert sorted(await fleet.live(0, 2)) == ["running~1", "waiting"]
        await fleet.on(0, "finish", ["running~1", "waiting"], 2)
        assert [len(each.token_ids) for each in await asyncio.gather(*calls)] == [2, 2]
        (status,) = await fleet.router.fleet_status()
        assert (status.state, status.served, status.failed, status.last_error) == ("serving", 2, 0, "")


@pytest.mark.parametrize("exact", [False, True])
async def test_a_router_that_replaces_one_waits_for_generators_that_are_replaced_too(exact: bool) -> None:
    fleet = Fleet(RouterConfig(), count=0, awaited=("g0",))
    fleet.generators.append(None)
    wanted = fleet.router.serve_beside(publication(1)) if exact else fleet.router.pull_model_state_dict(publication(1))
    pull = asyncio.create_task(wanted)
    with pytest.raises(GeneratorFailed, match="g0 cannot be unpinned: it is dead"):
        await fleet.router.unpin("g0")  # whoever pinned it asked the router before
    with pytest.raises(GeneratorFailed, match="g1 cannot be unpinned: it is left out"):
        await fleet.router.unpin("g1")
    assert not pull.done()
    await fleet.replace(0)
    await asyncio.wait_for(pull, SECONDS)
    assert await fleet.states() == ["serving"]
    await fleet.router.close()


async def test_a_generator_that_dies_on_its_way_back_is_not_taken_for_the_router(draining: Fleet) -> None:
    name = await draining.router.pin(PolicyVersion(0, 0))
    index = int(name.removeprefix("g"))
    await draining.on(index, "hold_pulls")
    unpin = asyncio.create_task(draining.router.unpin(name))
    await draining.on(index, "wait_for_pull")
    await draining.on(index, "fail_pulls", 1, True)
    await draining.on(index, "release_pulls")
    with pytest.raises(GeneratorFailed, match=f"{name} did not come back: it was killed in its pull"):
        await asyncio.wait_for(unpin, SECONDS)


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
    assert await swapping.states() == ["syncing", "serving"]
    assert [status.version for status in await swapping.router.fleet_status()] == ["none", "v1"]
    await swapping.on(0, "release_pulls")
    await swapping.until_states("serving", "serving")
    await swapping.on(1, "finish", ["kept", "lost~1"], 2)
    assert [len(each.token_ids) for each in await asyncio.gather(lost, kept)] == [2, 2]


async def test_a_drain_of_a_dead_generator_is_not_that_of_its_replacement(draining: Fleet) -> None:
    call = draining.generate(request("r"))
    await draining.live(0, 1)
    pull = draining.pull(1)
    await draining.until_states("syncing", "serving")
    await draining.kill(0)
    await draining.replace(0)
    await draining.until_states("serving", "serving")
    assert await draining.on(0, "pulls") == ["v1"], "the old one's drain ended with it"
    assert set((await pull).reports) == {"g1"}
    await draining.on(1, "finish", ["r~1"], 1)
    assert (await call).request_id == "r"


async def test_a_spare_takes_the_place_of_a_dead_generator_and_its_replacement_is_the_spare() -> None:
    async with Fleet(RouterConfig(), count=2, serving=1) as fleet:
        assert await fleet.states() == ["serving", "asleep"]
        assert await fleet.on(1, "pulls") == []
        call = fleet.generate(request("r"))
        await fleet.live(0, 1)
        await fleet.kill(0)
        assert list(await fleet.live(1, 1)) == ["r~1"]
        await fleet.replace(0)
        assert await fleet.states() == ["asleep", "serving"]
        await fleet.on(1, "finish", ["r~1"], 2)
        assert len((await call).token_ids) == 2
        assert set((await fleet.pull(1)).reports) == {"g1"}


async def test_a_pinned_generator_that_dies_ends_its_pin(draining: Fleet) -> None:
    name = await draining.router.pin(PolicyVersion(0, 0))
    judged = draining.generate(request("judged", pinned_to=name))
    await draining.live(0, 1)
    await draining.kill(0)
    with pytest.raises(GeneratorFailed, match="the generator that it was pinned to is not any more"):
        await judged
    await draining.replace(0)
    with pytest.raises(GeneratorFailed, match="g0 cannot be unpinned"):
        await draining.router.unpin(name)
    await draining.until_states("serving", "serving")


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
        await fleet.router.client_lost("rollout0")
        assert list(await fleet.live(0, 1)) == ["other"]
        again = [await fleet.ask(each) for each in ("running", "waiting")]
        await fleet.live(0, 3)
        await fleet.on(0, "finish", ["running", "waiting", "other"], 1)
        assert [len(each.token_ids) for each in await asyncio.gather(*again, other)] == [1, 1, 1]
        await asyncio.gather(running, waiting)
