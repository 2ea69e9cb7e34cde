"""What stands in front of the app: the size of the headers, the key, and the size of a body.

- Headers are bounded while they are read, before there is a key to check: the server itself takes any number of them.
- A call without the key costs nothing but this check.
- No more of a body is kept than the limit, whether its length was announced or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from titan_rl.errors import TitanError
from titan_rl.gateway.access.callers import Door, Visit
from titan_rl.gateway.openai.errors import ApiError, api_error, error_response, headers_of

OPEN_PATHS = ("/health",)
"""What anybody may ask: load balancers have no key."""
VISIT = "titan_rl.visit"
"""Where a call's scope has its `Visit`; calls of `OPEN_PATHS` have none."""
MOST_DISCARDED = 64 << 20
"""Bytes of a body that is too long which are read and thrown away."""

MOST_HEADERS = 256
"""Of one call, trailers included."""
MOST_FRAMING_BYTES = 256 << 10
"""Of one call: all that is no body. Clients send some thousand; one that sends its body in pieces, 8 for each."""


class BoundedFraming(HttpToolsProtocol):
    """A connection that is cut off (400) when a call on it has too many headers, or too long ones."""

    _framing = 0

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._framing = 0  # what came in the same read is counted no more: at most 256 KiB

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= MOST_HEADERS:
            raise ValueError("too many headers")  # the parser ends there, and the base class answers 400
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._framing -= len(body)
        super().on_body(body)

    def data_received(self, data: bytes) -> None:
        self._framing += len(data)
        super().data_received(data)
        if self._framing > MOST_FRAMING_BYTES and not self.transport.is_closing():
            self.send_400_response(f"Headers and chunk marks are longer than {MOST_FRAMING_BYTES} bytes.")


class Doorkeeper:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, *, door: Door, max_body_bytes: int) -> None:
        self._app = app
        self._door = door
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if scope["path"] in OPEN_PATHS:
            await self._within_limit(scope, headers, receive, send)
            return
        visit = self._door.admit(headers.get("authorization", ""))
        if visit is None:
            problem = "the API key is missing or wrong: send it as `Authorization: Bearer KEY`"
            answer = error_response(
                ApiError(401, problem, code="invalid_api_key"),
                {"WWW-Authenticate": "Bearer", "Connection": "close"},
            )
            await answer(scope, receive, send)
            return
        with visit:
            await self._within_limit({**scope, VISIT: visit}, headers, receive, send)

    async def _within_limit(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        announced = headers.get("content-length", "")
        visit: Visit | None = scope.get(VISIT)
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await (receive() if visit is None else _unless_over(receive(), visit.over))
            seen += len(message.get("body", b""))
            if seen > self._max_body_bytes:
                raise await self._too_long(message, receive)
            return message

        if announced.isdecimal() and int(announced[:20]) > self._max_body_bytes:
            refusal = await self._too_long(await receive(), receive)
            answer = error_response(ApiError(refusal.status_code, refusal.detail), refusal.headers)
            await answer(scope, receive, send)
            return
        await self._app(scope, counted, send)

    async def _too_long(self, message: Message, receive: Receive) -> HTTPException:
        """The refusal, once the client has sent what it wanted to: it would not read an answer before, and the end of
        the connection would take the answer away. Past `MOST_DISCARDED` it is cut off all the same."""
        discarded = 0
        while message.get("more_body") and discarded < MOST_DISCARDED:
            message = await receive()
            discarded += len(message.get("body", b""))
        detail = f"the request body is longer than {self._max_body_bytes} bytes"
        return HTTPException(413, detail, headers={"Connection": "close"})


async def _unless_over(receiving: Awaitable[Message], over: asyncio.Future[TitanError]) -> Message:
    """What comes next of a body; a client that is still sending when its visit ends is told why."""
    task = asyncio.ensure_future(receiving)
    try:
        first: set[asyncio.Future[Any]] = {task, over}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
    finally:
        task.cancel()
    error = api_error(over.result())
    raise HTTPException(error.status, error.message, headers=headers_of(error))
