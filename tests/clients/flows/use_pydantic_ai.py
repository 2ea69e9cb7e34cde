"""Pydantic AI, through the Responses API, its default for OpenAI, through chat completions and the other dialects."""

from typing import Literal

from flows import MODEL, play
from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput

USER = "What is 3 + 4?"
SHORT = {"max_tokens": 16}
PATIENT = 8
"""A turn in which the policy says nothing, or only thinks, is asked for again."""


class Colour(BaseModel):
    colour: Literal["red", "green"]
    shades: list[int]


class AnyObject(BaseModel):
    """Of a prompted output the client asks only that it is a JSON object."""

    model_config = ConfigDict(extra="allow")


def add(first: int, second: int) -> int:
    """Adds two numbers."""
    return first + second


async def text(model):
    await Agent(model, instructions="Be brief.", model_settings=SHORT, retries=PATIENT).run(USER)


async def stream(model):
    async with Agent(model, model_settings=SHORT, retries=PATIENT).run_stream(USER) as result:
        assert isinstance(await result.get_output(), str)


async def conversation(model):
    agent = Agent(model, model_settings=SHORT, retries=PATIENT)
    first = await agent.run(USER)
    await agent.run("And 4 + 5?", message_history=first.all_messages())


async def tools_auto(model):
    await Agent(model, tools=[add], model_settings=SHORT, retries=PATIENT).run(USER)


async def output_function(model):
    assert isinstance((await Agent(model, output_type=add).run(USER)).output, int)


async def tools_and_output(model):
    """The policy chooses between the tool and the output's at every turn."""
    agent = Agent(model, tools=[add], output_type=ToolOutput(Colour))
    assert isinstance((await agent.run(USER)).output, Colour)


async def tool_output(model):
    assert isinstance((await Agent(model, output_type=Colour).run(USER)).output, Colour)


async def tool_output_streamed(model):
    async with Agent(model, output_type=Colour).run_stream(USER) as result:
        assert isinstance(await result.get_output(), Colour)


async def native_output(model):
    assert isinstance((await Agent(model, output_type=NativeOutput(Colour)).run(USER)).output, Colour)


async def prompted_output(model):
    assert isinstance((await Agent(model, output_type=PromptedOutput(AnyObject)).run(USER)).output, AnyObject)


if __name__ == "__main__":
    flows = text, stream, conversation, tools_auto, output_function, tools_and_output, tool_output
    more = tool_output_streamed, native_output, prompted_output
    play(*flows, *more, over={"responses": f"openai:{MODEL}", "chat": f"openai-chat:{MODEL}"})
