"""What a policy that has learned nothing says under a schema is of that schema, in 1,000 of 1,000 samples."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

SAMPLES = 100
"""Of each schema."""


LONE = "\ufffd" * 3
"""What the three bytes of a lone surrogate decode to. The grammar lets them pass as one character, so that only the
length of a text could differ."""
TOLD = json.dumps(LONE)[1:-1]
"""The same in the arguments of a call."""


def shape(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}


SCHEMAS: dict[str, dict[str, Any]] = {
    "a choice": shape(colour={"enum": ["red", "green", 3, None]}, always={"const": "so"}),
    "bounded integers": shape(low={"type": "integer", "minimum": -3, "maximum": 12}, any={"type": "integer"}),
    "numbers": shape(share={"type": "number"}, sure={"type": "boolean"}, nothing={"type": "null"}),
    "short texts": shape(text={"type": "string", "minLength": 2, "maxLength": 5}),
    "any text": shape(text={"type": "string"}),
    "a pattern": shape(day={"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"}),
    "bounded lists": shape(marks={"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 4}),
    "one of several": shape(value={"anyOf": [shape(a={"type": "integer"}), shape(b={"type": "boolean"})]}),
    "what may be missing": shape(must={"type": "boolean"})
    | {"properties": {"must": {"type": "boolean"}, "may": {"type": "integer"}}},
    "a tree": shape(root={"$ref": "#/$defs/node"})
    | {
        "$defs": {
            "node": shape(
                name={"type": "string", "maxLength": 3},
                children={"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            )
        }
    },
}


@pytest.fixture(scope="module")
def client(gateway: dict[str, str]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=gateway["OPENAI_BASE_URL"], api_key=gateway["OPENAI_API_KEY"]) as connected:
        yield connected


def ask(client: openai.OpenAI, gateway: dict[str, str], **options: Any) -> list[Any]:
    messages: Any = [{"role": "user", "content": "hm?"}]
    return client.chat.completions.create(model=gateway["MODEL"], messages=messages, n=SAMPLES, **options).choices


@pytest.mark.acceptance
@pytest.mark.timeout(900)
@pytest.mark.parametrize("forced", ["content", "calls"])
def test_1000_of_1000_samples_are_of_their_schema(forced: str, client: openai.OpenAI, gateway: dict[str, str]) -> None:
    right = 0
    for name, schema in SCHEMAS.items():
        if forced == "content":
            wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
            texts = [choice.message.content for choice in ask(client, gateway, response_format=wanted)]
        else:
            tool = {"type": "function", "function": {"name": "answer", "parameters": schema}}
            choices = ask(client, gateway, tools=[tool], tool_choice="required")
            assert all(choice.message.tool_calls for choice in choices), name
            texts = [call.function.arguments for choice in choices for call in choice.message.tool_calls]
        check = jsonschema.Draft202012Validator(schema)
        for text in texts:
            problems = [
                error.message for error in check.iter_errors(json.loads(text.replace(LONE, "x").replace(TOLD, "x")))
            ]
            assert not problems, (name, text)
        right += min(len(texts), SAMPLES)
    assert right == SAMPLES * len(SCHEMAS) == 1000
