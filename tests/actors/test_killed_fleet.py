"""A killed generator or router costs its requests time and nothing else: real processes. About 20 s."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from mortal_fleet import SECONDS, MortalFleet, has_its_tokens, mortal_fleet, request

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
    tokens: list[int] = []
    completion: Completion | None = None
    async for each in router.stream(request(number)):
        begun.set()
        if isinstance(each, Piece):
            assert each.offset == len(tokens)
            tokens += each.token_ids.tolist()
        else:
            completion = each
    assert completion is not None and completion.token_ids.tolist() == tokens
    return completion


async def test_a_killed_generator_gets_no_requests_until_its_replacement_serves(fleet: MortalFleet) -> None:
    answers: Counter[str] = Counter()
    over = asyncio.Event()

    async def client() -> None:
        while not over.is_set():
            completion = await fleet.router.generate(request(next(_numbers)))
            assert has_its_tokens(completion)
            answers[completion.request_id] += 1

    async def handled(name: str) -> tuple[int, int]:
        (status,) = [each for each in await fleet.router.fleet_status() if each.name == name]
        return status.in_flight, status.served + status.failed

    async def kills() -> None:
        while not all([(await handled(name))[0] for name in fleet.generators]):
            pass  # each look is a round trip
        await fleet.kill("generator1")
        in_flight, before = await handled("generator1")
        assert in_flight == 0
        await fleet.replace("generator1")
        replaced_at = len(answers)
        await fleet.until_all_serve()
        while (await handled("generator1"))[1] == 0:
            pass
        assert len(answers) > replaced_at > 0, "the others went on"

    clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
    try:
        async with asyncio.timeout(SECONDS):
            await kills()
    finally:
        over.set()
        await asyncio.gather(*clients)
    assert set(answers.values()) == {1}


async def test_a_killed_router_costs_no_request_and_no_token(fleet: MortalFleet) -> None:
    begun = asyncio.Event()
    worker = RouterClient(fleet.router.actor, seconds=SECONDS, who="rollout0", owned=True)
    streams = [asyncio.create_task(streamed(worker, next(_numbers), begun)) for _ in range(STREAMS)]
    calls = [asyncio.create_task(worker.generate(request(next(_numbers)))) for _ in range(REQUESTS)]
    await asyncio.wait_for(begun.wait(), SECONDS)
    await fleet.kill("router")
    assert not any(each.done() for each in (*streams, *calls))
    with pytest.raises(ActorGone):
        await fleet.router.fleet_status()
    await fleet.replace("router")
    worker.replace(fleet.router.actor)
    async with asyncio.timeout(SECONDS):
        completions = await asyncio.gather(*streams, *calls)
    assert all(has_its_tokens(completion) for completion in completions)
    await fleet.until_all_serve()
    assert [each.version for each in await fleet.router.fleet_status()] == ["v0"] * 3
    await fleet.pull(1)
    assert [each.version for each in await fleet.router.fleet_status()] == ["v1"] * 3
    await worker.disconnect()


async def test_a_router_that_nobody_replaces_fails_its_requests(fleet: MortalFleet) -> None:
    client = RouterClient(fleet.router.actor, seconds=SECONDS)
    client.lose("it was killed")
    for call in (client.generate(request(next(_numbers))), client.fleet_status()):
        with pytest.raises(ActorGone, match="it was killed"):
            await call


async def test_a_generator_that_works_or_idles_has_a_pulse(fleet: MortalFleet) -> None:
    async def moved(name: str) -> None:
        before = await fleet.generators[name].pulse()
        while await fleet.generators[name].pulse() == before:
            pass

    async with asyncio.timeout(SECONDS):
        await moved("generator0")
        call = asyncio.create_task(fleet.router.generate(request(next(_numbers))))
        await asyncio.gather(*map(moved, fleet.generators))
        await call
        assert (await fleet.router.pulse()) < (await fleet.router.pulse())
