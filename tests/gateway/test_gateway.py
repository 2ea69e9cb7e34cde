"""The gateway as the plain `openai` client sees it, over a real router and two generators (20 s)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import pytest_asyncio
from support.dialects import join_calls
from support.gateway import ADD, MODEL, client, in_flight, say, served, until_busy, until_idle
from support.gateway_engines import ENDLESS

from titan_rl.gateway.config import GatewayConfig
from titan_rl.supervision.supervisor import Supervisor

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def up() -> AsyncIterator[Supervisor]:
    async with served(generators=2, gateway=GatewayConfig(port=0, model=MODEL, max_body_bytes=1 << 20)) as serving:
        yield serving


async def post(up: Supervisor, path: str, body: object, **options) -> httpx.Response:
    async with httpx.AsyncClient(base_url=up.gateway.url) as http:
        return await http.post(path, content=body if isinstance(body, bytes) else json.dumps(body), **options)


JSON = {"content-type": "application/json"}


# What is answered.


async def test_logprobs_speak_about_every_sampled_token(up):
    answer = await client(up).chat.completions.create(
        model=MODEL, messages=say("1=<result>"), logprobs=True, extra_body={"return_token_ids": True}
    )
    entries = answer.choices[0].logprobs.content
    assert [entry.token for entry in entries] == ["1", "=", "<result>", "<eos>"]
    assert {entry.logprob for entry in entries} == {-0.25}
    assert len(answer.choices[0].token_ids) == len(entries)
    text = await client(up).completions.create(model=MODEL, prompt="+12", logprobs=0)
    assert text.choices[0].logprobs.text_offset == [0, 1, 2]
    assert text.choices[0].logprobs.tokens == ["1", "2", "<eos>"]


async def test_a_stop_text_of_one_token_ends_the_engines_work(up):
    answer = await client(up).completions.create(
        model=MODEL,
        prompt="1",
        stop="5",
        seed=1,
        max_tokens=ENDLESS,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    assert "5" not in choice.text
    ids = (await client(up).completions.create(model=MODEL, prompt="+5", extra_body={"return_token_ids": True})).choices
    assert choice.token_ids[-1] == ids[0].token_ids[0]


# What is streamed.

USER: list[Any] = [{"role": "user", "content": "12="}]
GOES_ON: dict[str, Any] = {"max_tokens": ENDLESS, "extra_body": {"ignore_eos": True}}
"""What is asked like this ends only when somebody ends it."""


async def collected(stream: Any) -> dict[int, dict[str, Any]]:
    """What the chunks of each choice say, put together."""
    choices: dict[int, dict[str, Any]] = {}
    async for chunk in stream:
        for choice in chunk.choices:
            mine = choices.setdefault(
                choice.index, {"text": "", "calls": [], "tokens": [], "ids": [], "reason": None, "chunks": 0}
            )
            assert mine["reason"] is None, "nothing comes after the reason"
            mine["chunks"] += 1
            mine["reason"] = choice.finish_reason
            mine["ids"] += getattr(choice, "token_ids", [])
            if hasattr(choice, "delta"):
                assert (choice.delta.role == "assistant") == (mine["chunks"] == 1)
                mine["text"] += choice.delta.content or ""
                join_calls(mine["calls"], [each.model_dump() for each in choice.delta.tool_calls or []])
                mine["tokens"] += choice.logprobs.content if choice.logprobs else []
            else:
                mine["text"] += choice.text
                if choice.logprobs:
                    log = choice.logprobs
                    mine["tokens"] += zip(log.tokens, log.token_logprobs, log.text_offset, strict=True)
    return choices


async def test_the_first_words_come_while_the_policy_goes_on_and_hanging_up_ends_it(up: Supervisor) -> None:
    # with another seed a symbol that may begin a call could come first, and what follows it waits for the end
    stream = await client(up).chat.completions.create(model=MODEL, messages=USER, stream=True, seed=1, **GOES_ON)
    said = ""
    async for chunk in stream:
        said += chunk.choices[0].delta.content or ""
        if len(said) >= 5:
            break
    assert await in_flight(up) == 1, "its last token is a million steps away"
    await stream.close()
    await until_idle(up)


async def test_the_chunks_of_a_chat_are_the_whole_answer(up: Supervisor) -> None:
    options = {"model": MODEL, "messages": USER, "seed": 3, "n": 3, "max_tokens": 40, "logprobs": True}
    extra = {"return_token_ids": True, "ignore_eos": True}
    whole = await client(up).chat.completions.create(**options, extra_body=extra)
    streamed = await collected(await client(up).chat.completions.create(**options, extra_body=extra, stream=True))
    for choice in whole.choices:
        mine = streamed[choice.index]
        assert mine["text"] == choice.message.content
        assert mine["ids"] == choice.token_ids
        assert mine["tokens"] == choice.logprobs.content
        assert mine["reason"] == choice.finish_reason == "length"


async def test_the_chunks_of_a_text_are_the_whole_answer(up: Supervisor) -> None:
    options = {"model": MODEL, "prompt": ["12=", "3+"], "seed": 3, "max_tokens": 40, "logprobs": 0}
    extra = {"return_token_ids": True, "ignore_eos": True}
    whole = await client(up).completions.create(**options, extra_body=extra)
    streamed = await collected(await client(up).completions.create(**options, extra_body=extra, stream=True))
    for choice in whole.choices:
        mine, log = streamed[choice.index], choice.logprobs
        assert (mine["text"], mine["ids"]) == (choice.text, choice.token_ids)
        assert mine["tokens"] == list(zip(log.tokens, log.token_logprobs, log.text_offset, strict=True))
        assert mine["reason"] == choice.finish_reason == "length"


async def test_a_stop_text_ends_a_stream_and_the_engines_work(up: Supervisor) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": "12=", "seed": 5, "stop": ["12", "7=7"]}
    streamed = await collected(await client(up).completions.create(**options, **GOES_ON, stream=True))
    await until_idle(up)
    mine = streamed[0]
    assert mine["reason"] == "stop" and "12" not in mine["text"]
    enough = {**GOES_ON, "max_tokens": 2_000}
    whole = await client(up).completions.create(**options, **enough)
    assert mine["text"] == whole.choices[0].text


async def test_a_turn_is_streamed_symbol_by_symbol_until_a_call_may_begin(up: Supervisor) -> None:
    options = {"model": MODEL, "messages": say("12<tool>3</tool>"), "tools": [ADD]}
    mine = (await collected(await client(up).chat.completions.create(**options, stream=True)))[0]
    (whole,) = (await client(up).chat.completions.create(**options)).choices
    assert mine["text"] == whole.message.content == "12"
    assert mine["reason"] == whole.finish_reason == "tool_calls"
    shown = await client(up).chat.completions.create(**options, tool_choice="none")
    assert shown.choices[0].message.content == "12<tool>3</tool>"
    (call,) = mine["calls"]
    assert call["function"] == whole.message.tool_calls[0].function.model_dump()


# What is refused (what a body may hold: `test_gateway_app`).

TEXT = "/v1/completions"


async def test_a_body_past_the_limit_is_refused_whether_its_length_is_announced_or_not(up):
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 65536

    assert (await post(up, TEXT, b" " * (3 << 20), headers=JSON)).status_code == 413
    async with httpx.AsyncClient(base_url=up.gateway.url) as http:
        answer = await http.post(TEXT, content=pieces(), headers=JSON)
        assert answer.status_code == 413
        assert "longer than 1048576 bytes" in answer.json()["error"]["message"]


@pytest.mark.parametrize("header", [b"a: b\r\n", b"a"], ids=["many", "one"])
async def test_headers_without_end_are_cut_off(up, header):
    address = urlsplit(up.gateway.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(f"POST {TEXT} HTTP/1.1\r\n".encode())
    sent = 0
    with pytest.raises(ConnectionError):
        while sent < 64 << 20:
            writer.write(header * (65536 // len(header)))
            await writer.drain()
            sent += 65536
    writer.close()


async def test_a_header_that_is_too_long_is_a_400(up):
    address = urlsplit(up.gateway.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 300_000 + b"\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 400")
    writer.close()


# Who hangs up.


async def hang_up(up: Supervisor, body: dict, requests: int, first: bytes = b"") -> None:
    """Send a call, close the connection when the engines run it and `first` was read, and wait until they do not."""
    address = urlsplit(up.gateway.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    content = json.dumps({"model": MODEL, "ignore_eos": True, "max_tokens": ENDLESS, **body}).encode()
    head = (
        f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    try:
        writer.write(head.encode() + content)
        await until_busy(up, requests)
        if first:
            await reader.readuntil(first)
    finally:
        writer.close()
    await until_idle(up)


@pytest.mark.parametrize(
    ("body", "requests", "first"),
    [
        ({"prompt": "1", "n": 3}, 3, b""),
        ({"prompt": "1", "stream": True}, 1, b""),
        ({"prompt": ["+12", "1"], "stream": True}, 1, b'"text":"1'),
    ],
    ids=["whole", "before a stream began", "in the middle of a stream"],
)
async def test_a_client_that_hangs_up_leaves_no_work_behind(up, body, requests, first):
    await hang_up(up, body, requests, first)
