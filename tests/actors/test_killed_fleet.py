"""A killed generator or router costs its requests time and nothing else: real processes. About 20 s."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from mortal_fleet import SECONDS, MortalFleet, has_its_tokens, mortal_fleet, request
from support.processes import halt

from titan_rl.actors.router_client import RouterClient
from titan_rl.errors import ActorGone
from titan_rl.types import Completion, Piece

pytestmark = pytest.mark.asyncio(loop_scope="module")

REQUESTS, STREAMS, CLIENTS = 200, 20, 64
_numbers = itertools.count()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MortalFleet]:
    async with mortal_fleet(tmp_path_factory.mktemp("fleet"), 3) as up:
        yield up


async def streamed(router: RouterClient, number: int, begun: asyncio.Event) -> Completion:
    """Asserts that the pieces are the completion."""
    pieces: list[Piece] = []
    completion = await router.stream(request(number), lambda piece: begun.set() or pieces.append(piece))
    assert [piece.offset for piece in pieces] == [0, *(piece.end for piece in pieces[:-1])]
    assert completion.token_ids.tolist() == [token for piece in pieces for token in piece.token_ids.tolist()]
    return completion


@pytest.mark.parametrize("goes_on", [True, False])
async def test_a_generator_that_is_stopped_keeps_its_requests_until_it_goes_on_or_is_killed(
    fleet: MortalFleet, goes_on: bool
) -> None:
    calls = [asyncio.create_task(fleet.router.generate(request(next(_numbers)))) for _ in range(CLIENTS)]
    while not all(each.in_flight for each in await fleet.router.fleet_status()):
        pass  # each look is a round trip
    halt(fleet.pids["generator0"])
    async with asyncio.timeout(SECONDS):
        while sum(each.in_flight for each in (await fleet.router.fleet_status())[1:]):
            pass
        assert not all(call.done() for call in calls)
        if goes_on:
            os.kill(fleet.pids["generator0"], signal.SIGCONT)
        else:
            await fleet.kill("generator0")
        assert all(has_its_tokens(completion) for completion in await asyncio.gather(*calls))
        if not goes_on:
            await fleet.replace("generator0")
        await fleet.until_all_serve()


async def test_a_killed_router_costs_no_request_and_no_token(fleet: MortalFleet) -> None:
    begun = asyncio.Event()
    worker = RouterClient(fleet.router.actor, seconds=SECONDS, who="rollout0", is_replaced=True)
    streams = [asyncio.create_task(streamed(worker, next(_numbers), begun)) for _ in range(STREAMS)]
    calls = [asyncio.create_task(worker.generate(request(next(_numbers)))) for _ in range(REQUESTS)]
    await asyncio.wait_for(begun.wait(), SECONDS)
    await fleet.kill("router")
    assert not any(each.done() for each in (*streams, *calls))
    with pytest.raises(ActorGone):
        await fleet.router.fleet_status()
    await fleet.replace("router")
    worker.replace([fleet.router.actor])
    async with asyncio.timeout(SECONDS):
        completions = await asyncio.gather(*streams, *calls)
    assert all(has_its_tokens(completion) for completion in completions)
    await fleet.until_all_serve()
    assert [each.version for each in await fleet.router.fleet_status()] == ["v0"] * 3
    await fleet.pull(1)
    assert [each.version for each in await fleet.router.fleet_status()] == ["v1"] * 3
    await worker.disconnect()
