"""Requests of one tick travel together, every request is answered exactly once, and a dead target answers too.

About 5 s: it starts real processes.
"""

import asyncio
import dataclasses
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import monarch.actor
import numpy as np
import pytest
from monarch.actor import default_bootstrap_cmd, this_host

from titan_rl.actors.connection import ConnectedActor, bounded, served
from titan_rl.actors.requests import Answers, RequestServer
from titan_rl.actors.router_client import RouterClient
from titan_rl.errors import ActorFailed, ActorGone, CallTimeout, RequestError
from titan_rl.types import Completion, FinishReason, GenerationRequest, PolicyVersion, SamplingParams
from titan_rl.wire import pack

SECONDS = 60.0


def client_of(target: Any, seconds: float = SECONDS) -> RouterClient:
    return RouterClient(target, seconds=seconds, name="target")


def request(request_id: str) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=np.array([2, 3], np.int32),
        sampling=SamplingParams(max_new_tokens=4),
        seed=0,
    )


def completion(request_id: str) -> Completion:
    return Completion(
        request_id=request_id,
        token_ids=np.array([5, 1], np.int32),
        logprobs=np.array([-0.5, -0.1], np.float32),
        versions=np.full(2, PolicyVersion(0, 3).encode(), np.int64),
        finish_reason=FinishReason.STOP,
    )


class Target(RequestServer):
    """Answers ids that begin with "ok", refuses "bad", never answers "hang" unless it is aborted, raises for "crash",
    and answers "torn" with a message that cannot be unpacked."""

    def __init__(self) -> None:
        super().__init__()
        self.messages = 0
        self.aborted: list[str] = []

    @served
    async def pid(self) -> int:
        return os.getpid()

    @served
    async def counts(self) -> tuple[int, list[str]]:
        return self.messages, self.aborted

    def take(self, requests: Sequence[GenerationRequest]) -> None:
        self.messages += 1
        ids = [each.request_id for each in requests]
        self.answer([completion(each) for each in ids if each.startswith("ok")])
        self.answer([], [(each, RequestError("over-long")) for each in ids if each.startswith("bad")])
        unsendable = np.array([-0.1, -0.5])  # float64
        self.answer([dataclasses.replace(completion(each), logprobs=unsendable) for each in ids if "odd" in each])
        for each in ids:
            if each.startswith("torn"):
                packed = pack(Completion, [completion(each)])
                self._asked_by.pop(each).push(Answers(dataclasses.replace(packed, columns=packed.columns[:-1])))
        if any(each.startswith("crash") for each in ids):
            raise RuntimeError("the engine is on fire")

    def give_up(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids
        self.answer([completion(each) for each in request_ids])

    @served
    async def cancelled(self) -> None:
        raise asyncio.CancelledError


class Asker(ConnectedActor):
    """A client in a process of its own."""

    @served
    async def ask(self, target: Any) -> int:
        """Leave a request open; returns the process id."""
        client = client_of(target)
        self.open = asyncio.create_task(client.generate(request("hang")))
        await client.generate(request("ok"))
        return os.getpid()


@pytest.fixture
async def target() -> AsyncIterator[Any]:
    monarch.actor.unhandled_fault_hook = lambda failure: None
    here = {"PYTHONPATH": str(Path(__file__).parent), "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "1s"}
    mesh = this_host().spawn_procs(
        per_host={"ranks": 1}, name="target", bootstrap_command=default_bootstrap_cmd().with_env(here)
    )
    yield mesh.spawn("target", Target).slice(ranks=0)
    await mesh.stop()


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_ticks_requests_travel_in_one_message(target: Any) -> None:
    client = client_of(target)
    answers = await asyncio.gather(*(client.generate(request(f"ok{i}")) for i in range(100)))
    assert [answer.request_id for answer in answers] == [f"ok{i}" for i in range(100)]
    assert (await counts(client))[0] == 1
    await client.disconnect()


async def test_each_answer_comes_as_soon_as_it_is_there(target: Any) -> None:
    client = client_of(target)
    slow = asyncio.create_task(client.generate(request("hang")))
    fast = await client.generate(request("ok"))
    assert fast.finish_reason is FinishReason.STOP
    assert not slow.done()
    slow.cancel()
    await asyncio.gather(slow, return_exceptions=True)
    await client.disconnect()


async def test_an_invalid_request_fails_alone(target: Any) -> None:
    client = client_of(target)
    good, bad = await asyncio.gather(
        client.generate(request("ok")), client.generate(request("bad")), return_exceptions=True
    )
    assert isinstance(good, Completion)
    assert isinstance(bad, RequestError) and "over-long" in str(bad)
    await client.disconnect()


async def test_a_cancelled_call_aborts_the_targets_work(target: Any) -> None:
    client = client_of(target)
    call = asyncio.create_task(client.generate(request("hang")))
    await client.generate(request("ok"))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    while not (await counts(client))[1]:
        await asyncio.sleep(0)
    assert (await counts(client))[1] == ["hang"]
    await client.disconnect()


async def test_a_message_that_raises_costs_its_own_requests(target: Any) -> None:
    client = client_of(target)
    hanging = asyncio.create_task(client.generate(request("hang")))
    assert (await client.generate(request("ok0"))).finish_reason is FinishReason.STOP
    with pytest.raises(RequestError, match="'crash' could not be taken: RuntimeError: the engine is on fire"):
        await client.generate(request("crash"))
    assert (await client.generate(request("ok1"))).finish_reason is FinishReason.STOP
    assert not hanging.done()
    hanging.cancel()
    await asyncio.gather(hanging, return_exceptions=True)
    await client.disconnect()


async def test_an_answer_that_cannot_be_taken_fails_its_own_requests(target: Any) -> None:
    client = client_of(target)
    hanging = asyncio.create_task(client.generate(request("hang")))
    with pytest.raises(RequestError, match="target: its answer could not be taken: ValueError"):
        async with asyncio.timeout(SECONDS):
            await client.generate(request("torn"))
    assert (await client.generate(request("ok"))).finish_reason is FinishReason.STOP
    assert not hanging.done()
    hanging.cancel()
    await asyncio.gather(hanging, return_exceptions=True)
    await client.disconnect()


async def test_a_message_that_cannot_be_unpacked_fails_its_requests(target: Any, monkeypatch: Any) -> None:
    torn = dataclasses.replace(pack(GenerationRequest, [request("ok")]), lengths=np.array([9]), arrays=())
    monkeypatch.setattr("titan_rl.actors.requests.pack", lambda kind, items: torn)
    client = client_of(target)
    with pytest.raises(RequestError, match="request 'ok' could not be taken: "):
        async with asyncio.timeout(SECONDS):
            await client.generate(request("ok"))
    monkeypatch.undo()
    assert (await client.generate(request("ok"))).finish_reason is FinishReason.STOP
    await client.disconnect()


async def test_a_killed_target_that_nobody_replaces_fails_its_open_requests(target: Any) -> None:
    client = client_of(target, seconds=0.2)
    pid = await client.connection.call(SECONDS, Target.pid)
    call = asyncio.create_task(client.generate(request("hang")))
    await client.generate(request("ok"))
    os.kill(pid, signal.SIGKILL)
    for each in (call, asyncio.create_task(client.generate(request("later")))):
        with pytest.raises(ActorGone, match=r"target\.generate_many: the process or actor is gone"):
            await each
    await client.disconnect()


async def test_a_client_that_died_disturbs_nobody(target: Any) -> None:
    here = {"PYTHONPATH": str(Path(__file__).parent)}
    mesh = this_host().spawn_procs(
        per_host={"ranks": 1}, name="asker", bootstrap_command=default_bootstrap_cmd().with_env(here)
    )
    asker = mesh.spawn("asker", Asker).slice(ranks=0)
    pid = await bounded(asker.ask.call_one(target), what="asker.ask", seconds=SECONDS)
    other = client_of(target)
    await other.generate(request("ok1"))
    os.kill(pid, signal.SIGKILL)
    other.abort(["hang"])  # its answer goes to nobody
    async with asyncio.timeout(SECONDS):
        while (await counts(other))[1] != ["hang"]:
            pass  # each look is a round trip
    assert (await other.generate(request("ok2"))).finish_reason is FinishReason.STOP
    await other.disconnect()
    await mesh.stop()


async def test_what_a_lost_client_had_open_is_stopped_and_its_ids_are_free(target: Any) -> None:
    lost = RouterClient(target, seconds=SECONDS, name="target", who="rollout0")
    other = RouterClient(target, seconds=SECONDS, name="target", who="rollout1")
    calls = [asyncio.create_task(each.generate(request(f"hang{i}"))) for i, each in enumerate((lost, other))]
    await asyncio.gather(lost.generate(request("ok0")), other.generate(request("ok1")))
    await other.connection.call(SECONDS, RequestServer.client_lost, "rollout0")
    again = asyncio.create_task(other.generate(request("hang0")))
    await other.generate(request("ok2"))
    assert (await counts(other))[1] == ["hang0"] and not again.done() and not calls[1].done()
    await other.connection.call(SECONDS, RequestServer.reset)
    assert (await counts(other))[1] == ["hang0", "hang1", "hang0"]
    await asyncio.gather(again, *calls)
    for client in (lost, other):
        await client.disconnect()


async def test_a_prompt_that_cannot_travel_fails_alone(target: Any) -> None:
    client = client_of(target)
    await client.generate(request("ok0"))
    prompts = [[["not", "tokens"]], np.array([2**32 + 5, 1]), np.array([2.5, 1.0])]
    bad = [dataclasses.replace(request(f"ok-bad{i}"), prompt_token_ids=prompt) for i, prompt in enumerate(prompts)]
    *refused, good = await asyncio.gather(
        *(client.generate(each) for each in (*bad, request("ok1"))), return_exceptions=True
    )
    for index, error in enumerate(refused):
        assert isinstance(error, RequestError) and f"'ok-bad{index}' cannot be sent" in str(error)
    assert isinstance(good, Completion)
    await client.disconnect()


async def test_what_a_client_had_open_is_aborted_when_it_leaves(target: Any) -> None:
    client, other = client_of(target), client_of(target)
    call = asyncio.create_task(client.generate(request("hang")))
    await client.generate(request("ok"))
    await client.disconnect()
    with pytest.raises(ActorFailed, match="the client was closed"):
        await call
    while (await counts(other))[1] != ["hang"]:
        pass  # each look is a round trip
    await other.disconnect()


async def test_a_live_request_id_is_refused_and_its_holder_is_not_disturbed(target: Any) -> None:
    client, other = client_of(target), client_of(target)
    call = asyncio.create_task(client.generate(request("hang")))
    await client.generate(request("ok"))
    with pytest.raises(RequestError, match="request id hang is already live"):
        await other.generate(request("hang"))
    with pytest.raises(RequestError, match="request id hang is in use"):
        await client.generate(request("hang"))
    assert not call.done()
    await client.disconnect()
    await other.disconnect()
    await asyncio.gather(call, return_exceptions=True)


async def test_a_completion_that_cannot_travel_fails_alone(target: Any) -> None:
    client = client_of(target)
    good, odd = await asyncio.gather(
        client.generate(request("ok")), client.generate(request("odd")), return_exceptions=True
    )
    assert isinstance(good, Completion)
    assert "the answer to 'odd' cannot be sent: ValueError: logprobs holds -0.1" in str(odd)
    await client.disconnect()


async def test_a_cancelled_endpoint_answers_with_an_error(target: Any) -> None:
    with pytest.raises(ActorFailed, match="was interrupted by CancelledError"):
        await bounded(target.cancelled.call_one(), what="target.cancelled", seconds=SECONDS)


async def test_a_call_without_an_answer_names_itself(target: Any) -> None:
    with pytest.raises(CallTimeout, match=r"target\.pid: no answer within 0 s"):
        await bounded(target.pid.call_one(), what="target.pid", seconds=0)


async def counts(client: RouterClient) -> tuple[int, list[str]]:
    """Messages that the target took, and ids that were aborted."""
    return await client.connection.call(SECONDS, Target.counts)
