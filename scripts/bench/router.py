"""What the router costs, what a change of weights costs under load, and how well requests are spread.

    python scripts/bench/router.py [--only overhead weight_sync prefix_cache replacement scale]

(a) latency and throughput through the router against calling the generator actor itself. Its engine is simulated and
    takes no time, so that messages are all there is; the same clients, with the same batching of a tick's requests,
    talk to its rank 0 and to a router in front of it;
(b) throughput under regular changes of weights, by hot swap, drain and rolling drain. Two real vLLM generators (TP 1, a
    policy of 3.2M parameters) have one router per mode. In each turn the same clients work off the same requests of 64
    to 128 tokens, while every `SYNC_EVERY_SECONDS` new weights are published and pulled, but in the mode "no sync";
(c) what sticky sessions are worth to the prefix cache of two real vLLM generators;
(d) throughput of four simulated generators while one of them is killed and replaced;
(e) CPU of the router per request and per publication in front of up to 256 generators.

Contenders take turns, so that a change of the machine's speed hits all of them; ratios are medians over rounds. Read
them as ratios only: client, router and generators share the machine's cores, with whatever else runs there.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from parts.fleet import POLICY, SECONDS, Checkpoint, fleet, make_request
from parts.replacement import measure_replacement
from parts.router_scale import measure_scale
from parts.router_sessions import CONVERSATIONS, TURNS, measure_prefix_cache
from parts.table import print_report, print_table

from titan_rl.actors.router_client import RouterClient
from titan_rl.generation.config import GeneratorConfig
from titan_rl.routing.config import RouterConfig
from titan_rl.types import Completion, GenerationRequest

OVERHEAD_TOKENS = 1
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
                            make_request(
                                f"{name}-{number}-{client}-{turn}", new_tokens=OVERHEAD_TOKENS, seed=(client, turn)
                            )
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


SYNC_EVERY_SECONDS = 2.0
"""From one publication to the next; the next waits until the pull of the one before has ended."""
CLIENTS = 64
REQUESTS = 320
"""In one turn; a turn takes several publications."""
NEW_TOKENS = (64, 128)

MODES = {
    "no_sync": RouterConfig(),
    "hot_swap": RouterConfig(weight_sync="hot_swap"),
    "drain": RouterConfig(weight_sync="drain"),
    "rolling_drain": RouterConfig(weight_sync="drain", max_syncing=1),
}


@dataclass(slots=True)
class Turn:
    """One mode's work on one set of requests."""

    tokens_per_second: float
    two_versions: int
    """Completions whose tokens are of more than one version."""
    pull_seconds: list[float] = field(default_factory=list)
    """Of each publication: until no generator was on its way to it any more."""


def requests_of(mode: str, round_number: int) -> Iterator[GenerationRequest]:
    """The same for every mode of a round, but for the ids."""
    lengths = np.random.default_rng(round_number).integers(*NEW_TOKENS, REQUESTS, endpoint=True)
    for index, length in enumerate(lengths.tolist()):
        yield make_request(f"{mode}-{round_number}-{index}", new_tokens=length, seed=(round_number, index))


async def publish_regularly(router: RouterClient, checkpoint: Checkpoint, pull_seconds: list[float]) -> None:
    """Until it is cancelled between two publications."""
    due = time.perf_counter() + SYNC_EVERY_SECONDS
    while True:
        await asyncio.sleep(due - time.perf_counter())
        due = max(due, time.perf_counter()) + SYNC_EVERY_SECONDS
        started = time.perf_counter()
        await router.pull_model_state_dict(checkpoint.publish())
        pull_seconds.append(time.perf_counter() - started)


async def one_turn(mode: str, router: RouterClient, checkpoint: Checkpoint, round_number: int) -> Turn:
    await router.pull_model_state_dict(checkpoint.publish())  # the routers of other modes have brought newer weights
    requests = requests_of(mode, round_number)
    completions: list[Completion] = []
    pull_seconds: list[float] = []

    async def client() -> None:
        for request in requests:  # all clients take from one list
            completions.append(await router.generate(request))

    async def work() -> float:
        started = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        return time.perf_counter() - started

    if mode == "no_sync":
        seconds = await work()
    else:
        seconds = await beside(work(), publish_regularly(router, checkpoint, pull_seconds))
    tokens = sum(len(completion.token_ids) for completion in completions)
    asked = sum(request.sampling.max_new_tokens for request in requests_of(mode, round_number))
    if tokens != asked:
        raise RuntimeError(f"{mode}: {tokens} tokens instead of {asked}")
    mixed = sum(len(np.unique(completion.versions)) > 1 for completion in completions)
    return Turn(tokens / seconds, mixed, pull_seconds)


async def beside(work: Any, background: Any) -> float:
    """What `work` returns; `background` goes on meanwhile, and its failure ends both."""
    working, behind = asyncio.ensure_future(work), asyncio.ensure_future(background)
    await asyncio.wait({working, behind}, return_when=asyncio.FIRST_COMPLETED)
    if behind.done():
        working.cancel()
        await behind
    behind.cancel()
    await asyncio.wait({behind})
    return await working


async def measure_weight_sync(rounds: int) -> tuple[list[list[Any]], dict[str, Any]]:
    """Rows for people (mode, tokens/s, ratio to no sync, publications, seconds of one, mixed completions), figures."""
    turns: dict[str, list[Turn]] = {mode: [] for mode in MODES}
    settings = GeneratorConfig(count=2, max_model_len=POLICY.max_length, max_num_seqs=CLIENTS)
    print("(b) building two vLLM engines …", flush=True)
    async with fleet(settings) as up:
        routers = {mode: up.router(f"router-{mode}", config) for mode, config in MODES.items()}
        order = list(MODES)
        for number in range(rounds + 1):  # the first round warms everything up
            for mode in order:
                turn = await one_turn(mode, routers[mode], up.checkpoint, number)
                if number:
                    turns[mode].append(turn)
            order = [*order[1:], order[0]]
            print(f"(b) round {number} of {rounds} done", flush=True)

    rows: list[list[Any]] = []
    figures: dict[str, Any] = {
        "sync_every_seconds": SYNC_EVERY_SECONDS,
        "sync_rounds": rounds,
        "sync_load": f"{CLIENTS} clients, {REQUESTS} requests of {NEW_TOKENS[0]} to {NEW_TOKENS[1]} tokens",
    }
    still = [turn.tokens_per_second for turn in turns["no_sync"]]
    figures["tokens_per_second_no_sync"] = round(statistics.median(still))
    for mode, of_mode in turns.items():
        speeds = [turn.tokens_per_second for turn in of_mode]
        ratio = statistics.median(speed / reference for speed, reference in zip(speeds, still, strict=True))
        pulls = list(itertools.chain.from_iterable(turn.pull_seconds for turn in of_mode))
        pull_seconds = statistics.median(pulls) if pulls else 0.0
        mixed = sum(turn.two_versions for turn in of_mode)
        if mode != "no_sync":
            figures |= {
                f"throughput_{mode}": round(ratio, 3),
                f"pull_seconds_{mode}": round(pull_seconds, 3),
                f"publications_{mode}": len(pulls),
                f"completions_of_two_versions_{mode}": mixed,
            }
        share = f"{mixed} of {REQUESTS * len(of_mode)}"
        rows.append([mode, f"{statistics.median(speeds):,.0f}", f"{ratio:.3f}", len(pulls), pull_seconds, share])
    return rows, figures


HEADERS: dict[str, tuple[str, Sequence[str]]] = {
    "overhead": (
        "(a) one generator, engine of service time 0: directly and through the router",
        ["concurrent", "direct req/s", "router req/s", "ratio", "direct ms", "router ms", "added ms"],
    ),
    "weight_sync": (
        f"(b) two vLLM generators, new weights every {SYNC_EVERY_SECONDS:g} s",
        ["mode", "tokens/s", "÷ no sync", "pulls", "seconds each", "of two versions"],
    ),
    "prefix_cache": (
        f"(c) {CONVERSATIONS} conversations of {TURNS} turns on two vLLM generators",
        ["strategy", "prefix-cache hit rate", "tokens/s", "seconds", "÷ round robin"],
    ),
    "replacement": (
        "(d) one of four simulated generators is killed under load, and replaced",
        ["generators", "tokens/s", "seconds", "÷ expected"],
    ),
    "scale": (
        "(e) the router's CPU by the number of generators, which answer at once",
        ["generators", "requests per message", "µs per request", "ms per publication", "÷ generators", "wall ms"],
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(HEADERS), default=list(HEADERS), help="parts to run")
    parser.add_argument("--overhead-rounds", type=int, default=9)
    parser.add_argument("--sync-rounds", type=int, default=4)
    parser.add_argument("--cache-rounds", type=int, default=4)
    parser.add_argument("--window", type=float, default=15.0, help="seconds of each part of the replacement")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    tables: list[tuple[str, list[list[Any]]]] = []
    for part in options.only:
        match part:
            case "overhead":
                rows, found = asyncio.run(measure_overhead(options.overhead_rounds))
            case "weight_sync":
                rows, found = asyncio.run(measure_weight_sync(options.sync_rounds))
            case "replacement":
                rows, found = asyncio.run(measure_replacement(options.window))
            case "scale":
                rows, found = asyncio.run(measure_scale())
            case _:
                rows, found = asyncio.run(measure_prefix_cache(options.cache_rounds))
        tables.append((part, rows))
        figures |= found
    for part, rows in tables[:-1]:
        print_table(*HEADERS[part], rows)
    last, rows = tables[-1]
    print_report(*HEADERS[last], rows, figures)


if __name__ == "__main__":
    main()
