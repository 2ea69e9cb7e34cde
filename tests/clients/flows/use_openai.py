"""OpenAI's own client: chat completions, text completions and responses."""

import asyncio
import json
from typing import Literal

import openai
from flows import MODEL, play
from pydantic import BaseModel

client = openai.OpenAI()
USER = [{"role": "user", "content": "What is 3 + 4?"}]


class Add(BaseModel):
    """Adds two numbers."""

    first: int
    second: int


class Wait(BaseModel):
    """Waits."""


class Colour(BaseModel):
    colour: Literal["red", "green"]
    shades: list[int]


ADD, WAIT = openai.pydantic_function_tool(Add), openai.pydantic_function_tool(Wait)
RESPONSES_ADD = {"type": "function", **ADD["function"]}


def chat(**options):
    return client.chat.completions.create(model=MODEL, messages=USER, **options)


def models():
    assert [each.id for each in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def text():
    answer = chat(max_tokens=16)
    assert answer.usage.completion_tokens <= 16
    assert answer.choices[0].finish_reason in ("stop", "length")


def stream():
    chunks = list(chat(max_tokens=16, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.total_tokens > 0
    assert chunks[-2].choices[0].finish_reason in ("stop", "length")


def stream_helper():
    with client.chat.completions.stream(model=MODEL, messages=USER) as events:
        assert [event.type for event in events]
    assert events.get_final_completion().choices[0].finish_reason == "stop"


def several_with_a_seed():
    first, again = (chat(n=3, seed=7, max_tokens=16, temperature=1.0) for _ in range(2))
    assert [each.message.content for each in first.choices] == [each.message.content for each in again.choices]
    assert len(first.choices) == 3


def logprobs():
    tokens = chat(logprobs=True, max_tokens=8).choices[0].logprobs.content
    assert tokens
    assert all(token.logprob <= 0 for token in tokens)


def top_logprobs():
    for token in chat(logprobs=True, top_logprobs=3, max_tokens=8).choices[0].logprobs.content:
        found = [each.logprob for each in token.top_logprobs]
        assert len(found) == 3
        assert found == sorted(found, reverse=True)


def tools_auto():
    chat(tools=[ADD, WAIT], tool_choice="auto", max_tokens=64)


def tool_required():
    message = chat(tools=[ADD, WAIT], tool_choice="required").choices[0].message
    assert message.tool_calls
    for call in message.tool_calls:
        {"Add": Add, "Wait": Wait}[call.function.name].model_validate_json(call.function.arguments)


def tool_named():
    named = {"type": "function", "function": {"name": "Add"}}
    answer = chat(tools=[ADD, WAIT], tool_choice=named, parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "Add"
    Add.model_validate_json(call.function.arguments)


def tools_allowed():
    references = [{"type": "function", "function": {"name": "Wait"}}]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": references}}
    answer = chat(tools=[ADD, WAIT], tool_choice=allowed)
    assert {call.function.name for call in answer.choices[0].message.tool_calls} == {"Wait"}


def tool_streamed():
    arguments = ""
    for chunk in chat(tools=[ADD], tool_choice="required", parallel_tool_calls=False, stream=True):
        for call in chunk.choices[0].delta.tool_calls or ():
            arguments += call.function.arguments or ""
    Add.model_validate_json(arguments)


def tool_conversation():
    message = chat(tools=[ADD], tool_choice="required").choices[0].message
    said = [*USER, message]
    for call in message.tool_calls:
        add = Add.model_validate_json(call.function.arguments)
        said.append({"role": "tool", "tool_call_id": call.id, "content": str(add.first + add.second)})
    client.chat.completions.create(model=MODEL, messages=said, tools=[ADD], max_tokens=16)


def parsed():
    answer = client.chat.completions.parse(model=MODEL, messages=USER, response_format=Colour)
    assert isinstance(answer.choices[0].message.parsed, Colour)


def parsed_tool():
    answer = client.chat.completions.parse(model=MODEL, messages=USER, tools=[ADD], tool_choice="required")
    assert isinstance(answer.choices[0].message.tool_calls[0].function.parsed_arguments, Add)


def json_object():
    answer = chat(response_format={"type": "json_object"})
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


async def sixty_four_at_once():
    async with openai.AsyncOpenAI() as many:
        calls = [many.chat.completions.create(model=MODEL, messages=USER, max_tokens=32) for _ in range(64)]
        assert len(await asyncio.gather(*calls)) == 64


def completions():
    answer = client.completions.create(model=MODEL, prompt=["3 + 4 =", "1 + 1 ="], max_tokens=8, logprobs=0)
    assert len(answer.choices) == 2
    assert answer.choices[0].logprobs.token_logprobs


def completions_echoed():
    """As evaluation harnesses score an answer."""
    prompt = "3 + 4 = 7"
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=0, echo=True, logprobs=1)
    told = answer.choices[0].logprobs
    assert answer.choices[0].text == prompt and len(told.tokens) == answer.usage.prompt_tokens
    assert told.token_logprobs[0] is None and sum(told.token_logprobs[1:]) < 0
    assert [prompt[place:] for place in told.text_offset][-1] == "7"


def completions_streamed():
    assert list(client.completions.create(model=MODEL, prompt="3 + 4 =", max_tokens=8, stream=True))


def responses():
    answer = client.responses.create(
        model=MODEL, input="What is 3 + 4?", instructions="Be brief.", max_output_tokens=16
    )
    assert answer.status in ("completed", "incomplete")
    assert client.responses.retrieve(answer.id).id == answer.id


def responses_streamed():
    with client.responses.stream(model=MODEL, input=USER, max_output_tokens=16) as events:
        told = [event.type for event in events]
    assert told[0] == "response.created"
    assert told[-1] in ("response.completed", "response.incomplete")


def responses_tool_conversation():
    asked = {"model": MODEL, "tools": [RESPONSES_ADD]}
    first = client.responses.create(input=USER, tool_choice="required", **asked)
    calls = [item for item in first.output if item.type == "function_call"]
    assert calls
    told = []
    for call in calls:
        add = Add.model_validate_json(call.arguments)
        output = str(add.first + add.second)
        told.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
    client.responses.create(input=told, previous_response_id=first.id, max_output_tokens=16, **asked)
    client.responses.create(input=[*USER, *first.output, *told], max_output_tokens=16, **asked)


def responses_tool_named():
    named = {"type": "function", "name": "Add"}
    answer = client.responses.create(model=MODEL, input=USER, tools=[RESPONSES_ADD], tool_choice=named)
    assert {item.name for item in answer.output if item.type == "function_call"} == {"Add"}


def responses_parsed():
    answer = client.responses.parse(model=MODEL, input=USER, text_format=Colour)
    assert isinstance(answer.output_parsed, Colour)


if __name__ == "__main__":
    play(
        models,
        text,
        stream,
        stream_helper,
        several_with_a_seed,
        logprobs,
        top_logprobs,
        tools_auto,
        tool_required,
        tool_named,
        tools_allowed,
        tool_streamed,
        tool_conversation,
        parsed,
        parsed_tool,
        json_object,
        sixty_four_at_once,
        completions,
        completions_echoed,
        completions_streamed,
        responses,
        responses_streamed,
        responses_tool_conversation,
        responses_tool_named,
        responses_parsed,
    )
