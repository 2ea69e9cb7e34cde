"""Which status and message a client gets for what went wrong, in every dialect.

What a client did wrong is a 4xx with a sentence about it. What the fleet cannot do is a 503 with the cause, or a 504
where it took too long. The router has already retried what can be retried, so every error carries
`x-should-retry: false`, which the `openai` clients heed. Only a gateway that is closing asks for another try: another
one may take its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from titan_rl.errors import (
    GatewayClosing,
    RequestError,
    RequestLost,
    RequestTimeout,
    RequestTooLong,
    SessionOver,
    TaskError,
    TitanError,
)

RETRY = {"x-should-retry": "true", "retry-after": "5"}
"""Seconds. A gateway that restarts is back by then, or not for long."""
MOST_PROBLEMS = 5
"""Named in one error: a list of a million wrong values has a million problems."""
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
        case SessionOver():
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
        case TitanError():
            return ApiError(503, f"{type(error).__name__}: {error}", code="engine_unavailable")
        case _:
            return ApiError(500, f"{type(error).__name__}: {error}", code="internal_error")


def _invalid_body(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """Names the first wrong field, and says of each problem where it is and what was expected."""
    places, sentences = [], []
    for problem in problems[:MOST_PROBLEMS]:
        places.append(".".join(str(part) for part in problem["loc"] if part != "body")[:LONGEST_PLACE])
        cause = (problem.get("ctx") or {}).get("error", "") if problem["type"] == "json_invalid" else ""
        sentences.append(f"{places[-1] or 'request body'}: {problem['msg']}{f' ({cause})' if cause else ''}")
    if len(problems) > MOST_PROBLEMS:
        sentences.append(f"and {len(problems) - MOST_PROBLEMS} more problems")
    first = next((place for place in places if place), None)
    return ApiError(400, "; ".join(sentences), param=first, code="invalid_request")
