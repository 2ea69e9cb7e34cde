"""LiteLLM: its providers for OpenAI and for vLLM's server, its Responses, and Anthropic's messages through both."""

import json
from typing import Literal

import litellm
from flows import KEY, MODEL, URL, play
from pydantic import BaseModel

USER = [{"role": "user", "content": "What is 3 + 4?"}]
OPENAI = {"api_base": URL, "api_key": KEY, "model": f"openai/{MODEL}"}
VLLM = {**OPENAI, "model": f"hosted_vllm/{MODEL}"}


class Colour(BaseModel):
    colour: Literal["red", "green"]
    shades: list[int]


NUMBER = {"type": "integer"}
PARAMETERS = {"type": "object", "properties": {"first": NUMBER, "second": NUMBER}, "required": ["first", "second"]}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds two numbers.", "parameters": PARAMETERS}}


def text(to):
    assert litellm.completion(messages=USER, max_tokens=16, **to).usage.total_tokens > 0


def stream(to):
    assert list(litellm.completion(messages=USER, max_tokens=16, stream=True, **to))


async def asynchronous(to):
    assert (await litellm.acompletion(messages=USER, max_tokens=16, **to)).choices
    chunks = await litellm.acompletion(messages=USER, max_tokens=16, stream=True, **to)
    assert [chunk async for chunk in chunks]


def several(to):
    assert len(litellm.completion(messages=USER, max_tokens=16, n=3, **to).choices) == 3


def top_logprobs(to):
    answer = litellm.completion(messages=USER, max_tokens=8, logprobs=True, top_logprobs=2, **to)
    assert all(len(token.top_logprobs) == 2 for token in answer.choices[0].logprobs.content)


def tools_auto(to):
    litellm.completion(messages=USER, tools=[ADD], max_tokens=64, **to)


def tool_required(to):
    answer = litellm.completion(messages=USER, tools=[ADD], tool_choice="required", **to)
    for call in answer.choices[0].message.tool_calls:
        assert json.loads(call.function.arguments).keys() >= {"first", "second"}


def tool_named(to):
    named = {"type": "function", "function": {"name": "add"}}
    answer = litellm.completion(messages=USER, tools=[ADD], tool_choice=named, parallel_tool_calls=False, **to)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "add"


def tool_conversation(to):
    message = litellm.completion(messages=USER, tools=[ADD], tool_choice="required", **to).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "7"} for call in message.tool_calls]
    litellm.completion(messages=[*USER, message, *results], tools=[ADD], max_tokens=16, **to)


def structured(to):
    answer = litellm.completion(messages=USER, response_format=Colour, **to)
    Colour.model_validate_json(answer.choices[0].message.content)


def json_object(to):
    answer = litellm.completion(messages=USER, response_format={"type": "json_object"}, **to)
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


def reasoning_effort(to):
    asked = {"reasoning_effort": "low", "allowed_openai_params": ["reasoning_effort"], "max_tokens": 16}
    litellm.completion(messages=USER, **asked, **to)


def responses(to):
    assert litellm.responses(input="What is 3 + 4?", max_output_tokens=16, **to).output


def responses_streamed(to):
    told = [event.type for event in litellm.responses(input=USER, max_output_tokens=16, stream=True, **to)]
    assert told[-1] in ("response.completed", "response.incomplete")


async def anthropic_messages(to):
    answer = await litellm.anthropic.messages.acreate(messages=USER, max_tokens=16, **to)
    assert answer["content"]


async def anthropic_messages_tool(to):
    tools = [{"name": "add", "description": "Adds two numbers.", "input_schema": PARAMETERS}]
    choice = {"type": "tool", "name": "add"}
    asked = {"messages": USER, "max_tokens": 2048, "tools": tools, "tool_choice": choice}
    answer = await litellm.anthropic.messages.acreate(**asked, **to)
    assert any(block["type"] == "tool_use" for block in answer["content"])


if __name__ == "__main__":
    flows = text, stream, asynchronous, several, top_logprobs, tools_auto, tool_required, tool_named, tool_conversation
    play(*flows, structured, json_object, reasoning_effort, over={"openai": OPENAI, "hosted_vllm": VLLM})
    anthropic = {**OPENAI, "api_base": URL.removesuffix("/v1"), "model": f"anthropic/{MODEL}"}
    play(responses, responses_streamed, over={"openai": OPENAI})
    play(anthropic_messages, anthropic_messages_tool, over={"openai": OPENAI, "anthropic": anthropic})
