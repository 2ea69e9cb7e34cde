"""Routes whose bodies are JSON, and how `/openapi.json` describes them.

A long body is parsed in a thread, by a parser that needs 50 ms for 8 MB: until then it holds up all other calls.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.responses import Response

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
