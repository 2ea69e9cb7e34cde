"""What clients are told when their gateway ends: the app alone, and the command at Ctrl-C (20 s)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncGenerator, Callable

import httpx
import openai
import pytest
from starlette.types import Message, Receive, Scope, Send
from support.gateway import ENGINE, LENGTH, MODEL, ScriptedFleet, app_over, http_client, policy_of, session_request
from support.gateway_engines import ENDLESS
from test_serve_command import KEY, left_of, served_checkpoint

from titan_rl.chat.renderer import SymbolRenderer
from titan_rl.gateway.callers import ApiKeys, RolloutKeys
from titan_rl.types import Completion, GenerationRequest, Piece

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "1"}]}


class HalfSaid(ScriptedFleet):
    """Streams its text and then never ends."""

    async def stream(self, request: GenerationRequest, on_piece: Callable[[Piece], object]) -> Completion:
        completion = await super().stream(request, on_piece)
        await self._never()
        return completion


async def opened(renderer: SymbolRenderer, fleet: ScriptedFleet, *, rollout_keys: bool):
    """Keys, an HTTP client with one of them, and an event: a body has begun to be sent."""
    key, policy = "", policy_of(renderer, 32)
    keys = RolloutKeys(policy, base_url="", run_seed=1) if rollout_keys else ApiKeys(policy)
    if rollout_keys:
        key = (await keys.open(session_request("s"))).api_key
    app = app_over(fleet, policy, keys)
    begun = asyncio.Event()

    async def watched(scope: Scope, receive: Receive, send: Send) -> None:
        async def told(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.body":
                begun.set()

        await app(scope, receive, told)

    return keys, http_client(watched, key), begun


@pytest.mark.parametrize("rollout_keys", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_open_call_is_a_503_that_may_be_tried_again(renderer, rollout_keys, stream):
    fleet = ScriptedFleet(renderer, None)
    keys, http, _ = await opened(renderer, fleet, rollout_keys=rollout_keys)
    call = asyncio.ensure_future(http.post("/v1/chat/completions", json={**CHAT, "stream": stream}))
    await fleet.until(1)
    keys.end_all()
    answer = await call
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "gateway_closing"
    assert answer.headers["x-should-retry"] == "true" and int(answer.headers["retry-after"]) > 0
    await fleet.until(0)


async def test_a_call_whose_body_is_still_coming_is_a_503_too(renderer):
    keys, http, _ = await opened(renderer, ScriptedFleet(renderer), rollout_keys=False)
    reading = asyncio.Event()

    async def pieces() -> AsyncGenerator[bytes, None]:
        yield b"{"
        reading.set()
        await asyncio.get_running_loop().create_future()

    call = asyncio.ensure_future(http.post("/v1/chat/completions", content=pieces()))
    await reading.wait()
    keys.end_all()
    answer = await call
    assert (answer.status_code, answer.headers["x-should-retry"]) == (503, "true")


@pytest.mark.parametrize("path", ["/health", "/metrics"])
async def test_a_call_that_waits_for_the_router_is_a_503_too(renderer, path):
    class SilentRouter(ScriptedFleet):
        async def fleet_status(self):
            await self._never()

    fleet = SilentRouter(renderer)
    keys, http, _ = await opened(renderer, fleet, rollout_keys=False)
    call = asyncio.ensure_future(http.get(path))
    await fleet.until(1)
    keys.end_all()
    answer = await call
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "gateway_closing")
    await fleet.until(0)


@pytest.mark.parametrize("rollout_keys", [False, True])
async def test_a_stream_ends_with_the_reason(renderer, rollout_keys):
    fleet = HalfSaid(renderer, "01")
    keys, http, begun = await opened(renderer, fleet, rollout_keys=rollout_keys)
    call = asyncio.ensure_future(http.post("/v1/chat/completions", json={**CHAT, "stream": True}))
    await begun.wait()
    keys.end_all()
    *_, reason, end = [line.removeprefix("data: ") for line in (await call).text.split("\n") if line]
    assert json.loads(reason)["error"]["code"] == "gateway_closing"
    assert end == "[DONE]"
    await fleet.until(0)


async def test_a_stream_of_a_rollout_that_has_ended_says_so(renderer):
    fleet = HalfSaid(renderer, "01")
    keys, http, begun = await opened(renderer, fleet, rollout_keys=True)
    call = asyncio.ensure_future(http.post("/v1/chat/completions", json={**CHAT, "stream": True}))
    await begun.wait()
    await keys.close("s")
    *_, reason, end = [line.removeprefix("data: ") for line in (await call).text.split("\n") if line]
    assert (json.loads(reason)["error"]["code"], end) == ("rollout_over", "[DONE]")


def endless(ai: openai.AsyncOpenAI, model: str, *, stream: bool) -> asyncio.Task:
    body = {"ignore_eos": True}
    call = ai.completions.create(model=model, prompt="1", max_tokens=ENDLESS, stream=stream, extra_body=body)
    return asyncio.ensure_future(call)


async def told_that_it_closes(whole, stream):
    with pytest.raises(openai.InternalServerError) as told:
        await whole
    assert (told.value.status_code, told.value.code) == (503, "gateway_closing")
    with pytest.raises(openai.APIError, match="being closed"):
        async for _ in stream:
            pass


async def test_ctrl_c_in_a_terminal_answers_what_is_open(tmp_path):
    options = ("--generator.engine", ENGINE, "--generator.max-model-len", str(LENGTH))
    options += ("--generator.max-num-batched-tokens", str(LENGTH))
    with served_checkpoint(tmp_path, *options, length=LENGTH) as (process, url, model):
        ai = openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0)
        whole, begun = (endless(ai, model, stream=stream) for stream in (False, True))
        stream = await begun
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {KEY}"}) as http:
            metrics = url.removesuffix("/v1") + "/metrics"
            while 'in_flight{generator="generator0"} 2.0' not in (await http.get(metrics)).text:
                pass
        os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to every process
        await told_that_it_closes(whole, stream)
        process.wait()
    assert left_of(process.pid) == []
