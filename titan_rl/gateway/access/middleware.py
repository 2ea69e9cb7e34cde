"""What every call passes before the app: its key, the size of its body, and the counters.

- A call without the key costs nothing but this check. No more of a body is kept than the limit.
- A call whose client hangs up is cancelled, whatever it waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from titan_rl.errors import TitanError
from titan_rl.gateway.access.callers import ApiKeys, Caller, unless
from titan_rl.gateway.errors import ApiError
from titan_rl.gateway.metrics import GatewayMetrics

CALLER = "titan_rl.caller"
"""Where a call's scope has its `Caller`."""
OPEN_PATHS = ("/health",)
"""What anybody may ask: load balancers have no key."""
CLIENT_GONE = 499
"""Status under which a call is counted whose client hung up before it was answered; nobody reads it."""
MOST_DISCARDED = 64 << 20
"""Bytes of a body past its limit that are read and thrown away: a client reads no answer before it has sent its body.
After that it is cut off."""


class ClientGone(Exception):
    """The client hung up; what it asked for was aborted."""


class CallMiddleware:
    """ASGI middleware."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: ApiKeys,
        metrics: GatewayMetrics,
        paths: frozenset[str],
        max_body_bytes: int,
        refusal: Callable[[Exception], Response],
    ) -> None:
        """
        Args:
            paths: those of the app; calls of any other are counted together.
            refusal: the answer to a call that does not reach the app.
        """
        self._app = app
        self._keys = keys
        self._metrics = metrics
        self._paths = paths
        self._max_body_bytes = max_body_bytes
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_GONE

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        path = scope["path"] if scope["path"] in self._paths else "other"
        with self._metrics.open.track_inprogress(), self._metrics.seconds.labels(path).time():
            try:
                await self._answer(scope, receive, watched)
            except ClientGone:
                pass
            except Exception:
                status = 500  # what is around this middleware answers so
                raise
            finally:
                self._metrics.calls.labels(path, str(status)).inc()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            caller = self._caller(scope)
            with caller.call_open():
                body = await unless(self._body(receive), caller.ended)

                async def whole_body() -> Message:
                    return {"type": "http.request", "body": body, "more_body": False}

                gone = asyncio.ensure_future(_hung_up(receive))
                try:
                    await unless(self._app({**scope, CALLER: caller}, whole_body, send), gone)
                finally:
                    gone.cancel()
        except (ApiError, TitanError) as error:
            await self._refusal(error)(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller:
        if scope["path"] in OPEN_PATHS:
            return self._keys.anybody
        caller = self._keys.caller(Headers(scope=scope).get("authorization", ""))
        if caller is None:
            problem = "the API key is missing or wrong: send it as `Authorization: Bearer KEY`"
            headers = {"WWW-Authenticate": "Bearer", "Connection": "close"}
            raise ApiError(401, problem, code="invalid_api_key", headers=headers)
        return caller

    async def _body(self, receive: Receive) -> bytes:
        most = self._max_body_bytes
        parts: list[bytes] = []
        length, more = 0, True
        while more and length <= most + MOST_DISCARDED:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part, more = message.get("body", b""), message.get("more_body", False)
            length += len(part)
            if length <= most:
                parts.append(part)
            else:
                parts.clear()
        if length > most:
            problem = f"the request body is longer than {most} bytes"
            raise ApiError(413, problem, headers={"Connection": "close"})
        return b"".join(parts)


async def _hung_up(receive: Receive) -> ClientGone:
    while (await receive())["type"] != "http.disconnect":
        pass
    return ClientGone()
