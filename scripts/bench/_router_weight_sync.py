"""Part (b): throughput that a change of weights costs under load, by the way the weights change.

Two real vLLM generators (TP 1, a policy of 3.2M parameters) and one router per mode in front of the same two, used in
turns. In each turn the same clients work off the same requests while every `SYNC_EVERY_SECONDS` new weights are
published and pulled; in the mode "no sync" they are not. Requests have 64 to 128 new tokens, so that they do not end
all at once.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from _fleet import POLICY, Checkpoint, fleet, make_request

from titan_rl.actors.router_client import RouterClient
from titan_rl.generation.config import GeneratorConfig
from titan_rl.routing.config import RouterConfig
from titan_rl.types import Completion, GenerationRequest

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
