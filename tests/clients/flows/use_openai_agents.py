"""OpenAI's Agents SDK, through the Responses API, its default, and through chat completions."""

from typing import Literal

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from flows import MODEL, play
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
USER = "What is 3 + 4?"


class Colour(BaseModel):
    colour: Literal["red", "green"]
    shades: list[int]


@function_tool
def add(first: int, second: int) -> int:
    """Adds two numbers."""
    return first + second


async def run(model, **options):
    return await Runner.run(Agent(name="Assistant", instructions="Be brief.", model=model, **options), USER)


async def run_streamed(model, **options):
    result = Runner.run_streamed(Agent(name="Assistant", instructions="Be brief.", model=model, **options), USER)
    assert [event async for event in result.stream_events()]
    return result


def check_called(result):
    kinds = [item.type for item in result.new_items]
    assert "tool_call_item" in kinds
    assert "tool_call_output_item" in kinds


async def text(model):
    assert isinstance((await run(model)).final_output, str)


async def stream(model):
    await run_streamed(model)


async def conversation(model):
    agent = Agent(name="Assistant", model=model)
    first = await Runner.run(agent, USER)
    await Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": "And 4 + 5?"}])


async def tools_auto(model):
    await run(model, tools=[add])


async def tool_required(model):
    """The first turn must call; what follows is up to the policy."""
    check_called(await run(model, tools=[add], model_settings=ModelSettings(tool_choice="required")))


async def tool_streamed(model):
    check_called(await run_streamed(model, tools=[add], model_settings=ModelSettings(tool_choice="required")))


async def tool_named(model):
    settings = ModelSettings(tool_choice="add", parallel_tool_calls=False)
    check_called(await run(model, tools=[add], model_settings=settings, tool_use_behavior="stop_on_first_tool"))


async def output_type(model):
    assert isinstance((await run(model, output_type=Colour)).final_output, Colour)


async def output_type_streamed(model):
    assert isinstance((await run_streamed(model, output_type=Colour)).final_output, Colour)


async def previous_response(model):
    agent = Agent(name="Assistant", model=model)
    first = await Runner.run(agent, USER)
    await Runner.run(agent, "And 4 + 5?", previous_response_id=first.last_response_id)


if __name__ == "__main__":
    chat = OpenAIChatCompletionsModel(model=MODEL, openai_client=AsyncOpenAI())
    flows = text, stream, conversation, tools_auto, tool_required, tool_streamed, tool_named, output_type
    play(*flows, output_type_streamed, over={"responses": MODEL, "chat": chat})
    play(previous_response, over={"responses": MODEL})
