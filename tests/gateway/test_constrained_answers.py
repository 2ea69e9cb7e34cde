"""Forced calls and schemas through the `openai` client: a real engine, a policy that has learned nothing (25 s)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from support.dialects import DIALECTS
from support.gateway import ADD, MODEL, client

from titan_rl.config import RunConfig, ServeConfig
from titan_rl.gateway.config import GatewayConfig
from titan_rl.generation.config import GeneratorConfig
from titan_rl.policy.config import PolicyConfig, TinyPolicyConfig
from titan_rl.rollout.config import RolloutConfig
from titan_rl.run.start import bring_up
from titan_rl.supervision.supervisor import Supervisor
from titan_rl.types import Message, ToolSpec

pytestmark = pytest.mark.asyncio(loop_scope="module")

ADDS: dict[str, Any] = json.loads(json.dumps(ADD))
ADDS["function"]["parameters"]["properties"]["terms"] = {"enum": ["1+2", "2+2"]}
WAIT = {"type": "function", "function": {"name": "wait", "parameters": {"type": "object", "maxProperties": 0}}}
COLOUR = {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def up() -> AsyncIterator[Supervisor]:
    config = RunConfig(
        policy=PolicyConfig(tiny=TinyPolicyConfig(tokenizer="chat", max_length=1024)),
        generator=GeneratorConfig(count=1, max_model_len=1024, kv_cache_bytes=64 << 20),
        rollout=RolloutConfig(renderer_kwargs={"enable_thinking": False}),
    )
    async with bring_up(ServeConfig.of(config, GatewayConfig(port=0, model=MODEL))) as serving:
        yield serving


async def ask(up: Supervisor, **options: Any) -> Any:
    messages: list[Any] = [{"role": "user", "content": "hm?"}]
    given = {"max_tokens": 200, "tools": [ADDS, WAIT]} | options
    return await client(up).chat.completions.create(model=MODEL, messages=messages, **given)


def called(choice: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or ()]


async def test_a_call_that_is_required_is_made(up):
    answer = await ask(up, tool_choice="required", parallel_tool_calls=False, n=32)
    found = [called(choice) for choice in answer.choices]
    assert {len(calls) for calls in found} == {1}
    assert {name for ((name, _),) in found} == {"add", "wait"}
    assert all(
        arguments["terms"] in ("1+2", "2+2") if name == "add" else not arguments for ((name, arguments),) in found
    )
    assert {choice.finish_reason for choice in answer.choices} == {"tool_calls"}


async def test_a_tool_that_is_named_or_allowed_is_the_one_that_is_called(up):
    named = {"type": "function", "function": {"name": "wait"}}
    allowed = ALLOWED | {"allowed_tools": {"mode": "required", "tools": [named]}}
    for choice in (named, allowed):
        answer = await ask(up, tool_choice=choice, parallel_tool_calls=False, n=8)
        assert [called(each) for each in answer.choices] == [[("wait", {})]] * 8


@pytest.mark.parametrize("stream", [False, True])
async def test_content_follows_its_schema(up, stream):
    answer = await ask(up, tools=openai.NOT_GIVEN, response_format=FORMAT, stream=stream, seed=3)
    if stream:
        text = "".join([each.choices[0].delta.content or "" async for each in answer])
    else:
        text = answer.choices[0].message.content
    assert json.loads(text)["colour"] in ("red", "green")


async def test_beside_tools_an_answer_is_content_of_the_schema_or_calls(up):
    answer = await ask(up, response_format=FORMAT, parallel_tool_calls=False, n=64)
    calls = [called(choice) for choice in answer.choices]
    said = [json.loads(choice.message.content) for choice in answer.choices if not choice.message.tool_calls]
    assert len(said) + sum(map(len, calls)) == 64
    assert all(each["colour"] in ("red", "green") for each in said)


async def test_any_object_is_an_object(up):
    answer = await ask(up, tools=openai.NOT_GIVEN, response_format={"type": "json_object"}, max_tokens=900, n=8)
    ended = [choice for choice in answer.choices if choice.finish_reason == "stop"]
    assert ended
    assert all(isinstance(json.loads(choice.message.content), dict) for choice in ended)


async def test_others_are_sampled_beside_them_as_if_alone(up):
    alone = await ask(up, tools=openai.NOT_GIVEN, seed=5, max_tokens=40)
    beside, *_ = await asyncio.gather(
        ask(up, tools=openai.NOT_GIVEN, seed=5, max_tokens=40), ask(up, tool_choice="required", n=4)
    )
    assert beside.choices[0].message.content == alone.choices[0].message.content


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "fly"),
        ({"tools": openai.NOT_GIVEN, "tool_choice": "required"}, "tools"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}}, "no"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
    ],
)
async def test_what_cannot_be_kept_is_refused(up, options, word):
    with pytest.raises(openai.BadRequestError, match=word):
        await ask(up, **options)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"not": {"type": "boolean"}}, "not"),
        ({"type": "object", "properties": {"a": {"if": {"const": 1}, "then": {"const": 1}}}}, "if"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"anyOf": [{"type": "string", "pattern": "^a(?=b)$"}]}, "pattern"),
        ({"type": "array", "items": {"type": "integer", "multipleOf": 3}}, "multipleOf"),
    ],
)
async def test_what_a_grammar_would_ignore_is_refused_by_its_name_and_place(up, schema, named):
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match=f"would be ignored: .*{named}") as refusal:
        await ask(up, tools=openai.NOT_GIVEN, response_format=wanted)
    assert refusal.value.param == "response_format"
    tool = {
        "type": "function",
        "function": {"name": "x", "parameters": {"type": "object", "properties": {"y": schema}}},
    }
    with pytest.raises(openai.BadRequestError, match=named) as refusal:
        await ask(up, tools=[tool], tool_choice="required")
    assert refusal.value.param == "tools"


async def test_names_and_values_that_read_like_keywords_are_none(up):
    schema = {"type": "object", "properties": {"not": {"const": {"if": 1}}}, "required": ["not"]}
    schema |= {"additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = await ask(up, tools=openai.NOT_GIVEN, response_format=wanted)
    assert json.loads(answer.choices[0].message.content) == {"not": {"if": 1}}


async def test_an_answer_that_is_cut_off_says_so_whatever_calls_it_has(up):
    answer = await ask(up, tool_choice="required", max_tokens=120, n=32, extra_body={"return_token_ids": True})
    ended = {(len(each.token_ids) < 120, bool(each.message.tool_calls), each.finish_reason) for each in answer.choices}
    assert {(True, True, "tool_calls"), (False, True, "length")} <= ended
    assert {reason for whole, _, reason in ended if whole} == {"tool_calls"}


FORCED: dict[str, Any] = {
    "responses": {"tool_choice": "required", "parallel_tool_calls": False},
    "anthropic": {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "max_tokens": 300},
    "gemini": {"toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["wait"]}}},
}
FORMED: dict[str, Any] = {
    "responses": {"text": {"format": {"type": "json_schema", "name": "colour", "schema": COLOUR}}},
    "anthropic": {"output_config": {"format": {"type": "json_schema", "schema": COLOUR}}, "max_tokens": 300},
    "gemini": {"generationConfig": {"responseMimeType": "application/json", "responseSchema": COLOUR}},
}


@pytest.mark.parametrize("name", FORCED)
async def test_other_dialects_force_calls_and_schemas_too(up, name):
    dialect = DIALECTS[name]
    told = dialect.entries([Message("user", "hm?")])
    tools = [ToolSpec(each["function"]["name"], "", each["function"]["parameters"]) for each in (ADDS, WAIT)]
    async with httpx.AsyncClient(base_url=up.gateway.url, timeout=60) as http:
        answers = [
            dialect.answer((await http.post(dialect.path, json=body)).raise_for_status().json())
            for body in (dialect.body(told, tools=tools, **FORCED[name]), dialect.body(told, **FORMED[name]))
        ]
    called_, formed = answers
    assert called_.calls and {call for _, call, _ in called_.calls} <= (
        {"wait"} if name == "gemini" else {"add", "wait"}
    )
    assert json.loads(formed.text)["colour"] in ("red", "green")
