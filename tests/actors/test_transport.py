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

import cloudpickle
import monarch.actor
import numpy as np
import pytest
from monarch.actor import Actor, Channel, default_bootstrap_cmd, this_host

from titan_rl.actors.calls import bounded, served
from titan_rl.actors.reply_desk import Answers, Reply, ReplyDesk
from titan_rl.actors.transport import CompletionClient, RequestClient
from titan_rl.errors import ActorFailed, CallTimeout, GeneratorFailed, RequestError, TitanError
from titan_rl.types import Completion, FinishReason, GenerationRequest, PolicyVersion, SamplingParams


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


class Target(Actor):
    """Answers ids that begin with "ok", refuses "bad", never answers "hang" unless it is aborted, and raises for
    "crash"; of "lost<n>" it says n times that somebody else has answered it before it does."""

    def __init__(self) -> None:
        self.messages = 0
        self.aborted: list[str] = []
        self.desk = ReplyDesk(note_seconds=0)
        self.asked: dict[str, int] = {}

    @served
    async def pid(self) -> int:
        return os.getpid()

    @served
    async def counts(self) -> tuple[int, list[str]]:
        return self.messages, self.aborted

    @served
    async def connections(self) -> int:
        return self.desk.connections

    @served
    async def generate_many(self, address: bytes, connection: int) -> None:
        await self.desk.attend(address, connection, self.take, self.give_up)

    @served
    async def hang_up(self) -> None:
        self.desk.close(GeneratorFailed("the target was closed"))

    def take(self, requests: Sequence[GenerationRequest], reply: Reply) -> None:
        self.messages += 1
        ids = [each.request_id for each in self.desk.open(requests, reply)]
        self.desk.answer([completion(each) for each in ids if each.startswith("ok")])
        self.desk.answer([], [(each, RequestError("over-long")) for each in ids if each.startswith("bad")])
        for each in ids:
            if each.startswith("lost"):
                self.asked[each] = self.asked.get(each, 0) + 1
                if self.asked[each] <= int(each.removeprefix("lost")):
                    self.desk.delivered([each])
                else:
                    self.desk.answer([completion(each)])
        if any(each.startswith("crash") for each in ids):
            raise RuntimeError("the engine is on fire")

    def give_up(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids
        self.desk.answer([completion(each) for each in request_ids])

    @served
    async def cancelled(self) -> None:
        raise asyncio.CancelledError


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
    client = CompletionClient(target, name="target")
    answers = await asyncio.gather(*(client.generate(request(f"ok{i}")) for i in range(100)))
    assert [answer.request_id for answer in answers] == [f"ok{i}" for i in range(100)]
    assert (await target.counts.call_one())[0] == 1
    await client.close()


async def test_each_answer_comes_as_soon_as_it_is_there(target: Any) -> None:
    client = CompletionClient(target, name="target")
    slow = asyncio.create_task(client.generate(request("hang")))
    fast = await client.generate(request("ok"))
    assert fast.finish_reason is FinishReason.STOP
    assert not slow.done()
    slow.cancel()
    await asyncio.gather(slow, return_exceptions=True)
    await client.close()


async def test_an_invalid_request_fails_alone(target: Any) -> None:
    client = CompletionClient(target, name="target")
    good, bad = await asyncio.gather(
        client.generate(request("ok")), client.generate(request("bad")), return_exceptions=True
    )
    assert isinstance(good, Completion)
    assert isinstance(bad, RequestError) and "over-long" in str(bad)
    await client.close()


async def test_a_cancelled_call_aborts_the_targets_work(target: Any) -> None:
    client = CompletionClient(target, name="target")
    call = asyncio.create_task(client.generate(request("hang")))
    await client.generate(request("ok"))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    while not (await target.counts.call_one())[1]:
        await asyncio.sleep(0)
    assert (await target.counts.call_one())[1] == ["hang"]
    await client.close()


class Between:
    """Asks the target on behalf of others; remembers what it hears."""

    def __init__(self, target: Any) -> None:
        self.completed: list[str] = []
        self.failed: list[str] = []
        self.delivered: list[str] = []
        self.client = RequestClient(target, name="target", on_answers=self.on_answers, on_delivered=self.on_delivered)

    def on_answers(self, completions: list[Completion], failures: list[tuple[str, TitanError]]) -> None:
        self.completed += [each.request_id for each in completions]
        self.failed += [request_id for request_id, _ in failures]

    def on_delivered(self, request_ids: list[str]) -> None:
        self.delivered += request_ids

    async def until(self, delivered: list[str], failed: tuple[str, ...] = ()) -> None:
        async def wait() -> None:
            while (self.delivered, self.failed) != (delivered, list(failed)):
                await asyncio.sleep(0)

        await asyncio.wait_for(wait(), 20)


async def test_what_ends_well_goes_straight_to_the_caller_and_the_one_in_between_hears_of_it(target: Any) -> None:
    between = Between(target)
    port, receiver = Channel[Any].open()
    between.client.send([request("ok0"), request("hang"), request("bad")], caller=cloudpickle.dumps(port))
    assert [each.request_id for each in (await receiver.recv()).completions.unpack()] == ["ok0"]
    await between.until(["ok0"], failed=("bad",))
    between.client.abort(["hang"])
    assert [each.request_id for each in (await receiver.recv()).completions.unpack()] == ["hang"]
    await between.until(["ok0", "hang"], failed=("bad",))
    assert between.completed == []
    await between.client.close()


class Caller(Actor):
    """Has a reply port, and can be killed."""

    @served
    async def port(self) -> tuple[int, bytes]:
        port, self.receiver = Channel[Any].open()
        return os.getpid(), cloudpickle.dumps(port)


async def test_a_caller_that_died_disturbs_nobody(target: Any) -> None:
    here = {"PYTHONPATH": str(Path(__file__).parent)}
    mesh = this_host().spawn_procs(
        per_host={"ranks": 1}, name="caller", bootstrap_command=default_bootstrap_cmd().with_env(here)
    )
    pid, port = await mesh.spawn("caller", Caller).slice(ranks=0).port.call_one()
    between = Between(target)
    between.client.send([request("hang0"), request("hang1")], caller=port)
    os.kill(pid, signal.SIGKILL)
    for index in range(2):
        between.client.abort([f"hang{index}"])
    await between.until(["hang0", "hang1"])
    other = CompletionClient(target, name="target")
    assert (await other.generate(request("ok"))).finish_reason is FinishReason.STOP
    await other.close()
    await between.client.close()
    await mesh.stop()


async def test_a_message_that_raises_costs_its_own_requests(target: Any) -> None:
    client = CompletionClient(target, name="target")
    hanging = asyncio.create_task(client.generate(request("hang")))
    assert (await client.generate(request("ok0"))).finish_reason is FinishReason.STOP
    with pytest.raises(RequestError, match="'crash' could not be taken: RuntimeError: the engine is on fire"):
        await client.generate(request("crash"))
    assert (await client.generate(request("ok1"))).finish_reason is FinishReason.STOP
    assert not hanging.done() and await target.connections.call_one() == 1
    hanging.cancel()
    await asyncio.gather(hanging, return_exceptions=True)
    await client.close()


async def test_an_answer_that_cannot_be_taken_fails_its_own_requests(target: Any) -> None:
    between = Between(target)
    take = between.on_answers

    def on_answers(completions: list[Completion], failures: list[tuple[str, TitanError]]) -> None:
        take(completions, failures)
        if "ok0" in between.completed[-1:]:
            raise KeyError("ok0")

    between.client = RequestClient(target, name="target", on_answers=on_answers, on_delivered=between.on_delivered)
    between.client.send([request("hang")])
    for request_id in ("ok0", "ok1"):
        between.client.send([request(request_id)])
        while request_id not in between.completed:
            await asyncio.sleep(0)
    assert between.failed == [], "the one that hangs goes on, and so does the connection"
    await between.client.close()


async def test_a_killed_target_fails_its_open_requests(target: Any) -> None:
    client = CompletionClient(target, name="target")
    pid = await target.pid.call_one()
    call = asyncio.create_task(client.generate(request("hang")))
    await client.generate(request("ok"))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorFailed, match=r"target\.generate_many: the process or actor is gone"):
        await call
    await client.close()


async def test_an_answer_that_was_lost_on_its_way_is_asked_for_once_more(target: Any) -> None:
    client = CompletionClient(target, name="target", late_seconds=0)
    other = asyncio.create_task(client.generate(request("hang")))
    assert (await client.generate(request("lost1"))).finish_reason is FinishReason.STOP
    with pytest.raises(ActorFailed, match="target: the answer was sent twice, but never came"):
        await client.generate(request("lost2"))
    assert not other.done()
    assert (await target.counts.call_one())[0] == 4, "a message for each time"
    await client.close()
    await asyncio.gather(other, return_exceptions=True)


async def test_an_answer_that_comes_before_its_time_is_not_asked_for_again(target: Any) -> None:
    client = CompletionClient(target, name="target")
    other = asyncio.create_task(client.generate(request("lost1")))  # in 30 s, which nobody waits for
    assert (await client.generate(request("ok"))).finish_reason is FinishReason.STOP
    assert not other.done()
    await client.close()
    with pytest.raises(ActorFailed, match="the client was closed"):
        await other


async def test_a_prompt_that_cannot_travel_fails_alone(target: Any) -> None:
    client = CompletionClient(target, name="target")
    await client.generate(request("ok0"))
    prompts = [[["not", "tokens"]], np.array([2**32 + 5, 1]), np.array([2.5, 1.0])]
    bad = [dataclasses.replace(request(f"ok-bad{i}"), prompt_token_ids=prompt) for i, prompt in enumerate(prompts)]
    *refused, good = await asyncio.gather(
        *(client.generate(each) for each in (*bad, request("ok1"))), return_exceptions=True
    )
    for index, error in enumerate(refused):
        assert isinstance(error, RequestError) and f"'ok-bad{index}' cannot be sent" in str(error)
    assert isinstance(good, Completion)
    await client.close()


async def test_a_client_that_leaves_leaves_nothing_behind(target: Any) -> None:
    client = CompletionClient(target, name="target")
    call = asyncio.create_task(client.generate(request("hang")))
    await client.generate(request("ok"))
    assert await target.connections.call_one() == 1
    await client.close()
    with pytest.raises(ActorFailed, match="the client was closed"):
        await call
    while await target.connections.call_one():
        await asyncio.sleep(0)
    assert (await target.counts.call_one())[1] == ["hang"]


async def test_a_target_that_closes_fails_what_is_open_with_its_reason(target: Any) -> None:
    client = CompletionClient(target, name="target")
    call = asyncio.create_task(client.generate(request("hang")))
    await client.generate(request("ok"))
    await target.hang_up.call_one()
    with pytest.raises(GeneratorFailed, match="the target was closed"):
        await call
    while await target.connections.call_one():
        await asyncio.sleep(0)
    await client.close()


async def test_a_cancelled_endpoint_answers_with_an_error(target: Any) -> None:
    with pytest.raises(ActorFailed, match="was interrupted by CancelledError"):
        await bounded(target.cancelled.call_one(), what="target.cancelled", seconds=20)


async def test_a_call_without_an_answer_names_itself(target: Any) -> None:
    with pytest.raises(CallTimeout, match=r"target\.pid: no answer within 0 s"):
        await bounded(target.pid.call_one(), what="target.pid", seconds=0)


async def test_a_live_request_id_is_refused_and_its_holder_is_not_disturbed() -> None:
    desk = ReplyDesk()
    first, second = Inbox(), Inbox()
    assert [each.request_id for each in desk.open([request("r0")], Reply(first))] == ["r0"]
    assert desk.open([request("r0")], Reply(second)) == []
    assert "already live" in str(second.failures["r0"])
    desk.answer([completion("r0")])
    assert first.completed == ["r0"]
    assert len(desk) == 0


async def test_an_answer_that_comes_twice_is_sent_once() -> None:
    desk = ReplyDesk()
    inbox = Inbox()
    desk.open([request("r0"), request("r1")], Reply(inbox))
    desk.answer([completion("r0")])
    desk.answer([completion("r0")], [("r0", RequestError("late"))])
    assert inbox.completed == ["r0"] and inbox.failures == {}
    assert desk.live() == ["r1"]


async def test_a_completion_that_cannot_travel_fails_alone() -> None:
    desk = ReplyDesk()
    inbox = Inbox()
    desk.open([request("r0"), request("r1")], Reply(inbox))
    rounded = dataclasses.replace(completion("r0"), logprobs=np.array([-0.1, -0.5]))
    desk.answer([rounded, completion("r1")])
    assert inbox.completed == ["r1"]
    assert "the completion of 'r0' cannot be sent: logprobs holds -0.1" in str(inbox.failures["r0"])


async def test_what_was_delivered_in_a_while_is_told_at_once_and_after_it_was_sent() -> None:
    log: list[str] = []
    desk = ReplyDesk(note_seconds=0)
    between, caller = Inbox(log, "between"), Inbox(log, "caller")
    desk.open([request(f"r{index}") for index in range(3)], Reply(between, caller))
    for index in range(3):
        desk.answer([completion(f"r{index}")])
    assert log == ["caller"] * 3
    await asyncio.wait_for(between.heard.wait(), 20)
    assert between.delivered == ["r0", "r1", "r2"] and log == ["caller"] * 3 + ["between"]


class Inbox:
    """A reply port that remembers."""

    def __init__(self, log: list[str] | None = None, name: str = "") -> None:
        self.log = [] if log is None else log
        self.name = name
        self.completed: list[str] = []
        self.failures: dict[str, TitanError] = {}
        self.delivered: list[str] = []
        self.heard = asyncio.Event()

    def send(self, answers: Answers) -> None:
        self.log.append(self.name)
        if answers.completions is not None:
            self.completed += [each.request_id for each in answers.completions.unpack()]
        self.failures.update(dict(answers.failures))
        self.delivered += answers.delivered
        self.heard.set()
