"""The HTTP app and its server: any program that speaks one of the dialects can talk to the policy.

    key → caller (access/) → body → Call (dialect) → prompts → engines → choices (sampling) → body or events (dialect)

- A call ends its engine work: answered, refused, failed, or aborted because its client hung up.
- Nothing that a client sends is a 500: a 4xx says what is wrong with it before anything is sent to an engine.

A dialect is a folder beside `openai/`: the bodies that it takes, the `Call` that each one is, and how deltas, choices
and errors are written.
"""

from __future__ import annotations

import asyncio

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from titan_rl.errors import ActorFailed, TitanError
from titan_rl.gateway.access.callers import ApiKeys, RolloutKeys, unless
from titan_rl.gateway.access.middleware import CALLER, CallMiddleware
from titan_rl.gateway.address import listen
from titan_rl.gateway.calls import Fleet, ServedPolicy
from titan_rl.gateway.config import GatewayConfig
from titan_rl.gateway.errors import ApiError, api_error
from titan_rl.gateway.metrics import GatewayMetrics
from titan_rl.gateway.openai.routes import error_object, routes
from titan_rl.gateway.responses import JsonResponse
from titan_rl.gateway.sampling import Sampler

SERVING = "serving"
"""The state of a generator that takes requests (`routing.fleet.GeneratorState.SERVING`)."""
PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"
BACKLOG = 2048
"""Connections that may wait to be accepted."""
IDLE_SECONDS = 75
"""A connection without a call stays open so long: agents think, and run tools, between two calls."""
CLOSE_SECONDS = 1
"""Calls that are open when the server is closed may take so long to finish; then they are cut off and aborted."""
MOST_HEADER_BYTES = 64 << 10
"""Of one call; a longer one is answered 400. httptools, uvicorn's other parser, takes any number of bytes, and costs
the gateway 6 % less CPU."""


def build_app(config: GatewayConfig, fleet: Fleet, policy: ServedPolicy, keys: ApiKeys) -> FastAPI:
    """The app, for any ASGI server."""
    app = FastAPI(title="titan_rl gateway", docs_url=None, redoc_url=None)
    metrics = GatewayMetrics()
    app.include_router(routes(Sampler(fleet, policy, metrics, max_choices=config.max_choices)))

    @app.get("/health")
    async def health(request: Request) -> Response:
        """200 while a generator serves."""
        members = await unless(fleet.fleet_status(), request.scope[CALLER].ended)
        if any(member.state == SERVING for member in members):
            states = {member.name: {"state": member.state, "version": member.version} for member in members}
            return JsonResponse({"status": "serving", "generators": states})
        reasons = [f"{each.name} is {each.state}{each.last_error and f': {each.last_error}'}" for each in members]
        raise ApiError(503, f"no generator serves: {'; '.join(reasons)}", code="engine_unavailable")

    @app.get("/metrics")
    async def prometheus(request: Request) -> Response:
        """Counters and gauges for Prometheus."""
        members = await unless(fleet.fleet_status(), request.scope[CALLER].ended)
        return Response(metrics.exposition(members), media_type=PROMETHEUS_TEXT)

    async def refused(request: Request, error: Exception) -> Response:
        return refusal(error)

    for kind in (ApiError, TitanError, RequestValidationError, HTTPException, RecursionError, Exception):
        app.add_exception_handler(kind, refused)  # the server logs the traceback of what is a bug
    app.add_middleware(
        CallMiddleware,
        keys=keys,
        metrics=metrics,
        paths=frozenset(path for route in app.routes if (path := getattr(route, "path", "")) and "{" not in path),
        max_body_bytes=config.max_body_bytes,
        refusal=refusal,
    )
    return app


def refusal(error: Exception) -> Response:
    """Every answer that is no success."""
    told = api_error(error)
    return JsonResponse(error_object(told), status_code=told.status, headers=told.headers)


class GatewayServer:
    """Runs in the event loop in which it is made, from then on."""

    def __init__(self, config: GatewayConfig, fleet: Fleet, policy: ServedPolicy, *, run_seed: int) -> None:
        """
        Args:
            run_seed: the run's seed; only sessions sample by it.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        listener = listen(config.host, config.port, backlog=BACKLOG)
        host, port = listener.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        """Without `/v1`."""
        self.keys = (
            RolloutKeys(policy, base_url=f"{self.url}/v1", run_seed=run_seed)
            if config.sessions
            else ApiKeys(policy, config.api_key)
        )
        self._server = uvicorn.Server(
            uvicorn.Config(
                build_app(config, fleet, policy, self.keys),
                http="h11",
                h11_max_incomplete_event_size=MOST_HEADER_BYTES,
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                backlog=BACKLOG,
                timeout_keep_alive=IDLE_SECONDS,
                timeout_graceful_shutdown=CLOSE_SECONDS,
            )
        )
        self._running = asyncio.get_running_loop().create_task(self._server.serve(sockets=[listener]))

    @property
    def sessions(self) -> RolloutKeys:
        """Where `GatewayConfig.sessions` is on."""
        assert isinstance(self.keys, RolloutKeys)
        return self.keys

    async def ended(self) -> None:
        """Returns when the server was closed. Raises ActorFailed when it ended by itself."""
        await asyncio.wait([self._running])
        if not self._server.should_exit:
            error = None if self._running.cancelled() else self._running.exception()
            raise ActorFailed(f"the HTTP server ended by itself: {error or 'no error'}")

    async def close(self) -> None:
        """Take no more calls, end all sessions, and abort what is open; clients are told so."""
        self.keys.end_all()
        self._server.should_exit = True
        await asyncio.wait([self._running])
