"""The gateway as the plain `openai` client sees it, over a real router and two generators (15 s)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import httpx
import openai
import pytest
import pytest_asyncio
from support.gateway import MODEL, client, say, served, until_busy, until_idle
from support.gateway_engines import ENDLESS

from titan_rl.gateway.config import GatewayConfig
from titan_rl.launch.start import Serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds two numbers",
        "parameters": {"type": "object", "properties": {"terms": {"type": "string"}}, "required": ["terms"]},
    },
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def up() -> AsyncIterator[Serving]:
    async with served(generators=2, gateway=GatewayConfig(port=0, model=MODEL, max_body_bytes=1 << 20)) as serving:
        yield serving


async def post(up: Serving, path: str, body: object, **options) -> httpx.Response:
    async with httpx.AsyncClient(base_url=up.url) as http:
        return await http.post(path, content=body if isinstance(body, bytes) else json.dumps(body), **options)


JSON = {"content-type": "application/json"}


# What is answered.


async def test_a_chat_is_answered_with_what_the_policy_said(up):
    answer = await client(up).chat.completions.create(model=MODEL, messages=say("12=3"))
    assert answer.choices[0].message.content == "12=3"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}) == {
        "prompt_tokens": 5,
        "completion_tokens": 5,
        "total_tokens": 10,
    }


async def test_a_stream_says_the_same_as_a_whole_answer(up):
    options = {"model": MODEL, "messages": say("12=3"), "seed": 4, "n": 3}
    text = {0: "", 1: "", 2: ""}
    reasons, usage = {}, None
    stream = await client(up).chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    whole = await client(up).chat.completions.create(**options)
    assert text == {choice.index: choice.message.content for choice in whole.choices}
    assert reasons == {0: "stop", 1: "stop", 2: "stop"}
    assert usage.total_tokens == whole.usage.total_tokens


async def test_a_text_completion_takes_and_gives_token_ids(up):
    options = {"ignore_eos": True, "return_token_ids": True}
    of_text = await client(up).completions.create(model=MODEL, prompt="12=", seed=1, max_tokens=9, extra_body=options)
    ids = of_text.choices[0].prompt_token_ids
    of_ids = await client(up).completions.create(model=MODEL, prompt=ids, seed=1, max_tokens=9, extra_body=options)
    assert len(of_ids.choices[0].token_ids) == 9
    assert of_ids.choices[0].token_ids == of_text.choices[0].token_ids
    assert of_ids.choices[0].text == of_text.choices[0].text
    assert of_ids.choices[0].finish_reason == "length"


async def test_several_prompts_have_their_choices_one_after_the_other(up):
    answer = await client(up).completions.create(model=MODEL, prompt=["+1", "+22"], n=2)
    assert [choice.text for choice in answer.choices] == ["1", "1", "22", "22"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == 5


async def test_n_choices_differ_and_a_seed_repeats_them(up):
    async def texts(seed: int) -> list[str]:
        answer = await client(up).completions.create(
            model=MODEL, prompt="1=", n=4, max_tokens=20, seed=seed, extra_body={"ignore_eos": True}
        )
        return [choice.text for choice in answer.choices]

    first = await texts(-7)
    assert len(set(first)) == 4
    assert await texts(-7) == first
    assert set(await texts(8)).isdisjoint(first)


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


async def test_a_stop_text_ends_the_answer_in_front_of_it(up):
    answer = await client(up).chat.completions.create(
        model=MODEL, messages=say("123=456"), stop=["=4", "9"], logprobs=True
    )
    assert answer.choices[0].message.content == "123"
    assert answer.choices[0].finish_reason == "stop"
    assert [entry.token for entry in answer.choices[0].logprobs.content] == ["1", "2", "3", "=", "4"]


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


async def test_a_tool_call_is_taken_apart_and_its_result_can_be_sent_back(up):
    messages = say("<tool>12+35</tool>")
    answer = await client(up).chat.completions.create(model=MODEL, messages=messages, tools=[ADD])
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.name == "add"
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"terms": "12+35"}
    result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "47"}
    history = [*messages, choice.message.model_dump(exclude_none=True), result]
    after = await client(up).chat.completions.create(model=MODEL, messages=history, tools=[ADD])
    said = after.choices[0].message  # the engine repeats its prompt, so this is the history as the policy reads it
    assert said.content == "<result>47</result>"
    assert [call.function.arguments for call in said.tool_calls] == ['{"terms": "12+35"}'] * 2
    ignored = await client(up).chat.completions.create(model=MODEL, messages=messages, tools=[ADD], tool_choice="none")
    assert ignored.choices[0].message.content == "<tool>12+35</tool>"


async def test_a_streamed_tool_call_has_its_index(up):
    stream = await client(up).chat.completions.create(
        model=MODEL, messages=say("<tool>1</tool><tool>2</tool>"), tools=[ADD], stream=True
    )
    calls = [call async for chunk in stream for choice in chunk.choices for call in choice.delta.tool_calls or ()]
    assert [(call.index, call.function.arguments) for call in calls] == [(0, '{"terms": "1"}'), (1, '{"terms": "2"}')]
    assert len({call.id for call in calls}) == 2


async def test_penalties_and_least_tokens_are_taken(up):
    answer = await client(up).completions.create(
        model=MODEL, prompt="1", max_tokens=5, presence_penalty=0.5, extra_body={"min_tokens": 5, "ignore_eos": True}
    )
    assert answer.usage.completion_tokens == 5


async def test_64_clients_at_once_get_each_their_own_answer(up):
    async def one(number: int) -> str:
        answer = await client(up).chat.completions.create(model=MODEL, messages=say(f"{number}="))
        return answer.choices[0].message.content

    assert await asyncio.gather(*map(one, range(64))) == [f"{number}=" for number in range(64)]
    await until_idle(up)


async def test_models_health_and_metrics_are_told(up):
    assert [model.id async for model in await client(up).models.list()] == [MODEL]
    assert (await client(up).models.retrieve(MODEL)).id == MODEL
    async with httpx.AsyncClient(base_url=up.url) as http:
        health = (await http.get("/health")).json()
        metrics = (await http.get("/metrics")).text
    assert {each["state"] for each in health["generators"].values()} == {"serving"}
    assert 'titan_rl_gateway_generator_in_flight{generator="generator1"} 0.0' in metrics
    assert "titan_rl_gateway_completion_tokens_total" in metrics


# What is refused.

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    ("path", "change", "named"),
    [
        (CHAT, {"bogus": 1}, "bogus: is not supported"),
        (CHAT, {"messages": []}, "messages: expected a length of at least 1, got a list of 0"),
        (CHAT, {"messages": "hi"}, 'messages: expected a list, got "hi"'),
        (CHAT, {"messages": [{"role": "robot", "content": "1"}]}, "messages.0.role: expected one of 'system', "),
        (CHAT, {"messages": [{"content": "1"}]}, "messages.0.role: is missing"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": 5}]},
            "messages.0.content: expected a string or a list, got 5",
        ),
        (TEXT, {"prompt": 5}, "prompt: expected a string or a list, got 5"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "content"),
        (CHAT, {"messages": [{"role": "user", "content": "1"}], "temperature": "0.5"}, 'expected a number, got "0.5"'),
        (CHAT, {"temperature": -1}, "temperature: expected at least 0, got -1"),
        (CHAT, {"temperature": 0.001}, "temperature"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"max_tokens": 10**30}, "max_tokens"),
        (CHAT, {"max_tokens": 2_000_000}, "max_model_len"),
        (CHAT, {"n": -1}, "n:"),
        (CHAT, {"n": 500}, "more than 128"),
        (CHAT, {"n": True}, "n:"),
        (CHAT, {"seed": 2**63}, "seed"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tools": [ADD, ADD]}, "one tool with one argument"),
        (CHAT, {"messages": [{"role": "user", "content": "hello"}]}, "no symbol 'h'"),
        (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "no symbol"),
        (CHAT, {"model": "gpt"}, "no model 'gpt'"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * (1 << 19)}], "max_tokens": 1}, "no symbol 'x'"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": ["1"] * 129}, "more than 128"),
        (TEXT, {"prompt": ""}, "empty"),
        (TEXT, {"prompt": [-1]}, "prompt"),
        (TEXT, {"prompt": [10**6]}, "outside of the vocabulary"),
        (TEXT, {"prompt": [[1, 2], []]}, "prompt"),
        (TEXT, {"stop_token_ids": [10**6]}, "stop_token_ids"),
        (TEXT, {"logprobs": 5}, "logprobs"),
        (TEXT, {"min_tokens": 20}, "min_new_tokens"),
    ],
)
async def test_what_cannot_be_served_is_a_4xx_that_says_why(up, path, change, named):
    body = {CHAT: {"messages": say("1")}, TEXT: {"prompt": "1"}}[path]
    answer = await post(up, path, {"model": MODEL, **body, **change}, headers=JSON)
    assert answer.status_code == (404 if "model" in change else 400), answer.text
    error = answer.json()["error"]
    assert named in error["message"]
    assert error["type"] == "invalid_request_error"
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b'{"a":' * 5000, b'{"n": ' + b"9" * 5000 + b"}", b"NaN"]
)
async def test_what_is_no_json_object_is_a_400(up, body):
    answer = await post(up, TEXT, body, headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


async def test_what_is_not_said_to_be_json_is_a_400(up):
    assert (await post(up, TEXT, b"prompt=1", headers={"content-type": "text/plain"})).status_code == 400


async def test_a_path_or_method_that_is_not_there_is_an_error_object(up):
    async with httpx.AsyncClient(base_url=up.url) as http:
        assert (await http.get("/v1/nothing")).json()["error"]["type"] == "invalid_request_error"
        assert (await http.get(TEXT)).status_code == 405


async def test_a_body_past_the_limit_is_refused_whether_its_length_is_announced_or_not(up):
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 65536

    assert (await post(up, TEXT, b" " * (3 << 20), headers=JSON)).status_code == 413
    async with httpx.AsyncClient(base_url=up.url) as http:
        answer = await http.post(TEXT, content=pieces(), headers=JSON)
        assert answer.status_code == 413
        assert "longer than 1048576 bytes" in answer.json()["error"]["message"]


@pytest.mark.parametrize("header", [b"a: b\r\n", b"a"], ids=["many", "one"])
async def test_headers_without_end_are_cut_off(up, header):
    address = urlsplit(up.url)
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
    address = urlsplit(up.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 300_000 + b"\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 400")
    writer.close()


async def test_an_error_is_the_clients_own_exception_and_is_not_retried(up):
    with pytest.raises(openai.BadRequestError, match="no symbol"):
        await client(up).chat.completions.create(model=MODEL, messages=say("x"))
    with pytest.raises(openai.NotFoundError, match="no model"):
        await client(up).chat.completions.create(model="gpt", messages=say("1"))


# Who hangs up.


async def hang_up(up: Serving, body: dict, requests: int, first: bytes = b"") -> None:
    """Send a call, close the connection when the engines run it and `first` was read, and wait until they do not."""
    address = urlsplit(up.url)
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


async def test_a_client_that_hangs_up_leaves_no_work_behind(up):
    await hang_up(up, {"prompt": "1", "n": 3}, requests=3)


async def test_a_client_that_hangs_up_before_a_stream_began_leaves_no_work_behind(up):
    await hang_up(up, {"prompt": "1", "stream": True}, requests=1)


async def test_a_client_that_hangs_up_in_the_middle_of_a_stream_leaves_no_work_behind(up):
    await hang_up(up, {"prompt": ["+12", "1"], "stream": True}, requests=1, first=b'"text":"1')


async def test_a_call_that_times_out_in_the_client_is_aborted(up):
    impatient = client(up).with_options(timeout=1.0, max_retries=1)
    with pytest.raises(openai.APITimeoutError):
        await impatient.completions.create(model=MODEL, prompt="1", max_tokens=ENDLESS, extra_body={"ignore_eos": True})
    await until_idle(up)


async def test_64_clients_that_hang_up_leave_no_work_behind(up):
    async def one() -> None:
        await client(up).completions.create(
            model=MODEL, prompt="1", max_tokens=ENDLESS, extra_body={"ignore_eos": True}
        )

    calls = [asyncio.ensure_future(one()) for _ in range(64)]
    await until_busy(up, 64)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await until_idle(up)
    answer = await client(up).chat.completions.create(model=MODEL, messages=say("1"))
    assert answer.choices[0].message.content == "1"
