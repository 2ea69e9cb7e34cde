"""Routes whose bodies are JSON. A long one is parsed in a thread, by a parser that needs 50 ms for 8 MB: until then it
holds up the answers of all other calls."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.responses import Response

LONG = 64 << 10
"""Bytes; a shorter body is parsed at once."""


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
