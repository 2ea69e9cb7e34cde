"""Every answer that is no success, as an OpenAI error object.

    {"error": {"message": …, "type": …, "param": …, "code": …}}

What a client did wrong is a 4xx with a sentence about it; what the fleet cannot do is a 503 with the cause, or a 504
where it did not do it in time. The router has tried already what could be tried, so `x-should-retry: false` goes with
an error (the `openai` clients heed it) and no `Retry-After`. Only a gateway that is being closed asks to be asked
again: another one may take its place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from titan_rl.errors import (
    GatewayClosing,
    RequestError,
    RequestLost,
    RequestTimeout,
    SessionOver,
    TaskError,
    TitanError,
)

NO_RETRY = {"x-should-retry": "false"}
RETRY = {"x-should-retry": "true", "retry-after": "5"}
"""Seconds: a gateway that is started again is back after that, or not for long."""
CLOSING = "gateway_closing"
"""Code of the only error that asks to be retried."""
CLIENT_GONE = 499
"""Status under which a call is counted whose client hung up; nobody reads it."""


class ApiError(Exception):
    """What the client is told instead of an answer."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, message, param, code)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @property
    def kind(self) -> str:
        match self.status:
            case 401:
                return "authentication_error"
            case status if status >= 500:
                return "server_error"
            case _:
                return "invalid_request_error"

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def api_error(error: TitanError) -> ApiError:
    """What a client is told about an error of the project: its own fault, its rollout's end, or the fleet's fault."""
    if isinstance(error, SessionOver):
        return ApiError(403, str(error), code="rollout_over")
    if isinstance(error, RequestTimeout):
        return ApiError(504, str(error), code="request_timeout")
    if isinstance(error, RequestLost):
        return ApiError(503, str(error), code="engine_unavailable")
    if isinstance(error, RequestError) and "max_model_len" in str(error):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, (RequestError, TaskError)):
        return ApiError(400, str(error), code="invalid_request")
    if isinstance(error, GatewayClosing):
        return ApiError(503, str(error), code=CLOSING)
    return ApiError(503, f"{type(error).__name__}: {error}", code="engine_unavailable")


class JsonResponse(Response):
    """JSON in ASCII: text of a client that comes back in an error may hold what UTF-8 cannot."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def headers_of(error: ApiError) -> dict[str, str]:
    return RETRY if error.code == CLOSING else NO_RETRY


def error_response(error: ApiError, headers: Mapping[str, str] | None = None) -> JsonResponse:
    return JsonResponse(error.body(), status_code=error.status, headers={**headers_of(error), **(headers or {})})


def install(app: FastAPI) -> None:
    """Let the app answer every error in this form."""

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(TitanError)
    async def failed(request: Request, error: TitanError) -> Response:
        return error_response(api_error(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        param, message = describe(error.errors())
        return error_response(ApiError(400, message, param=param, code="invalid_request"))

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        # A bug of ours, and the server logs its traceback.
        return error_response(ApiError(500, f"{type(error).__name__}: {error}", code="internal_error"))

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> Response:
        return error_response(ApiError(error.status_code, str(error.detail)), error.headers)


def describe(problems: Sequence[Mapping[str, Any]]) -> tuple[str | None, str]:
    """The field that is wrong first, and a sentence per problem: where it is, and what was expected."""
    sentences = []
    first: str | None = None
    for problem in problems[:MOST_PROBLEMS]:
        place = ".".join(str(part) for part in problem["loc"] if part != "body")[:LONGEST_PLACE]
        first = first or place or None
        cause = (problem.get("ctx") or {}).get("error", "") if problem["type"] == "json_invalid" else ""
        sentences.append(f"{place or 'request body'}: {problem['msg']}{f' ({cause})' if cause else ''}")
    more = len(problems) - MOST_PROBLEMS
    return first, "; ".join(sentences) + (f"; and {more} more problems" if more > 0 else "")


LONGEST_PLACE = 200
"""Characters: a field may have any name."""
MOST_PROBLEMS = 5
"""Named in one error; a list of a million wrong values has a million."""
