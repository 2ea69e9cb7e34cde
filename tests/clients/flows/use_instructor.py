"""Instructor: each of its modes for OpenAI's API, and Anthropic's."""

from typing import Literal

import instructor
from flows import MODEL, play
from pydantic import BaseModel, ConfigDict

USER = [{"role": "user", "content": "Which colour?"}]


class Colour(BaseModel):
    colour: Literal["red", "green"]
    shades: list[int]


class AnyObject(BaseModel):
    """Of the mode JSON the client asks only for an object."""

    model_config = ConfigDict(extra="allow")


def client(mode, **options):
    return instructor.from_provider(f"openai/{MODEL}", mode=mode, **options)


def ask(mode, shape=Colour):
    assert isinstance(client(mode).create(response_model=shape, messages=USER, max_retries=1), shape)


def tools():
    ask(instructor.Mode.TOOLS)


def tools_strict():
    ask(instructor.Mode.TOOLS_STRICT)


def functions():
    ask(instructor.Mode.FUNCTIONS)


def json_schema():
    ask(instructor.Mode.JSON_SCHEMA)


def json():
    ask(instructor.Mode.JSON, AnyObject)


def responses_tools():
    ask(instructor.Mode.RESPONSES_TOOLS)


async def asynchronous():
    many = client(instructor.Mode.TOOLS, async_client=True)
    assert isinstance(await many.create(response_model=Colour, messages=USER, max_retries=1), Colour)


def partial():
    *_, last = client(instructor.Mode.TOOLS).create_partial(response_model=Colour, messages=USER)
    assert last.colour in ("red", "green")


def anthropic_tools():
    asked = instructor.from_provider(f"anthropic/{MODEL}", mode=instructor.Mode.TOOLS, max_tokens=4096)
    assert isinstance(asked.create(response_model=Colour, messages=USER, max_retries=1), Colour)


if __name__ == "__main__":
    play(tools, tools_strict, functions, json_schema, json, responses_tools, asynchronous, partial, anthropic_tools)
