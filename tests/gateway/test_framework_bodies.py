"""What agent frameworks send, over a fleet that the test plays (1 s).

`framework_bodies.json` holds the last call of a conversation of two questions with one tool, as each package, named
with its version, sent it to this gateway.
"""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from support.gateway import ADD, ScriptedFleet, app_over, http_client, policy_of

from titan_rl.chat.renderer import SymbolRenderer
from titan_rl.gateway.openai_protocol import AssistantMessage

BODIES = json.loads(Path(__file__).with_name("framework_bodies.json").read_text())
HISTORY = "0<tool>3+4</tool><tool>3+4</tool><result>7</result>7<eos><tool>4+5</tool><tool>4+5</tool><result>9</result>"


async def post(renderer: SymbolRenderer, body: dict) -> tuple[httpx.Response, list[str]]:
    """The answer, and the prompts that the engines were asked to go on from."""
    fleet = ScriptedFleet(renderer, "9$")
    async with http_client(app_over(fleet, policy_of(renderer, 256))) as http:
        answer = await http.post("/v1/chat/completions", json=body)
    return answer, [renderer.decode(request.prompt_token_ids.tolist()) for request in fleet.asked]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("package", BODIES)
async def test_what_a_framework_sends_is_answered(renderer, package, stream):
    body = {**BODIES[package], "stream": stream}
    if not stream:
        body.pop("stream_options", None)
    answer, prompts = await post(renderer, body)
    assert answer.status_code == 200, answer.text
    assert '"content":"9"' in answer.text
    assert prompts == [HISTORY]


HINTS = {
    "store": True,
    "metadata": {"a": "b"},
    "user": "u",  # names a role, which only a run's rollout has
    "safety_identifier": "s",
    "service_tier": "auto",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "modalities": ["text"],
    "reasoning_effort": "high",
    "parallel_tool_calls": False,
    "stream_options": {"include_usage": True, "include_obfuscation": False},
}


async def test_hints_are_taken_and_change_nothing(renderer):
    body = {"model": "policy", "messages": [{"role": "user", "content": "1+"}], "stream": True}
    answer, prompts = await post(renderer, {**body, **HINTS})
    assert answer.status_code == 200, answer.text
    assert prompts == ["1+"]


@pytest.mark.parametrize(
    "change",
    [
        {"modalities": ["text", "audio"]},
        {"verbosity": "low"},
        {"stream_options": {"continuous_usage_stats": True}},
        {"tools": [{**ADD, "cache_control": {}}]},
    ],
    ids=lambda change: next(iter(change)),
)
async def test_what_would_change_the_answer_is_refused_by_name(renderer, change):
    answer, prompts = await post(
        renderer, {"model": "policy", "messages": [{"role": "user", "content": "1+"}], **change}
    )
    assert answer.status_code == 400
    assert next(iter(change)) in answer.json()["error"]["param"]
    assert prompts == []


async def test_a_wrong_field_of_a_function_is_named_where_the_client_wrote_it(renderer):
    wrong = {"type": "function", "function": {"name": "add", "parameters": 3}}
    answer, _ = await post(
        renderer, {"model": "policy", "messages": [{"role": "user", "content": "1"}], "tools": [wrong]}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools.0.function.parameters")


async def test_a_message_given_back_may_have_fields_that_only_its_client_knows(renderer):
    call = {"id": "1", "index": 0, "type": "function", "function": {"name": "add", "arguments": '{"terms": "1"}'}}
    said = {"role": "assistant", "content": None, "tool_calls": [call], "annotations": [{}], "images": []}
    answer, prompts = await post(renderer, {"model": "policy", "messages": [said], "tools": [ADD]})
    assert answer.status_code == 200, answer.text
    assert prompts == ["<tool>1</tool>"]
    wrong = {"role": "user", "content": "1", "images": []}  # a client's own message says what it means
    assert (await post(renderer, {"model": "policy", "messages": [wrong]}))[0].status_code == 400


def test_a_call_without_arguments_may_have_an_empty_text_for_them():
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": ""}}
    message = AssistantMessage.model_validate({"role": "assistant", "tool_calls": [call]})
    assert message.message().tool_calls[0].arguments == {}
