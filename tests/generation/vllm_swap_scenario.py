"""What rank 0 of test_vllm_loop does with an engine loop over vLLM: swaps, streams, caches, bad publications, and
random calls, after which every request is served again, alone."""

from __future__ import annotations

import dataclasses
import os
import random
from typing import TYPE_CHECKING, Any

import numpy as np
from loop_harness import PROMPT, make_request

from titan_rl.errors import GeneratorNotServing, WeightsError
from titan_rl.types import Completion, GenerationRequest, Piece
from titan_rl.weights.manifest import Publication
from titan_rl.weights.segment_files import segment_at

if TYPE_CHECKING:
    from vllm_loop_scenario import Loop

BOUND = 120.0
LONG_PROMPT = tuple(2 + index * 7 % 11 for index in range(40))
"""Longer than a KV block, so that the prefix cache has something to keep."""


def replay(this: Loop, prompt: tuple[int, ...], completion: Completion) -> tuple[np.ndarray, np.ndarray]:
    """Every token of a greedy completion again, each from one prefill under the weights of its version."""
    tokens, logprobs = np.zeros_like(completion.token_ids), np.zeros_like(completion.logprobs)
    for version in np.unique(completion.versions):
        pulled = this.pull_next(this.weights_of[int(version)]).result(timeout=BOUND).version
        positions = np.flatnonzero(completion.versions == version)
        answers = this.serve(
            *(
                make_request(
                    f"{completion.request_id}-{pulled}-{position}",
                    prompt=[*prompt, *completion.token_ids[:position].tolist()],
                    new=1,
                    temperature=0.0,
                )
                for position in positions
            )
        )
        for position, answer in zip(positions, answers.values(), strict=True):
            tokens[position], logprobs[position] = answer.token_ids[0], answer.logprobs[0]
    return tokens, logprobs


def several_swaps(this: Loop) -> list[tuple[Completion, np.ndarray, np.ndarray]]:
    """Greedy requests that live through four swaps, and what their replay gives."""
    engine = this.engine
    assert engine is not None
    for seed in range(3):
        this.publish(f"swap{seed}", this.perturbed(100 + seed))
    this.pull_next("swap0").result(timeout=BOUND)
    prompts = {f"long{index}": (*PROMPT, 2 + index, 5) for index in range(3)}
    engine.hold_in(5)
    this.loop.submit([make_request(name, prompt=prompt, new=40, temperature=0.0) for name, prompt in prompts.items()])
    for weights in ("swap1", "tied_b", "swap2", "swap0"):
        engine.wait_until_held()
        this.pull_next(weights)
        if weights != "swap0":
            engine.hold_in(7)
        engine.let_go()
    completions = this.collector.wait_for(*prompts)
    return [
        (completion, *replay(this, prompt, completion))
        for prompt, completion in zip(prompts.values(), completions, strict=True)
    ]


def streamed_through_a_swap(this: Loop) -> tuple[list[Piece], list[Piece], Completion]:
    """What was handed out before the swap, all that was handed out, and the completion."""
    engine = this.engine
    assert engine is not None
    this.pull_next("tied_a").result(timeout=BOUND)
    engine.hold_in(9)
    stream = dataclasses.replace(make_request("stream", new=40, seed=5), stream_from=0)
    this.loop.submit([stream, make_request("beside", new=30, seed=6)])
    # The decision that is held hands nothing out; those before it have.
    engine.wait_until_held()
    before = this.collector.wait_for_pieces("stream", 4)
    pull = this.pull_next("tied_b")
    engine.let_go()
    pull.result(timeout=BOUND)
    completion, _ = this.collector.wait_for("stream", "beside")
    assert list(this.collector.pieces) == ["stream"], "nobody else asked for pieces"
    return before, this.collector.pieces["stream"], completion


def prefix_cache(this: Loop) -> dict[str, Any]:
    """A long prompt twice, a pull with one request running, and the prompt once more."""
    engine = this.engine
    assert engine is not None
    this.pull_next("tied_a").result(timeout=BOUND)

    def cached(name: str) -> float:
        return this.serve(make_request(name, prompt=LONG_PROMPT, new=2))[name].metrics["cached_tokens"]

    facts: dict[str, Any] = {"before": [cached("cold"), cached("warm")]}
    engine.hold_in(10)
    this.loop.submit([make_request("through", new=40, temperature=0.0)])
    engine.wait_until_held()
    request = engine.llm_engine.engine_core.engine_core.scheduler.requests["through"]
    pull = this.pull_next("tied_b")
    engine.let_go()
    facts["in_flight"] = pull.result(timeout=BOUND).requests_in_flight
    (through,) = this.collector.wait_for("through")
    facts["preemptions"] = request.num_preemptions
    facts["after"] = cached("after")
    facts["through"] = (through, *replay(this, PROMPT, through))
    return facts


def corrupted_publications(this: Loop) -> dict[str, dict[str, Any]]:
    """Each is pulled with a request in flight, and then followed by a whole one."""
    engine, loop = this.engine, this.loop
    assert engine is not None
    good = this.pull_next("tied_a").result(timeout=BOUND).version
    facts = {}
    for name, spoil in {"flipped": flip_a_byte, "truncated": truncate, "missing": leave_out}.items():
        bad = spoil(this.publish(name, this.perturbed(200)))
        bad = dataclasses.replace(bad, version=good._replace(step=good.step + 1))
        engine.hold_in(4)
        loop.submit([make_request(f"flying-{name}", new=40, seed=5)])
        engine.wait_until_held()
        pull = loop.pull(bad)
        loop.submit([make_request(f"waiting-{name}", min_version=bad.version)])
        engine.let_go()
        found: dict[str, Any] = {"error": "", "refused": "", "good": good.encode()}
        try:
            pull.result(timeout=BOUND)
        except WeightsError as error:
            found["error"] = str(error)
        found["flying"], found["waiting"] = this.collector.wait_for(f"flying-{name}", f"waiting-{name}")
        try:
            loop.submit([make_request(f"refused-{name}")])
        except GeneratorNotServing as error:
            found["refused"] = str(error)
        good = this.pull_next("tied_a").result(timeout=BOUND).version
        found["next"] = good.encode()
        found["served"] = this.serve(make_request(f"served-{name}", new=40, seed=5))[f"served-{name}"]
        facts[name] = found
    return facts


def flip_a_byte(publication: Publication) -> Publication:
    entry = publication.manifest.entries[len(publication.manifest.entries) // 2]
    with open(segment_at(publication.location), "r+b") as segment:
        segment.seek(entry.offset + entry.nbytes // 2)
        (byte,) = segment.read(1)
        segment.seek(-1, os.SEEK_CUR)
        segment.write(bytes([byte ^ 1]))
    return publication


def truncate(publication: Publication) -> Publication:
    os.truncate(segment_at(publication.location), publication.manifest.nbytes // 2)
    return publication


def leave_out(publication: Publication) -> Publication:
    manifest = publication.manifest
    kept = tuple(entry for entry in manifest.entries if entry.name != "model.layers.0.mlp.down_proj.weight")
    assert len(kept) == len(manifest.entries) - 1
    return dataclasses.replace(publication, manifest=dataclasses.replace(manifest, entries=kept))


if TYPE_CHECKING:
    from vllm_loop_scenario import Loop

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
