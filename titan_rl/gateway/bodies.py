"""What the bodies of all dialects share.

- A field that is not declared is refused by name, never ignored: whoever sends it expects another answer.
- Hints are declared and not used, because agent frameworks send them with every call.
- Part of an earlier answer comes back as its client keeps it, with fields of its own: those are not read.
- A list is read up to its first wrong entry (`fail_fast`): to name a million of them would take a minute.
- Types are strict: no number is read out of a text, no flag out of a number.
- However a dialect cuts a conversation into parts, the policy reads the same messages.
- What a call is refused for has the name that the client gave it.
- A long body is parsed in a thread, by a parser that needs 50 ms for 8 MB: until then it holds up all other calls.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator
from pydantic_core import from_json
from starlette.responses import Response

from titan_rl.chat.renderer import AnswerForm
from titan_rl.gateway.calls import ApiError, Chat, CompletionCall
from titan_rl.types import Message, ToolCall

MOST_FIELDS = 64
"""Of one object: each that is unknown has a sentence in the refusal."""
LARGEST_INTEGER = 2**63 - 1
MOST_STOPS = 16
MOST_TOOLS = 128
MOST_MESSAGES = 4096
"""Also parts and calls of all of them."""
DRAWING = ["temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "repetition_penalty"]
DRAWING += ["min_new_tokens"]
"""Fields that change how tokens are drawn, besides `seed`."""
ASKED = ["stop_token_ids", "choices", "stop", "ignore_eos", "seed", "role", "echo"]
"""Fields of a call that a body may have."""
FORMATS = ["response_format", "text", "output_config", "response_schema", "response_json_schema"]
"""Fields of bodies that say what an answer must be."""


def _few_parts(entries: Any) -> Any:
    given = [each for each in entries[:MOST_MESSAGES] if isinstance(each, dict)] if isinstance(entries, list) else []
    parts = sum(len(value) for each in given for value in each.values() if isinstance(value, list))
    if parts > MOST_MESSAGES:
        raise ValueError(f"all messages together have at most {MOST_MESSAGES} parts and calls, not {parts}")
    return entries


T = TypeVar("T")
Prompts = Sequence[Chat | str | list[int]]
Many = Annotated[list[T], Field(max_length=MOST_MESSAGES, fail_fast=True), BeforeValidator(_few_parts)]
Turns = Annotated[list[T], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True), BeforeValidator(_few_parts)]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]
Stops = Annotated[list[Stop], Field(max_length=MOST_STOPS)]
ModelName = Annotated[str, Field(max_length=1024)]
ToolName = Annotated[str, Field(min_length=1, max_length=256)]
Choices = Annotated[int, Field(ge=1, le=1024)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Seed = Annotated[int, Field(ge=-LARGEST_INTEGER - 1, le=LARGEST_INTEGER)]
Temperature = Annotated[float, Field(ge=0, le=2)]
TopP = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Hint = Any


def _object(text: Any) -> dict[str, Any]:
    with suppress(ValueError, RecursionError):
        if isinstance(text, str) and isinstance(arguments := json.loads(text or "{}"), dict):
            return arguments
    raise ValueError("the arguments of a call must be a JSON object, as text")


Arguments = Annotated[dict[str, Any], PlainValidator(_object, json_schema_input_type=str)]
"""A JSON object, as text; some frameworks write none as an empty text."""


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def has_few_fields(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MOST_FIELDS:
            raise ValueError(f"an object has at most {MOST_FIELDS} fields, not {len(value)}")
        return value


class Part(Strict):
    """Of a conversation. The policy reads of it what is named as in a message."""

    speaker: ClassVar[str] = ""
    """The role of parts that can only have one."""

    def message(self, role: str = "") -> Message:
        """`role`: of parts that do not say it."""
        said = {name: value for name, value in vars(self).items() if name in Message._fields and value is not None}
        return Message(**{"role": self.speaker or role, "content": "", **said})


class ReturnedPart(Part):
    """Part of an earlier answer: what it has besides these fields says nothing to the policy."""

    model_config = ConfigDict(extra="ignore")


class Call(ReturnedPart):
    id: str
    name: ToolName
    arguments: dict[str, Any]

    def call(self) -> ToolCall:
        return ToolCall(self.name, self.arguments, id=self.id)

    def message(self, role: str = "assistant") -> Message:
        return Message(role, "", (self.call(),))


class TextPart(Part):
    type: Literal["text"]
    content: Annotated[str, Field(alias="text")]


def _text(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.content for part in content)


Text = Annotated[str | Many[T], AfterValidator(_text)]
"""A text, or parts with texts."""


def read_role(role: str) -> str:
    """Newer clients call "developer" what is "system"."""
    return "system" if role == "developer" else role


def call_of(call_id: str, prompts: Prompts, body: Strict, prompt: str, place: str = "", **more: Any) -> CompletionCall:
    """`body` says how prompts are completed, in fields that are named as the call's. `prompt`: what it calls a prompt.
    `place`: how the path to its fields begins. `more`: fields of the call."""
    names = {name: f"{place}{field.alias or name}" for name, field in type(body).model_fields.items()}
    asked = {name: value for name in names if (value := getattr(body, name)) is not None}
    # OpenAI has both
    most = "max_tokens" if "max_tokens" in names and "max_new_tokens" not in asked else "max_new_tokens"
    told = {name: names[name] for name in (*DRAWING, "stop_token_ids", "choices") if name in names}
    if (form := more.get("answer")) is not None:
        field = next((names[each] for each in FORMATS if each in asked), prompt)
        told = {"constrain": "tools" if form.tools else field} | told
    more |= {name: asked[name] for name in ASKED if name in asked}
    return CompletionCall(
        id=call_id,
        prompts=prompts,
        max_new_tokens=asked.get(most),
        drawing={name: asked[name] for name in DRAWING if name in asked},
        names=told | {"max_new_tokens": names.get(most, most), "prompt": prompt},
        **more,
    )


def joined(parts: Iterable[Message]) -> list[Message]:
    """Messages that a dialect has in parts: neighbours of one role are one message, but for the answers of tools."""
    messages: list[Message] = []
    for role, group in groupby(parts, lambda part: part.role):
        if role == "tool":
            messages += group
            continue
        same = list(group)
        calls = tuple(call for part in same for call in part.tool_calls)
        text, reasoning = "".join(part.content for part in same), "".join(part.reasoning for part in same)
        messages.append(Message(role, text, calls, reasoning=reasoning))
    return messages


def answer_form(
    form: AnswerForm, field: str, names: Sequence[str] | None, *, strict: bool = False
) -> AnswerForm | None:
    """The form that an answer must have, of those of its tools that may be called; None: any. Raises ApiError.

    `field`: of the body, where it chooses among its tools. `names`: of those that may be called; None: all. `strict`:
    calls that are not forced follow their schemas too.
    """
    every = [tool.name for tool in form.tools]
    names = every if names is None else names
    missing = [name for name in names if name not in every]
    if missing or (form.must_call and not names):
        problem = f"there is no tool {missing[0]!r}" if missing else "it needs tools"
        raise ApiError(400, f"{field}: {problem}", param=field, code="invalid_request")
    limited = strict or not form.parallel or form.must_call or len({*names}) < len(every)
    if form.schema is None and not (every and limited):
        return None
    return form._replace(tools=[tool for tool in form.tools if tool.name in names])


# Over HTTP.

LONG = 64 << 10
"""Bytes; a shorter body is parsed at once."""
_ERROR = {"type": "object", "properties": {"error": {"type": "object"}}, "required": ["error"]}
ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"content": {"application/json": {"schema": _ERROR}}}
    for code in (400, 401, 403, 404, 405, 408, 413, 500, 503, 504)
}
"""What any path may answer beside its 200."""
STREAMS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}
"""What those may that stream."""


class JsonRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def parse_and_handle(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return parse_and_handle


class _JsonRequest(Request):
    async def json(self) -> Any:
        """Raises JSONDecodeError, which says what is wrong and where."""
        body = await self.body()
        try:
            return await asyncio.to_thread(from_json, body) if len(body) > LONG else from_json(body)
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from None


def description(app: FastAPI) -> dict[str, Any]:
    """FastAPI's, which would promise a 422, and writes integers as floats: the largest one would be rounded up."""
    if app.openapi_schema is None:
        written = json.dumps(get_openapi(title=app.title, version=app.version, routes=app.routes))
        app.openapi_schema = schema = json.loads(written, parse_float=lambda text: min(float(text), 2**63 - 1))
        for name in ("HTTPValidationError", "ValidationError"):
            schema["components"]["schemas"].pop(name, None)
        for operation in (each for methods in schema["paths"].values() for each in methods.values()):
            operation["responses"].pop("422", None)
    return app.openapi_schema
