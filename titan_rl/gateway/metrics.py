"""What the gateway counts, in Prometheus' text format. Each gateway has a registry of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from titan_rl.gateway.fleet import Member
from titan_rl.gateway.openai.errors import CLIENT_GONE

PREFIX = "titan_rl_gateway"
SECONDS_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


class GatewayMetrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        registry = self._registry
        self.calls = Counter(f"{PREFIX}_calls", "HTTP calls by path and status.", ["path", "status"], registry=registry)
        self.seconds = Histogram(
            f"{PREFIX}_call_seconds",
            "From a call's headers to its answer's end.",
            ["path"],
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self.open = Gauge(f"{PREFIX}_open_calls", "HTTP calls without a finished answer.", registry=registry)
        self.prompt_tokens = Counter(
            f"{PREFIX}_prompt_tokens", "Tokens of prompts that were answered.", registry=registry
        )
        self.completion_tokens = Counter(
            f"{PREFIX}_completion_tokens", "Sampled tokens that were handed out.", registry=registry
        )
        self.unheard = Counter(
            f"{PREFIX}_unheard_options",
            "Sampling options of a rollout's program that were not used: the run decides how the policy samples.",
            ["option"],
            registry=registry,
        )

        def of_generators(name: str, what: str, *labels: str) -> Gauge:
            return Gauge(f"{PREFIX}_generator_{name}", what, ["generator", *labels], registry=registry)

        self._in_flight = of_generators("in_flight", "Requests that a generator runs.")
        self._served = of_generators("served", "Completions that a generator finished.")
        self._failed = of_generators("failed", "Attempts on a generator that failed.")
        self._state = of_generators("state", "1 for the state that it is in.", "state")

    def exposition(self, fleet: Sequence[Member]) -> bytes:
        """Everything, with the fleet as it is now."""
        self._state.clear()
        for member in fleet:
            self._in_flight.labels(member.name).set(member.in_flight)
            self._served.labels(member.name).set(member.served)
            self._failed.labels(member.name).set(member.failed)
            self._state.labels(member.name, member.state).set(1)
        return generate_latest(self._registry)


class Counted:
    """ASGI middleware: counts every call, also those that are refused before the app sees them."""

    def __init__(self, app: ASGIApp, *, metrics: GatewayMetrics, paths: frozenset[str]) -> None:
        """
        Args:
            paths: those of the app; calls of any other are counted together.
        """
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else "other"
        status = CLIENT_GONE
        started = time.perf_counter()

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._metrics.open.inc()
        try:
            await self._app(scope, receive, watched)
        except Exception:
            status = 500  # what is around this one answers so
            raise
        finally:
            self._metrics.open.dec()
            self._metrics.calls.labels(path, str(status)).inc()
            self._metrics.seconds.labels(path).observe(time.perf_counter() - started)
