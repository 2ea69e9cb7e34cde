"""Requests of one tick travel together, and every request is answered exactly once (1 s)."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Sequence

import pytest
from monarch.actor import this_proc
from router_fleet import SECONDS, request
from scripted_router import sampled

from titan_rl.actors.router_client import RouterClient
from titan_rl.errors import ActorFailed, RequestError
from titan_rl.rpc.connection import endpoint
from titan_rl.rpc.requests import RequestServer
from titan_rl.types import Completion, GenerationRequest

_serial = itertools.count()


class Target(RequestServer):
    """Answers ids that begin with "ok", with metrics that cannot be pickled "odd", refuses "bad", never answers "hang"
    unless it is aborted, raises for "crash"."""

    def __init__(self) -> None:
        super().__init__()
        self.messages = 0
        self.aborted: list[str] = []

    @endpoint
    async def counts(self) -> tuple[int, list[str]]:
        """Messages that came, and ids that were aborted."""
        return self.messages, self.aborted

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self.messages += 1
        for each in requests:
            if each.request_id.startswith("ok"):
                self.answer([sampled(each)])
            elif each.request_id.startswith("odd"):
                self.answer([dataclasses.replace(sampled(each), metrics={"generation/seconds_queued": lambda: 0.0})])
            elif each.request_id.startswith("bad"):
                self.answer([], [(each.request_id, RequestError("over-long"))])
            elif each.request_id.startswith("crash"):
                raise RuntimeError("the engine is on fire")

    def stop_requests(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids
        self.answer([sampled(request(each), tokens=0) for each in request_ids])


@pytest.fixture
async def clients() -> AsyncIterator[tuple[RouterClient, RouterClient]]:
    """Two of one server."""
    target = this_proc().spawn(f"target{next(_serial)}", Target)
    clients = RouterClient(target, seconds=SECONDS, name="target"), RouterClient(target, seconds=SECONDS, name="target")
    yield clients
    await asyncio.gather(*(client.disconnect() for client in clients))


async def counts(client: RouterClient) -> tuple[int, list[str]]:
    return await client.connection.call(SECONDS, Target.counts)


Clients = tuple[RouterClient, RouterClient]


async def test_a_ticks_requests_travel_in_one_message(clients: Clients) -> None:
    answers = await asyncio.gather(*(clients[0].generate(request(f"ok{i}")) for i in range(100)))
    assert [answer.request_id for answer in answers] == [f"ok{i}" for i in range(100)]
    assert (await counts(clients[0]))[0] == 1


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (request("bad"), "over-long"),
        (request("crash"), "the requests of one message failed: RuntimeError: the engine is on fire"),
        (request("odd"), "the answer cannot be sent: .*pickle"),
        (dataclasses.replace(request("ok0"), session_id=lambda: None), "target: requests cannot be sent: .*pickle"),
    ],
    ids=["refused", "raises", "unpicklable answer", "unpicklable request"],
)
async def test_what_fails_fails_alone_and_at_once(clients: Clients, one: GenerationRequest, reason: str) -> None:
    hanging = asyncio.create_task(clients[0].generate(request("hang")))
    assert isinstance(await clients[0].generate(request("ok1")), Completion)
    with pytest.raises(RequestError, match=reason):
        await asyncio.wait_for(clients[0].generate(one), SECONDS)
    assert isinstance(
        await clients[0].generate(dataclasses.replace(request(one.request_id), request_id="ok2")), Completion
    )
    assert not hanging.done()
    hanging.cancel()


async def test_what_a_client_had_open_is_aborted_when_it_leaves(clients: Clients) -> None:
    client, other = clients
    call = asyncio.create_task(client.generate(request("hang")))
    await client.generate(request("ok"))
    await client.disconnect()
    with pytest.raises(ActorFailed, match="the client was closed"):
        await call
    while (await counts(other))[1] != ["hang"]:
        pass  # each look is a round trip


async def test_a_live_request_id_is_refused_and_its_holder_is_not_disturbed(clients: Clients) -> None:
    client, other = clients
    call = asyncio.create_task(client.generate(request("hang")))
    await client.generate(request("ok"))
    with pytest.raises(RequestError, match="request id hang is already live"):
        await other.generate(request("hang"))
    with pytest.raises(RequestError, match="request id hang is in use"):
        await client.generate(request("hang"))
    with pytest.raises(RequestError, match="request id hang is in use"):
        await client.stream(request("hang"), print)
    assert not call.done()
    call.cancel()
