"""Random admissions, aborts, cancels and pulls through an engine loop over vLLM, then every request again, alone."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING, Any

from generation_examples import make_request

from titan_rl.types import Completion, GenerationRequest

if TYPE_CHECKING:
    from vllm_loop_scenario import Loop

BOUND = 120.0
OPERATIONS = 200
WEIGHTS = 4
PACE_SECONDS = 0.05
"""Longest pause between two calls; it only decides how they fall among the engine's steps."""


def random_request(chance: random.Random, name: str, common: list[int]) -> GenerationRequest:
    """Prompts share prefixes, so that the prefix cache is used."""
    prompt = common[: chance.randint(0, 40)] + [chance.randint(2, 12) for _ in range(chance.randint(1, 6))]
    new = chance.randint(1, 16)
    options: dict[str, Any] = {"temperature": chance.choice([0.0, 0.7, 1.0, 1.5])}
    if chance.random() < 0.3:
        options["top_k"] = 3
    if chance.random() < 0.3:
        options |= {"stop_token_ids": (chance.randint(2, 12),), "min_new_tokens": chance.randint(0, new)}
    if chance.random() < 0.3:
        options |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.3}
    return make_request(name, prompt=prompt, new=new, seed=chance.getrandbits(62), **options)


def torture(this: Loop, seed: int) -> dict[str, Any]:
    chance = random.Random(seed)
    engine, loop = this.engine, this.loop
    assert engine is not None
    weights = [f"torture{seed}.{number}" for number in range(WEIGHTS)]
    for number, name in enumerate(weights):
        this.publish(name, this.perturbed(1000 * (seed + 1) + number))
    this.pull_next(weights[0]).result(timeout=BOUND)
    common = [chance.randint(2, 12) for _ in range(40)]
    requests: dict[str, GenerationRequest] = {}
    calls = dict.fromkeys(("admit", "abort", "cancel", "pull"), 0)
    pulls = []

    def admit() -> GenerationRequest:
        name = f"torture{seed}.{len(requests)}"
        requests[name] = random_request(chance, name, common)
        return requests[name]

    for _ in range(OPERATIONS):
        call = chance.choices(list(calls), weights=[6, 2, 2, 2])[0]
        calls[call] += 1
        match call:
            case "admit":
                assert not any(loop.submit([admit() for _ in range(chance.randint(1, 3))]))
            case "abort":
                loop.abort([*chance.sample(list(requests)[-6:], k=min(2, len(requests))), "unknown"])
            case "cancel":
                request = admit()
                assert not any(loop.submit([request]))
                engine.let_steps_pass(chance.choice([0, 1]), PACE_SECONDS)
                loop.abort([request.request_id])
            case "pull":
                pulls.append(this.pull_next(chance.choice(weights)))
        engine.let_steps_pass(chance.choice([0, 0, 1, 2, 4]), PACE_SECONDS)
    completions = dict(zip(requests, this.collector.wait_for(*requests), strict=True))
    for pull in pulls:
        pull.result(timeout=BOUND)
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    blocks = scheduler.kv_cache_manager.block_pool
    facts: dict[str, Any] = {
        "calls": calls,
        "completions": completions,
        "leaks": {
            "requests of the engine": engine.running(),
            "requests of vLLM": tuple(scheduler.requests),
            "unfinished": scheduler.has_unfinished_requests(),
            "KV blocks": blocks.num_gpu_blocks - 1 - blocks.get_num_free_blocks(),  # one is never given out
        },
    }
    facts["alone"] = alone(this, requests, completions)
    return facts


def alone(
    this: Loop, requests: dict[str, GenerationRequest], completions: dict[str, Completion]
) -> dict[str, Completion]:
    """Every request that saw one version, again, with nobody else there, under the weights of that version."""
    by_weights: dict[str, list[str]] = {}
    for name, completion in completions.items():
        versions = set(completion.versions.tolist())
        if len(versions) == 1:
            by_weights.setdefault(this.weights_of[versions.pop()], []).append(name)
    again = {}
    for weights, names in by_weights.items():
        this.pull_next(weights).result(timeout=BOUND)
        for name in names:
            request = dataclasses.replace(requests[name], request_id=f"{name}-alone")
            (again[name],) = this.serve(request).values()
    return again
