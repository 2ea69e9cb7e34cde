"""The HTTP app and its server: any program that speaks one of the dialects can talk to the policy.

    key → caller → body → call (dialect) → prompts → engines → choices (sampling) → body or events (dialect)

- A call ends its engine work: answered, refused, failed, or, whatever it waits for, cancelled by a client's hang-up.
"""

import asyncio
import re
import resource
import uuid
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.datastructures import Headers, QueryParams
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from titan_rl.errors import ActorFailed, TitanError
from titan_rl.gateway import anthropic, gemini, openai_routes, responses
from titan_rl.gateway.answers import JsonResponse
from titan_rl.gateway.bodies import ERRORS, description
from titan_rl.gateway.callers import CALLER, ApiKeys, Caller, RolloutKeys, cancelled_by
from titan_rl.gateway.calls import ApiError, Fleet, ServedPolicy, api_error
from titan_rl.gateway.config import GatewayConfig, listen
from titan_rl.gateway.sampling import GatewayMetrics, Sampler
from titan_rl.metrics.activity import activity
from titan_rl.one_line import one_line

BACKLOG = 2048
IDLE_SECONDS = 75
"""A connection without a call stays open so long: agents think, and run tools, between two calls."""
CLOSE_SECONDS = 1
"""Calls that are open when the server is closed may take so long to finish; then they are cut off and aborted."""
HEAD_SECONDS = 10
"""A connection that takes longer to send the head of a call, from its opening or the head's first byte, is cut off."""
BODY_SECONDS = 120
"""A call may take so long to send its body; then it is answered 408."""
STALLED_SECONDS = 120
"""A client may leave what it is sent unread so long. Then it is cut off: nobody is at its other end."""
HEALTH_SECONDS = 10
"""`/health` waits so long for the router; then it answers 503, as load balancers do not wait for long."""
MOST_CONNECTIONS = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
"""With more, the oldest that has no call open is cut off, or the new one where all have. Without a limit, connections
could use up this process's descriptors."""
MOST_HEADER_BYTES = 64 << 10
"""Of one call, its path among them; a longer one is answered 400."""
HEAD_TOO_LONG = f"the head of the call is longer than {MOST_HEADER_BYTES} bytes"
OPEN_PATHS = ("/health",)
"""What anybody may ask: load balancers have no key."""
CLIENT_GONE = 499
"""Status under which a call is counted whose client hung up before it was answered; nobody reads it."""
HARMLESS_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""A client's own `x-request-id` that is given back to it; any other is replaced."""
MOST_DISCARDED = 64 << 20
"""Bytes of a body past its limit that are read and thrown away: a client reads no answer before it has sent its body.
After that it is cut off."""


def build_app(config: GatewayConfig, fleet: Fleet, policy: ServedPolicy, keys: ApiKeys) -> FastAPI:
    app = FastAPI(title="titan_rl gateway", docs_url=None, redoc_url=None, responses=ERRORS)
    metrics = GatewayMetrics()
    sampler = Sampler(fleet, policy, metrics, max_choices=config.max_choices)
    for dialect in (openai_routes, responses, anthropic, gemini):
        app.include_router(dialect.routes(sampler))

    @app.get("/health")
    async def health(request: Request) -> Response:
        """200 while a generator serves. Only callers with a key are told why none does: that names paths and hosts."""
        known, problem = keys.caller(api_key(request.scope)) is not None, "no generator serves"
        try:
            async with asyncio.timeout(HEALTH_SECONDS), cancelled_by(request.scope[CALLER].ended):
                members = await fleet.fleet_status()
            if any(member.state.serves for member in members):
                states = {member.name: {"state": member.state, "version": member.version} for member in members}
                return JsonResponse({"status": "serving", "generators": states})
            causes = [f": {each.last_error}" if each.last_error and known else "" for each in members]
            reasons = (f"{each.name} is {each.state}{cause}" for each, cause in zip(members, causes, strict=True))
            problem = f"{problem}: {'; '.join(reasons)}"
        except TimeoutError:
            problem = f"the router did not answer within {HEALTH_SECONDS} s"
        except ActorFailed:
            if known:
                raise
        raise ApiError(503, problem, code="engine_unavailable")

    @app.get("/metrics", response_class=PlainTextResponse)
    async def prometheus(request: Request) -> Response:
        """Counters and gauges for Prometheus."""
        async with cancelled_by(request.scope[CALLER].ended):
            members = await fleet.fleet_status()
        return Response(metrics.exposition(members), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def refused(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code in (404, 405):
            headers = error.headers or {}
            problem = f"it takes {headers['Allow']}" if "Allow" in headers else "there is no such path"
            asked = one_line(f"{request.method} {request.url.path}", 200)
            problem = f"{asked}: {problem}; /openapi.json says what there is"
            error = ApiError(error.status_code, problem, headers=headers)
        return refusal(error, request.url.path)

    for kind in (ApiError, TitanError, RequestValidationError, HTTPException, RecursionError):
        app.add_exception_handler(kind, refused)
    app.openapi = lambda: description(app)  # type: ignore[method-assign]
    named = (getattr(route, "path", "").replace("{model:path}", policy.name) for route in app.routes)
    paths, most = frozenset(path for path in named if "{" not in path), config.max_body_bytes
    app.add_middleware(CallMiddleware, keys=keys, metrics=metrics, paths=paths, max_body_bytes=most)
    if config.cors_origins:
        allowed: dict[str, Any] = {"allow_origins": config.cors_origins, "allow_methods": ["*"], "allow_headers": ["*"]}
        app.add_middleware(CORSMiddleware, **allowed, expose_headers=["x-request-id"])
    return app


def refusal(error: Exception, path: str) -> Response:
    """Every answer that is no success, in the form of the path's dialect."""
    shown = api_error(error)
    dialect = next((each for each in (anthropic, gemini) if each.PATHS.match(path)), openai_routes)
    return JsonResponse(dialect.error_object(shown), status_code=shown.status, headers=shown.headers)


def api_key(scope: Scope) -> str:
    """Empty where a call has none. The case of the header's scheme does not matter (RFC 9110)."""
    headers = Headers(scope=scope)
    scheme, _, key = headers.get("authorization", "").partition(" ")
    key = key if scheme.lower() == "bearer" else ""
    key = key or headers.get("x-api-key", "") or headers.get("x-goog-api-key", "")
    return key or QueryParams(scope["query_string"]).get("key", "")


class GatewayServer:
    """Runs in the event loop in which it is made, from then on."""

    def __init__(self, config: GatewayConfig, fleet: Fleet, policy: ServedPolicy, *, run_seed: int) -> None:
        """`run_seed`: only rollouts sample by it. Raises ConfigError: the address cannot be listened on."""
        listener = listen(config.host, config.port, backlog=BACKLOG)
        host, port = listener.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        """Without `/v1`."""
        self.keys = ApiKeys(policy, config.api_key)
        if config.rollout_keys:
            self.keys = RolloutKeys(policy, base_url=f"{self.url}/v1", run_seed=run_seed)
        options: dict[str, Any] = {"ws": "none", "log_config": None, "access_log": False, "lifespan": "off"}
        options |= {"backlog": BACKLOG, "timeout_keep_alive": IDLE_SECONDS, "timeout_graceful_shutdown": CLOSE_SECONDS}
        app = build_app(config, fleet, policy, self.keys)
        self._server = uvicorn.Server(uvicorn.Config(app, http=BoundedConnection, **options))
        self._running = asyncio.get_running_loop().create_task(self._server.serve(sockets=[listener]))

    @property
    def rollout_keys(self) -> RolloutKeys:
        """Where `GatewayConfig.rollout_keys` is on."""
        assert isinstance(self.keys, RolloutKeys)
        return self.keys

    async def ended(self) -> None:
        """Returns when the server was closed. Raises ActorFailed when it ended by itself."""
        await asyncio.wait([self._running])
        if not self._server.should_exit:
            error = None if self._running.cancelled() else self._running.exception()
            raise ActorFailed(f"the HTTP server ended by itself: {error or 'no error'}")

    async def close(self) -> None:
        """Take no more calls, end all rollouts, and abort what is open; clients are told so."""
        self.keys.end_all()
        self._server.should_exit = True
        await asyncio.wait([self._running])


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's, which takes heads of any length, waits for ever for one that does not come and for a client that does
    not read, and counts no connections without a call."""

    _until_head: asyncio.TimerHandle | None = None
    _until_read: asyncio.TimerHandle | None = None
    _head_bytes = 0  # of a head that is on its way

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._opened = self.loop.time()
        self._watch()
        if len(self.connections) > MOST_CONNECTIONS:
            waiting = (each for each in self.connections if isinstance(each, BoundedConnection) and each.waits)
            min(waiting, key=lambda each: each._opened).transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()
        self._head_bytes = self._head_bytes + len(data) if self.waits else 0
        if self._head_bytes > MOST_HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response(HEAD_TOO_LONG)

    def on_headers_complete(self) -> None:
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MOST_HEADER_BYTES:
            raise ValueError(HEAD_TOO_LONG)  # uvicorn answers it with a 400
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._until_read = self.loop.call_later(STALLED_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._until_read is not None:
            self._until_read.cancel()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        for timer in (self._until_head, self._until_read):
            if timer is not None:
                timer.cancel()

    @property
    def waits(self) -> bool:
        """Whether it has no call open."""
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        """Limit the time to the end of a head that is on its way."""
        if not self.waits and self._until_head is not None:
            self._until_head.cancel()
            self._until_head = None
        elif self.waits and self._until_head is None:
            self._until_head = self.loop.call_later(HEAD_SECONDS, self.transport.abort)


class ClientGone(Exception):
    """The client hung up; what it asked for was aborted."""


@dataclass(frozen=True, slots=True)
class CallMiddleware:
    """What every call passes before the app: its key, the size of its body, and the counters."""

    app: ASGIApp
    keys: ApiKeys
    metrics: GatewayMetrics
    paths: frozenset[str]
    """Those of the app; calls of any other are counted together."""
    max_body_bytes: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = CLIENT_GONE
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if HARMLESS_ID.fullmatch(given) else uuid.uuid4().hex

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        path = scope["path"] if scope["path"] in self.paths else "other"
        counted = self.metrics.open.track_inprogress(), self.metrics.seconds.labels(path).time()
        with counted[0], counted[1], activity("HTTP", path=path):
            try:
                await self._answer(scope, receive, watched)
            except ClientGone:
                status = CLIENT_GONE  # of a stream, too, which had begun with another
            except Exception as error:  # a bug: the server logs its traceback
                if status == CLIENT_GONE:
                    await refusal(error, scope["path"])(scope, receive, watched)
                status = 500
                raise
            finally:
                self.metrics.calls.labels(path, str(status)).inc()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            caller = self._caller(scope)
            with caller.call_open():
                try:
                    async with asyncio.timeout(BODY_SECONDS), cancelled_by(caller.ended):
                        wanted = scope["path"] not in OPEN_PATHS  # strangers could hold connections with endless bodies
                        body = await self._body(scope, receive) if wanted else b""
                except TimeoutError:
                    problem = f"the request body did not arrive within {BODY_SECONDS} s"
                    raise ApiError(408, problem, headers={"Connection": "close"}) from None
                _check_form(Headers(scope=scope), scope["method"])

                async def whole_body() -> Message:
                    return {"type": "http.request", "body": body, "more_body": False}

                gone = asyncio.ensure_future(_hung_up(receive))
                try:
                    async with cancelled_by(gone):
                        await self.app({**scope, CALLER: caller}, whole_body, send)
                finally:
                    gone.cancel()
        except (ApiError, TitanError) as error:
            await refusal(error, scope["path"])(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller:
        if scope["path"] in OPEN_PATHS:
            return self.keys.anybody
        caller = self.keys.caller(api_key(scope))
        if caller is None:
            ways = "`Authorization: Bearer KEY`, `x-api-key: KEY` or `x-goog-api-key: KEY`"
            problem = f"the API key is missing or wrong: send it as {ways}"
            headers = {"WWW-Authenticate": "Bearer", "Connection": "close"}
            raise ApiError(401, problem, code="invalid_api_key", headers=headers)
        return caller

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        most, told = self.max_body_bytes, int(Headers(scope=scope).get("content-length", 0))
        body, length, more = bytearray(), 0, True
        while more and max(length, told) <= most + MOST_DISCARDED:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part, more = message.get("body", b""), message.get("more_body", False)
            length += len(part)
            if length <= most:
                body += part
            else:
                body.clear()
        if max(length, told) > most:
            problem = f"the request body is longer than {most} bytes"
            raise ApiError(413, problem, headers={"Connection": "close"})
        return bytes(body)


def _check_form(headers: Headers, method: str) -> None:
    """Raises ApiError: the body is no plain JSON."""
    coding = headers.get("content-encoding", "identity")
    kind = headers.get("content-type", "").partition(";")[0].strip()
    if coding.lower() != "identity":
        problem = f"the body comes as content-encoding {coding!r}: send it as it is"
    elif method == "POST" and not re.fullmatch(r"application/([^/]*\+)?json", kind.lower()):
        problem = f"the body comes as content-type {kind!r}: send JSON, as application/json"
    else:
        return
    raise ApiError(400, one_line(problem, 200), code="invalid_request")


async def _hung_up(receive: Receive) -> ClientGone:
    while (await receive())["type"] != "http.disconnect":
        pass
    return ClientGone()
