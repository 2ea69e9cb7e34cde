"""Tools made of functions: what the policy is told of them, and how its calls are answered (0.3 s)."""

import asyncio
from typing import Annotated, Literal

import pytest
from pydantic import Field

from titan_rl.environments.base import ToolError, tool
from titan_rl.environments.tools import Toolbox
from titan_rl.errors import ConfigError, TaskError
from titan_rl.types import ToolCall


@pytest.fixture
def toolbox():
    @tool
    def forecast(
        city: str, days: Annotated[int, Field(ge=1, le=7)] = 1, unit: Literal["C", "F"] = "C", copy: bool = False
    ) -> str:
        """The weather forecast.

        For any place.

        Args:
            city: name of a city,
                in English
            days (int): how many

        Returns:
            a sentence
        """
        return f"{city} {days} {unit} {copy}"

    return Toolbox([forecast])


def test_name_description_and_schema_are_those_of_the_function(toolbox):
    (spec,) = toolbox.specs
    assert (spec.name, spec.description) == ("forecast", "The weather forecast.\n\nFor any place.")
    assert spec.parameters == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "name of a city, in English"},
            "days": {"type": "integer", "minimum": 1, "maximum": 7, "description": "how many"},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "copy": {"type": "boolean"},
        },
        "required": ["city"],
        "additionalProperties": False,
    }


def test_arguments_are_converted_and_defaults_are_the_functions(toolbox):
    assert asyncio.run(toolbox.answer(ToolCall("forecast", {"city": "Oslo", "days": "3"}))) == "Oslo 3 C False"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (ToolCall("forecast", {}), "city: Field required"),
        (ToolCall("forecast", {"city": "Oslo", "days": 9}), "days: Input should be less than or equal to 7"),
        (ToolCall("forecast", {"city": "Oslo", "unit": "K"}), "unit: Input should be 'C' or 'F'"),
        (ToolCall("forecast", {"city": "Oslo", "day": 1}), "day: Extra inputs are not permitted"),
        (ToolCall("forcast", {}), "there is no tool 'forcast'; there are forecast"),
        (ToolCall("forecast", {}, "no JSON"), "no JSON"),
    ],
)
def test_a_call_that_cannot_be_made_is_answered_with_a_sentence(toolbox, call, words):
    with pytest.raises(ToolError, match=words):
        asyncio.run(toolbox.answer(call))


def test_a_tool_is_still_a_function_and_answers_with_a_text_or_a_number():
    @tool
    async def count(text: str) -> int | list[str]:
        return len(text) or [text]

    assert asyncio.run(count("four")) == 4 and Toolbox([count]).asynchronous
    assert asyncio.run(Toolbox([count]).answer(ToolCall("count", {"text": "four"}))) == "4"
    with pytest.raises(TaskError, match="tool count returned list, expected a text or a number"):
        asyncio.run(Toolbox([count]).answer(ToolCall("count", {"text": ""})))


def untyped(x) -> str: ...


def variadic(*names: str) -> str: ...


def no_json(x: asyncio.Event) -> str: ...


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: tool(untyped), "parameter x has no type annotation"),
        (lambda: tool(variadic), "called by name"),
        (lambda: tool(no_json), "has no JSON schema"),
        (lambda: Toolbox([untyped]), "decorate the function with @tool"),
        (
            lambda: Toolbox([tool(test_a_tool_is_still_a_function_and_answers_with_a_text_or_a_number)] * 2),
            "two tools have one name",
        ),
    ],
)
def test_a_declaration_that_cannot_be_held_is_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()
