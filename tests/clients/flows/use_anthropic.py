"""Anthropic's own client: messages."""

from typing import Literal

import anthropic
from flows import MODEL, play
from pydantic import BaseModel

client = anthropic.Anthropic()
USER = [{"role": "user", "content": "What is 3 + 4?"}]
SHORT = {"model": MODEL, "max_tokens": 16}
LONG = {"model": MODEL, "max_tokens": 4096}


class Add(BaseModel):
    first: int
    second: int


class Colour(BaseModel):
    colour: Literal["red", "green"]
    shades: list[int]


TOOLS = [
    {"name": "add", "description": "Adds two numbers.", "input_schema": Add.model_json_schema()},
    {"name": "wait", "description": "Waits.", "input_schema": {"type": "object", "properties": {}}},
]


def calls_of(answer):
    calls = [block for block in answer.content if block.type == "tool_use"]
    assert calls
    assert answer.stop_reason == "tool_use"
    for call in calls:
        if call.name == "add":
            Add.model_validate(call.input)
    return calls


def models():
    assert [each.id for each in client.models.list()] == [MODEL]


def text():
    answer = client.messages.create(messages=USER, system="Be brief.", stop_sequences=["!"], **SHORT)
    assert answer.content[0].type == "text"
    assert answer.usage.output_tokens <= 16


def stream():
    with client.messages.stream(messages=USER, **SHORT) as events:
        said = "".join(events.text_stream)
    assert events.get_final_message().content[0].text == said


def raw_stream():
    told = [event.type for event in client.messages.create(messages=USER, stream=True, **SHORT)]
    assert (told[0], told[-1]) == ("message_start", "message_stop")


def thinking():
    client.messages.create(messages=USER, thinking={"type": "enabled", "budget_tokens": 1024}, **LONG)


def tools_auto():
    client.messages.create(messages=USER, tools=TOOLS, **SHORT)


def tool_required():
    calls_of(client.messages.create(messages=USER, tools=TOOLS, tool_choice={"type": "any"}, **LONG))


def tool_named():
    choice = {"type": "tool", "name": "add", "disable_parallel_tool_use": True}
    (call,) = calls_of(client.messages.create(messages=USER, tools=TOOLS, tool_choice=choice, **LONG))
    assert call.name == "add"


def tool_streamed():
    with client.messages.stream(messages=USER, tools=TOOLS, tool_choice={"type": "any"}, **LONG) as events:
        calls_of(events.get_final_message())


def tool_conversation():
    answer = client.messages.create(messages=USER, tools=TOOLS, tool_choice={"type": "any"}, **LONG)
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "7"} for call in calls_of(answer)]
    said = [*USER, {"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    client.messages.create(messages=said, tools=TOOLS, **SHORT)


def tool_runner():
    @anthropic.beta_tool
    def add(first: int, second: int) -> str:
        """Adds two numbers."""
        return str(first + second)

    choice = {"type": "tool", "name": "add"}
    runner = client.beta.messages.tool_runner(messages=USER, tools=[add], tool_choice=choice, max_iterations=2, **LONG)
    assert len([calls_of(answer) for answer in runner]) == 2


def parsed():
    answer = client.messages.parse(messages=USER, output_format=Colour, **LONG)
    assert isinstance(answer.parsed_output, Colour)


def count_tokens():
    asked = {"model": MODEL, "messages": USER}
    without, beside = client.messages.count_tokens(**asked), client.messages.count_tokens(tools=TOOLS, **asked)
    assert 0 < without.input_tokens < beside.input_tokens


if __name__ == "__main__":
    play(
        models,
        text,
        stream,
        raw_stream,
        thinking,
        tools_auto,
        tool_required,
        tool_named,
        tool_streamed,
        tool_conversation,
        tool_runner,
        parsed,
        count_tokens,
    )
