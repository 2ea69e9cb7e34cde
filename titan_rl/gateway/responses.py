"""What a client gets: JSON, a stream of events, or the status and message for what went wrong, in every dialect.

What a client did wrong is a 4xx with a sentence about it. What the fleet cannot do is a 503 with the cause, or a 504
where it took too long. The router has already retried what can be retried, so every error carries
`x-should-retry: false`, which the `openai` clients heed. Only a gateway that is closing asks for another try: another
one may take its place.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from titan_rl.errors import (
    ActorGone,
    GatewayClosing,
    RequestError,
    RequestLost,
    RequestTimeout,
    RequestTooLong,
    RolloutOver,
    TaskError,
    TitanError,
)
from titan_rl.one_line import counted, one_line

RETRY = {"x-should-retry": "true", "retry-after": "5"}
"""Seconds. A gateway that restarts is back by then, or not for long."""
MOST_PROBLEMS = 5
"""Named in one error: a list of a million wrong values has a million problems."""
JSON_WORDS = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "none_required": "null",
}
"""What a field should be where pydantic has a word of Python's for it, by pydantic's name of the problem."""
LONGEST_VALUE = 60
"""Characters of a wrong value in an error."""
LONGEST_PLACE = 200
"""Characters of a field's name in an error; a client may send any name."""


class ApiError(Exception):
    """What a client is told instead of an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            code: a stable name of the problem, for programs.
            param: the field of the body that is wrong.
        """
        super().__init__(status, message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = {"x-should-retry": "false", **(headers or {})}


def api_error(error: Exception) -> ApiError:
    """What a client is told about any exception. One that nobody expected is a bug of ours: a 500."""
    match error:
        case ApiError():
            return error
        case RequestValidationError():
            return _invalid_body(error.errors())
        case HTTPException():  # no such path or method
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
        case RolloutOver():
            return ApiError(403, str(error), code="rollout_over")
        case RequestTimeout():
            return ApiError(504, str(error), code="request_timeout")
        case RequestLost():
            return ApiError(503, str(error), code="engine_unavailable")
        case RequestTooLong():
            return ApiError(400, str(error), code="context_length_exceeded")
        case RecursionError():
            return ApiError(400, "the body is nested too deeply", code="invalid_request")
        case RequestError() | TaskError():
            return ApiError(400, str(error), code="invalid_request")
        case GatewayClosing():
            return ApiError(503, str(error), code="gateway_closing", headers=RETRY)
        case ActorGone():  # it may be replaced
            return ApiError(503, f"{type(error).__name__}: {error}", code="engine_unavailable", headers=RETRY)
        case TitanError():
            return ApiError(503, f"{type(error).__name__}: {error}", code="engine_unavailable")
        case _:
            return ApiError(500, f"{type(error).__name__}: {error}", code="internal_error")


def _invalid_body(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """Names the first wrong field, and says of each what was expected and what came."""
    sentences: dict[tuple[str, str], list[str]] = {}  # a field of several types has a problem for each of them
    for problem in problems[:MOST_PROBLEMS]:
        place, expected, got = _describe(problem)
        sentences.setdefault((place[:LONGEST_PLACE], got), []).append(expected)
    reasons = []
    for (place, got), wanted in sentences.items():
        what = f"expected {' or '.join(dict.fromkeys(wanted))}, got {got}" if got else wanted[0]
        reasons.append(f"{place or 'request body'}: {what}")
    if len(problems) > MOST_PROBLEMS:
        reasons.append(f"and {counted(len(problems) - MOST_PROBLEMS, 'more problem')}")
    first = next((place for place, _ in sentences if place), None)
    return ApiError(400, "; ".join(reasons), param=first, code="invalid_request")


def _describe(problem: Mapping[str, Any]) -> tuple[str, str, str]:
    """Field, what was expected there, and what came; without the last the second is the whole sentence."""
    kind, context = problem["type"], problem.get("ctx") or {}
    if kind == "json_invalid":
        return "", f"is no JSON ({context.get('error', '')})", ""
    parts = [part for part in problem["loc"] if part != "body"]
    if parts[:1] == ["messages"]:
        del parts[2:3]  # the role, by which pydantic tells messages apart
    types = {part for part in map(str, parts[1:]) if part == "str" or {"[", "-"} & set(part)}
    place = ".".join(part for part in map(str, parts) if part not in types)
    match kind:
        case "union_tag_invalid":
            return f"{place}.role", f"one of {context['expected_tags']}", _quoted(context["tag"])
        case "union_tag_not_found":
            return f"{place}.role", "is missing", ""
        case "missing":
            return place, "is missing", ""
        case "extra_forbidden":
            return place, "is not supported", ""
    expected = JSON_WORDS.get(kind, problem["msg"].removeprefix("Input should be ").replace("False", "false"))
    if kind not in JSON_WORDS and expected == problem["msg"]:  # a whole sentence, ours or pydantic's
        return place, expected.removeprefix("Value error, "), ""
    return place, expected.replace("a valid", "a"), _quoted(problem["input"])


def _quoted(value: Any) -> str:
    match value:
        case list():
            return f"a list of {len(value)}"
        case dict():
            return "an object"
        case str():
            return json.dumps(one_line(value, LONGEST_VALUE))
        case _:
            return one_line(json.dumps(value, default=str), LONGEST_VALUE)


class JsonResponse(JSONResponse):
    """JSON in ASCII: text of a client that comes back in an error may hold what UTF-8 cannot."""

    def render(self, content: Any) -> bytes:
        return to_json(content)


class EventStream(Response):
    """Server-sent events. However the response ends, `events` is closed, and with it the engine work behind it."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:
            body = await anext(events)  # what fails before it is answered with a status of its own
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": body, "more_body": True})
            async for body in events:
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def to_json(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
