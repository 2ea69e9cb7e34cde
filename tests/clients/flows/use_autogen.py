"""AutoGen's OpenAI client and its assistant."""

import json
from typing import Literal

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import StructuredMessage
from autogen_core import CancellationToken
from autogen_core.models import AssistantMessage, FunctionExecutionResult, FunctionExecutionResultMessage, UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from flows import KEY, MODEL, URL, play
from pydantic import BaseModel

USER = UserMessage(content="What is 3 + 4?", source="user")


class Colour(BaseModel):
    colour: Literal["red", "green"]
    shades: list[int]


async def add(first: int, second: int) -> int:
    """Adds two numbers."""
    return first + second


ADD = FunctionTool(add, description="Adds two numbers.", strict=True)


def model(**options):
    return OpenAIChatCompletionClient(model=MODEL, base_url=URL, api_key=KEY, **options)


async def text():
    assert isinstance((await model(max_tokens=16).create([USER])).content, str)


async def stream():
    assert [piece async for piece in model(max_tokens=16).create_stream([USER])]


async def tools_auto():
    await model(max_tokens=64).create([USER], tools=[ADD])


async def run(calls):
    assert calls
    return [
        FunctionExecutionResult(
            call_id=call.id,
            name=call.name,
            is_error=False,
            content=str(await ADD.run_json(json.loads(call.arguments), CancellationToken())),
        )
        for call in calls
    ]


async def tool_required():
    await run((await model().create([USER], tools=[ADD], tool_choice="required")).content)


async def tool_named():
    answer = await model(parallel_tool_calls=False).create([USER], tools=[ADD], tool_choice=ADD)
    assert len(await run(answer.content)) == 1


async def tool_streamed():
    *_, answer = [piece async for piece in model().create_stream([USER], tools=[ADD], tool_choice="required")]
    await run(answer.content)


async def tool_conversation():
    calls = (await model().create([USER], tools=[ADD], tool_choice="required")).content
    said = [USER, AssistantMessage(content=calls, source="assistant")]
    said.append(FunctionExecutionResultMessage(content=await run(calls)))
    await model(max_tokens=16).create(said, tools=[ADD])


async def json_object():
    assert (await model().create([USER], json_output=True)).content.startswith("{")


async def structured():
    Colour.model_validate_json((await model().create([USER], json_output=Colour)).content)


async def assistant():
    agent = AssistantAgent("assistant", model(max_tokens=64), tools=[add], reflect_on_tool_use=True)
    assert (await agent.run(task="What is 3 + 4?")).messages


async def assistant_streamed():
    agent = AssistantAgent("assistant", model(max_tokens=64), model_client_stream=True)
    assert [event async for event in agent.run_stream(task="What is 3 + 4?")]


async def assistant_structured():
    agent = AssistantAgent("assistant", model(), output_content_type=Colour)
    told = (await agent.run(task="What is 3 + 4?")).messages[-1]
    assert isinstance(told, StructuredMessage)
    assert isinstance(told.content, Colour)


if __name__ == "__main__":
    flows = text, stream, tools_auto, tool_required, tool_named, tool_streamed, tool_conversation, json_object
    play(*flows, structured, assistant, assistant_streamed, assistant_structured)
