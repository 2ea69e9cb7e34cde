"""The two forms of an answer: one JSON object, and a stream of events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send


class JsonResponse(JSONResponse):
    """JSON in ASCII: text of a client that comes back in an error may hold what UTF-8 cannot."""

    def render(self, content: Any) -> bytes:
        return to_json(content)


class EventStream(StreamingResponse):
    """Server-sent events. However the response ends, `events` is closed, and with it the engine work behind it."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None]) -> None:
        """
        Args:
            first: was awaited by the caller, so that a failure before it has a status of its own.
        """
        super().__init__(_chained(first, events), headers={"Cache-Control": "no-cache"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await self.stream_response(send)


async def _chained(first: bytes, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    yield first
    async for event in events:
        yield event


def to_json(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
