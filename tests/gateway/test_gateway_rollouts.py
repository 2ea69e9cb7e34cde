"""RolloutGateway of a gateway in a process of its own, over a real router, and what a fuzzer asks of it (40 s)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio
from support.fuzzing import fuzz
from support.gateway import MODEL, client, say, served, session_request, until_busy, until_idle
from support.gateway_engines import ENDLESS

from titan_rl.actors.gateway import RolloutGatewayClient
from titan_rl.errors import ActorGone, RequestError
from titan_rl.gateway.config import GatewayConfig
from titan_rl.supervision.supervisor import Supervisor
from titan_rl.types import Message

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def up() -> AsyncIterator[Supervisor]:
    async with served(generators=2, gateway=GatewayConfig(port=0, model=MODEL, rollout_keys=True)) as serving:
        yield serving


@pytest.fixture
def sessions(up) -> RolloutGatewayClient:
    return RolloutGatewayClient(up.gateway.actor)


async def opened(sessions: RolloutGatewayClient, name: str, **options) -> openai.AsyncOpenAI:
    endpoint = await sessions.open(session_request(name, **options))
    return openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)


def endless(client: openai.AsyncOpenAI, **options) -> asyncio.Task:
    call = client.completions.create(
        model=MODEL, prompt="1", max_tokens=ENDLESS, extra_body={"ignore_eos": True}, **options
    )
    return asyncio.ensure_future(call)


async def test_64_programs_play_at_once_and_none_reads_anothers_answers(up, sessions):
    async def play(number: int) -> None:
        client = await opened(sessions, f"one of 64, {number}")
        for turn in range(3):
            await client.chat.completions.create(model=MODEL, messages=say(f"{number}={turn}"))
        record = await sessions.close(f"one of 64, {number}")
        assert record.messages == [Message("user", f"+{number}=2"), Message("assistant", f"{number}=2")]
        assert len(record.turns) == 3

    await asyncio.gather(*map(play, range(64)))


@pytest.mark.parametrize("stream", [False, True])
async def test_an_abandoned_call_leaves_no_slot_and_no_record(up, sessions, stream):
    client = await opened(sessions, f"abandoned {stream}", tokens=ENDLESS)
    call = endless(client, stream=stream, n=2)
    await until_busy(up, 2)
    if stream:
        await (await call).close()
    else:
        call.cancel()
    await until_idle(up)
    await sessions.idle(f"abandoned {stream}", 0)
    await client.chat.completions.create(model=MODEL, messages=say("1"))
    record = await sessions.close(f"abandoned {stream}")
    assert [message.content for message in record.messages] == ["+1", "1"]
    assert len(record.turns) == 1


async def test_what_a_worker_asks_wrongly_comes_back_as_it_is(sessions):
    await opened(sessions, "twice")
    with pytest.raises(RequestError, match="open already"):
        await opened(sessions, "twice")
    await sessions.close("twice")
    for wrong in (sessions.close("twice"), sessions.idle("twice", 1.0)):  # as after the end of their gateway
        with pytest.raises(ActorGone, match="twice"):
            await wrong


async def test_no_request_that_a_fuzzer_makes_up_in_a_session_is_a_server_error(up, sessions, tmp_path):
    """schemathesis against the gateway's own OpenAPI description: no 5xx, and no work left behind."""
    endpoint = await sessions.open(session_request("fuzzed", tokens=8, max_turns=1 << 30))
    program = client(up, endpoint.api_key)
    await program.chat.completions.create(model=MODEL, messages=say("1"))
    await program.completions.create(model=MODEL, prompt="1")
    await fuzz(up, tmp_path, endpoint.api_key, phases="fuzzing")  # the bounds are those of the schema below
    record = await sessions.close("fuzzed")
    assert record.failure == ""
    assert record.turns


@pytest.mark.timeout(500)
@pytest.mark.acceptance  # in CI: the one above, without the coverage of every bound
async def test_no_request_that_a_fuzzer_makes_up_is_a_server_error(tmp_path):
    async with served(generators=1, length=64) as up:  # what a fuzzer asks for is soon answered
        await fuzz(up, tmp_path)
        answer = await client(up).chat.completions.create(model=MODEL, messages=say("1"))
        assert answer.choices[0].message.content == "1"
