"""The HTTP app: any program that speaks one of the dialects can talk to the policy.

    key → caller (access/) → body → Call (dialect) → prompts → engines → choices (sampling) → body or events (dialect)

- A call ends its engine work: answered, refused, failed, or aborted because its client hung up.
- Nothing that a client sends is a 500: a 4xx says what is wrong with it before anything is sent to an engine.

A dialect is a folder beside `openai/`: the bodies that it takes, the `Call` that each one is, and how deltas, choices
and errors are written.
"""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from titan_rl.errors import TitanError
from titan_rl.gateway.access.callers import ApiKeys, unless
from titan_rl.gateway.access.middleware import CALLER, CallMiddleware
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

    for kind in (ApiError, TitanError, RequestValidationError, HTTPException, Exception):
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
