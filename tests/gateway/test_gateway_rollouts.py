"""RolloutGateway of a gateway in a process of its own, over a real router: abandoned calls and ends (20 s)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio
from support.gateway import MODEL, say, served, session_request, until_busy, until_idle
from support.gateway_engines import ENDLESS

from titan_rl.actors.gateway import GatewayClient
from titan_rl.errors import ActorGone, RequestError
from titan_rl.gateway.config import GatewayConfig
from titan_rl.launch.start import Serving
from titan_rl.types import Message

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def up() -> AsyncIterator[Serving]:
    async with served(generators=2, gateway=GatewayConfig(port=0, model=MODEL, rollout_keys=True)) as serving:
        yield serving


@pytest.fixture
def sessions(up) -> GatewayClient:
    return GatewayClient(up.gateway)


async def opened(sessions: GatewayClient, name: str, **options) -> openai.AsyncOpenAI:
    endpoint = await sessions.open(session_request(name, **options))
    return openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)


def endless(client: openai.AsyncOpenAI, **options) -> asyncio.Task:
    call = client.completions.create(
        model=MODEL, prompt="1", max_tokens=ENDLESS, extra_body={"ignore_eos": True}, **options
    )
    return asyncio.ensure_future(call)


async def test_a_program_plays_and_its_rollout_is_recorded(up, sessions):
    client = await opened(sessions, "plays")
    answer = await client.chat.completions.create(model=MODEL, messages=say("12"))
    record = await sessions.close("plays")
    assert answer.choices[0].message.content == "12"
    assert record.messages == (Message("user", "+12"), Message("assistant", "12"))
    assert record.turns[0].completion.logprobs.tolist() == [-0.25] * 3
    with pytest.raises(openai.AuthenticationError):
        await client.chat.completions.create(model=MODEL, messages=say("12"))


async def test_64_programs_play_at_once_and_none_reads_anothers_answers(up, sessions):
    async def play(number: int) -> None:
        client = await opened(sessions, f"one of 64, {number}")
        for turn in range(3):
            await client.chat.completions.create(model=MODEL, messages=say(f"{number}={turn}"))
        record = await sessions.close(f"one of 64, {number}")
        assert record.messages == (Message("user", f"+{number}=2"), Message("assistant", f"{number}=2"))
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


async def test_closing_a_session_frees_its_slots_and_tells_its_program(up, sessions):
    client = await opened(sessions, "closed", tokens=ENDLESS)
    idle = asyncio.ensure_future(sessions.idle("closed", 1e6))
    call = endless(client)
    await until_busy(up, 1)
    record = await sessions.close("closed")
    with pytest.raises(openai.PermissionDeniedError) as ended:
        await call
    assert ended.value.code == "rollout_over"
    await idle
    await until_idle(up)
    assert record.turns == ()


async def test_what_a_worker_asks_wrongly_comes_back_as_it_is(sessions):
    await opened(sessions, "twice")
    with pytest.raises(RequestError, match="open already"):
        await opened(sessions, "twice")
    await sessions.close("twice")
    for wrong in (sessions.close("twice"), sessions.idle("twice", 1.0)):  # as after the end of their gateway
        with pytest.raises(ActorGone, match="twice"):
            await wrong
