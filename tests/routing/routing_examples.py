"""Requests, completions and small fleets for the tests of routing."""

from __future__ import annotations

import itertools

import numpy as np

from titan_rl.routing.config import RouterConfig
from titan_rl.routing.dispatcher import Dispatcher
from titan_rl.routing.health import Fleet
from titan_rl.routing.strategies import RoutingStrategy
from titan_rl.support import Supports
from titan_rl.types import Completion, FinishReason, GenerationRequest, PolicyVersion, SamplingParams

V0, V1, V2, V3 = (PolicyVersion(0, step) for step in range(4))

_tokens = itertools.count(1000)


def request(
    request_id: str,
    *,
    prompt: int = 3,
    budget: int = 5,
    session: str | None = None,
    at_least: PolicyVersion = V0,
    seed: int = 7,
    stop: tuple[int, ...] = (),
    exact: PolicyVersion | None = None,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=np.arange(prompt, dtype=np.int32),
        sampling=SamplingParams(max_new_tokens=budget, stop_token_ids=stop),
        seed=seed,
        min_version=exact or at_least,
        session_id=session,
        exact_version=exact,
    )


def completion(
    attempt: GenerationRequest,
    sampled: int,
    reason: FinishReason = FinishReason.ABORT,
    *,
    version: PolicyVersion = V0,
    generator: str = "g0",
) -> Completion:
    """What an engine answers after so many tokens, every second of which was forced. No token occurs twice in one test
    run: each is its own name."""
    tokens = np.fromiter(itertools.islice(_tokens, sampled), np.int32, sampled)
    return Completion(
        request_id=attempt.request_id,
        token_ids=tokens,
        logprobs=-tokens.astype(np.float32),
        versions=np.full(sampled, version.encode(), np.int64),
        supports=Supports.of({place: tokens[place : place + 1] for place in range(0, sampled, 2)}, 0, sampled),
        finish_reason=reason,
        generator=generator,
        metrics={"generation/seconds_in_engine": 1.0, "generation/prompt_tokens": float(len(attempt.prompt_token_ids))},
    )


def comes_to_serve(fleet: Fleet, name: str, version: PolicyVersion = V0) -> None:
    """A generator drains, pulls and serves."""
    fleet[name].sync(version)
    fleet[name].verified(version)


def serving(strategy: RoutingStrategy, count: int, *, resume: bool = True) -> tuple[Fleet, Dispatcher]:
    """`g0` … that all serve v0."""
    fleet = Fleet(strategy)
    for index in range(count):
        fleet.join(f"g{index}")
        comes_to_serve(fleet, f"g{index}")
    return fleet, Dispatcher(strategy, fleet, RouterConfig(resume=resume))
