"""Part (a): what the router costs a request, against calling the generator actor itself.

One real `Generator` actor whose engine is simulated and takes no time, so that messages are all there is. The same
clients, with the same batching of a tick's requests, talk to its rank 0 and to a router in front of it, in turns.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any, NamedTuple

from _fleet import SECONDS, fleet, make_request

from titan_rl.actors.router_client import RouterClient
from titan_rl.generation.config import GeneratorConfig
from titan_rl.types import GenerationRequest

NEW_TOKENS = 1
"""As few as can be: a simulated token is not free either."""


class Concurrency(NamedTuple):
    clients: int
    requests_each: int
    """In one round."""


CONCURRENCIES = (Concurrency(1, 300), Concurrency(64, 120), Concurrency(1024, 12))


class Run(NamedTuple):
    """One round of one contender."""

    requests_per_second: float
    latency: float  # seconds, median over its requests


async def closed_loop(client: RouterClient, requests: list[list[GenerationRequest]]) -> Run:
    """Every client sends its next request when it has the answer to the one before."""
    latencies: list[float] = []

    async def one(own: list[GenerationRequest]) -> None:
        for request in own:
            sent = time.perf_counter()
            await client.generate(request)
            latencies.append(time.perf_counter() - sent)

    started = time.perf_counter()
    await asyncio.gather(*(one(own) for own in requests))
    return Run(len(latencies) / (time.perf_counter() - started), statistics.median(latencies))


async def measure_overhead(rounds: int) -> tuple[list[list[Any]], dict[str, Any]]:
    """Rows for people (concurrent, requests/s of both, ratio, ms of both) and figures."""
    runs: dict[tuple[int, str], list[Run]] = {}
    config = GeneratorConfig(count=1, engine="simulated", max_model_len=256, max_num_seqs=1024)
    async with fleet(config) as up:
        router = up.router("router", up.config.router)
        await router.pull_model_state_dict(up.checkpoint.publish())
        clients = {
            "direct": RouterClient(up.generators["generator0"], seconds=SECONDS, name="generator0"),
            "router": RouterClient(router.actor, seconds=SECONDS, name="router"),
        }
        for number in range(rounds + 1):  # the first round warms everything up
            for clients_at_once, each in CONCURRENCIES:
                # Who goes first changes: what one leaves behind (garbage, a warm cache) meets both.
                for name in ("direct", "router") if number % 2 else ("router", "direct"):
                    requests = [
                        [
                            make_request(f"{name}-{number}-{client}-{turn}", new_tokens=NEW_TOKENS, seed=(client, turn))
                            for turn in range(each)
                        ]
                        for client in range(clients_at_once)
                    ]
                    run = await closed_loop(clients[name], requests)
                    if number:
                        runs.setdefault((clients_at_once, name), []).append(run)
            print(f"(a) round {number} of {rounds} done", flush=True)
        for client in clients.values():
            await client.disconnect()

    rows: list[list[Any]] = []
    figures: dict[str, Any] = {"overhead_rounds": rounds}
    for n, _ in CONCURRENCIES:
        direct, routed = runs[n, "direct"], runs[n, "router"]
        pairs = list(zip(routed, direct, strict=True))
        ratio = statistics.median(r.requests_per_second / d.requests_per_second for r, d in pairs)
        added = statistics.median(r.latency - d.latency for r, d in pairs) * 1e3
        speeds = [statistics.median(run.requests_per_second for run in by) for by in (direct, routed)]
        latencies = [statistics.median(run.latency for run in by) * 1e3 for by in (direct, routed)]
        figures |= {
            f"throughput_ratio_{n}": round(ratio, 3),
            f"latency_added_ms_{n}": round(added, 3),
            f"requests_per_second_direct_{n}": round(speeds[0]),
            f"requests_per_second_router_{n}": round(speeds[1]),
        }
        rows.append([str(n), *(f"{speed:,.0f}" for speed in speeds), f"{ratio:.3f}", *latencies, f"{added:+.2f}"])
    return rows, figures
