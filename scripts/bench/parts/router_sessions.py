"""What sticky sessions are worth to the prefix cache, with two real vLLM generators.

Conversations of several turns: each turn's prompt is the one before, what was sampled, and a new question, so all but
the question can be in the cache of the generator that served the last turn. Two routers in front of the same two
generators, one sticky, one round robin, work off the same conversations in turns; their prompts differ by contender
and round, so that no cache helps anybody but its own. Prompts are long and answers short: prefill is most of the work,
as it is for agents that read tool results.

The hit rate is vLLM's own count, as completions report it: prompt tokens whose KV was in the cache ÷ prompt tokens.
`most` is what it would be if everything but the questions were there (whole blocks are kept, so a little less can
be). With two generators round robin has hits too: whoever served the turn before the last one has most of the history.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from parts.fleet import POLICY, fleet

from titan_rl.actors.router_client import RouterClient
from titan_rl.generation.config import GeneratorConfig
from titan_rl.routing.config import RouterConfig
from titan_rl.types import Completion, GenerationRequest, SamplingParams

CONVERSATIONS, TURNS = 24, 6
QUESTION_TOKENS = 128
ANSWER_TOKENS = (16, 48)
"""Least and most; different lengths keep the sessions from moving in step, in which round robin would be sticky."""
LENGTH = 2048

STRATEGIES = {"sticky_session": 0, "round_robin": 1}
"""And the part of the prompts' seed that is a strategy's own."""


class Run(NamedTuple):
    """One strategy's work on one set of conversations."""

    hit_rate: float
    most: float
    tokens_per_second: float  # sampled
    seconds: float


async def converse(router: RouterClient, strategy: str, number: int, session: int) -> list[Completion]:
    random = np.random.default_rng((STRATEGIES[strategy], number, session))
    lengths = np.random.default_rng((number, session)).integers(*ANSWER_TOKENS, TURNS, endpoint=True)  # alike for all
    session_id = f"{strategy}-{number}-{session}"
    history = np.zeros(0, np.int32)
    completions = []
    for turn, length in enumerate(lengths.tolist()):
        question = random.integers(2, 13, QUESTION_TOKENS).astype(np.int32)
        request = GenerationRequest(
            request_id=f"{session_id}-{turn}",
            prompt_token_ids=np.concatenate([history, question]),
            sampling=SamplingParams(max_new_tokens=length),
            seed=int(random.integers(2**62)),
            session_id=session_id,
        )
        completion = await router.generate(request)
        history = np.concatenate([request.prompt_token_ids, completion.token_ids])
        completions.append(completion)
    return completions


async def work(router: RouterClient, strategy: str, number: int) -> Run:
    started = time.perf_counter()
    sessions = await asyncio.gather(*(converse(router, strategy, number, index) for index in range(CONVERSATIONS)))
    seconds = time.perf_counter() - started
    completions = list(itertools.chain(*sessions))
    cached, read = (
        sum(each.metrics[name] for each in completions)
        for name in ("generation/cached_tokens", "generation/prompt_tokens")
    )
    most = 1 - len(completions) * QUESTION_TOKENS / read
    return Run(cached / read, most, sum(len(each.token_ids) for each in completions) / seconds, seconds)


async def measure_prefix_cache(rounds: int) -> tuple[list[list[Any]], dict[str, Any]]:
    """Rows for people (strategy, hit rate, tokens/s, seconds) and figures."""
    config = GeneratorConfig(
        count=2, max_model_len=LENGTH, max_num_batched_tokens=2 * LENGTH, max_num_seqs=CONVERSATIONS, block_size=32
    )
    runs: dict[str, list[Run]] = {strategy: [] for strategy in STRATEGIES}
    async with fleet(config, replace(POLICY, max_length=LENGTH)) as up:
        routers = {strategy: up.router(strategy, RouterConfig(strategy=strategy)) for strategy in STRATEGIES}
        publication = up.checkpoint.publish()
        for router in routers.values():
            await router.pull_model_state_dict(publication)
        for number in range(rounds + 1):  # the first round warms everything up
            for strategy in list(STRATEGIES)[:: 1 if number % 2 else -1]:
                run = await work(routers[strategy], strategy, number)
                if number:
                    runs[strategy].append(run)
            print(f"(c) round {number} of {rounds} done", flush=True)

    def median(strategy: str, what: str) -> float:
        return statistics.median(getattr(run, what) for run in runs[strategy])

    pairs = zip(runs["sticky_session"], runs["round_robin"], strict=True)
    worth = statistics.median(sticky.tokens_per_second / other.tokens_per_second for sticky, other in pairs)
    most = median("sticky_session", "most")
    figures: dict[str, Any] = {"prefix_cache_rounds": rounds, "prefix_cache_hit_rate_most": round(most, 3)}
    for strategy in STRATEGIES:
        figures |= {
            f"prefix_cache_hit_rate_{strategy}": round(median(strategy, "hit_rate"), 3),
            f"prefix_cache_tokens_per_second_{strategy}": round(median(strategy, "tokens_per_second")),
        }
    figures["prefix_cache_sticky_to_round_robin"] = round(worth, 3)
    ratios = {"sticky_session": worth, "round_robin": 1.0}
    parts = ("hit_rate", "tokens_per_second", "seconds")
    rows = [[strategy, *(median(strategy, part) for part in parts), ratio] for strategy, ratio in ratios.items()]
    return rows, figures
