"""What the gateway counts, in Prometheus' text format. Each gateway has a registry of its own."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from titan_rl.gateway.calls import Member

SECONDS_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


class GatewayMetrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"titan_rl_gateway_{name}", what, labels, registry=self._registry)

        def gauge(name: str, what: str, *labels: str) -> Gauge:
            return Gauge(f"titan_rl_gateway_{name}", what, labels, registry=self._registry)

        self.calls = counter("calls", "HTTP calls by path and status.", "path", "status")
        self.open = gauge("open_calls", "HTTP calls without a finished answer.")
        self.seconds = Histogram(
            "titan_rl_gateway_call_seconds",
            "From a call's headers to its answer's end.",
            ["path"],
            buckets=SECONDS_BUCKETS,
            registry=self._registry,
        )
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts that were answered.")
        self.completion_tokens = counter("completion_tokens", "Sampled tokens that were handed out.")
        self.ignored_options = counter(
            "ignored_options",
            "Sampling options of a rollout's program that were not used: the run decides how the policy samples.",
            "option",
        )
        self._in_flight = gauge("generator_in_flight", "Requests that a generator runs.", "generator")
        self._served = gauge("generator_served", "Completions that a generator finished.", "generator")
        self._failed = gauge("generator_failed", "Attempts on a generator that failed.", "generator")
        self._state = gauge("generator_state", "1 for the state that it is in.", "generator", "state")

    def exposition(self, fleet: Sequence[Member]) -> bytes:
        """Everything, with the fleet as it is now."""
        self._state.clear()
        for member in fleet:
            self._in_flight.labels(member.name).set(member.in_flight)
            self._served.labels(member.name).set(member.served)
            self._failed.labels(member.name).set(member.failed)
            self._state.labels(member.name, member.state).set(1)
        return generate_latest(self._registry)
