"""Streams as the plain `openai` client sees them, over a real router and two generators. About 10 s."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from support.gateway import MODEL, client, in_flight, say, served, until_idle
from support.gateway_engines import ENDLESS

from titan_rl.launch.start import Serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"terms": {"type": "string"}}}},
}
USER: list[Any] = [{"role": "user", "content": "12="}]
GOES_ON: dict[str, Any] = {"max_tokens": ENDLESS, "extra_body": {"ignore_eos": True}}
"""What is asked like this ends only when somebody ends it."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def up() -> AsyncIterator[Serving]:
    async with served(generators=2) as serving:
        yield serving


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
                mine["calls"] += choice.delta.tool_calls or []
                mine["tokens"] += choice.logprobs.content if choice.logprobs else []
            else:
                mine["text"] += choice.text
                if choice.logprobs:
                    log = choice.logprobs
                    mine["tokens"] += zip(log.tokens, log.token_logprobs, log.text_offset, strict=True)
    return choices


async def test_the_first_words_come_while_the_policy_goes_on_and_hanging_up_ends_it(up: Serving) -> None:
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


async def test_the_chunks_of_a_chat_are_the_whole_answer(up: Serving) -> None:
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


async def test_the_chunks_of_a_text_are_the_whole_answer(up: Serving) -> None:
    options = {"model": MODEL, "prompt": ["12=", "3+"], "seed": 3, "max_tokens": 40, "logprobs": 0}
    extra = {"return_token_ids": True, "ignore_eos": True}
    whole = await client(up).completions.create(**options, extra_body=extra)
    streamed = await collected(await client(up).completions.create(**options, extra_body=extra, stream=True))
    for choice in whole.choices:
        mine, log = streamed[choice.index], choice.logprobs
        assert (mine["text"], mine["ids"]) == (choice.text, choice.token_ids)
        assert mine["tokens"] == list(zip(log.tokens, log.token_logprobs, log.text_offset, strict=True))
        assert mine["reason"] == choice.finish_reason == "length"


async def test_a_stop_text_ends_a_stream_and_the_engines_work(up: Serving) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": "12=", "seed": 5, "stop": ["12", "7=7"]}
    streamed = await collected(await client(up).completions.create(**options, **GOES_ON, stream=True))
    await until_idle(up)
    mine = streamed[0]
    assert mine["reason"] == "stop" and "12" not in mine["text"]
    enough = {**GOES_ON, "max_tokens": 2_000}
    whole = await client(up).completions.create(**options, **enough)
    assert mine["text"] == whole.choices[0].text


async def test_a_turn_is_streamed_symbol_by_symbol_until_a_call_may_begin(up: Serving) -> None:
    options = {"model": MODEL, "messages": say("12<tool>3</tool>"), "tools": [ADD]}
    mine = (await collected(await client(up).chat.completions.create(**options, stream=True)))[0]
    (whole,) = (await client(up).chat.completions.create(**options)).choices
    assert mine["text"] == whole.message.content == "12"
    assert mine["reason"] == whole.finish_reason == "tool_calls"
    (call,) = mine["calls"]
    assert (call.index, call.id is not None) == (0, True)
    assert call.function.model_dump() == whole.message.tool_calls[0].function.model_dump()
