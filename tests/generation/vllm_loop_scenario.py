"""What every rank of test_vllm_loop does: one engine loop over vLLM, built as a generator builds it, at TP 1 or TP 2.

Rank 0 drives it (swaps, caches, damaged weights, random calls after which every request is served again, alone) and
returns facts. The other ranks follow.
"""

from __future__ import annotations

import dataclasses
import os
import random
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loop_harness import LONG_PROMPT, PROMPT, Collector, make_request
from safetensors.torch import load_file

from titan_rl.errors import GeneratorNotServing, WeightsError
from titan_rl.generation.config import GeneratorConfig
from titan_rl.generation.engine import StepOutput
from titan_rl.generation.engine_loop import EngineLoop
from titan_rl.generation.vllm.engine import VllmEngine
from titan_rl.types import Completion, GenerationRequest, PolicyVersion
from titan_rl.weights.manifest import TIED, Publication, TensorShard
from titan_rl.weights.publisher import SharedMemoryPublisher
from titan_rl.weights.segment_files import segment_at

BOUND = 120.0
SCORED = LONG_PROMPT[::-1]
SKIPPED_BY_ONE = 9
"""Incarnation of versions of which the last rank leaves out a tensor."""
SKIPPED = "model.layers.1.mlp.down_proj.weight"
OPERATIONS = 120
WEIGHTS = 4
PACE_SECONDS = 0.05
"""Longest pause between two calls; it only decides how they fall among the engine's steps."""

built: list[HeldEngine] = []
"""In this process."""


def held_engine(config: GeneratorConfig, model_path: Path, device: str) -> HeldEngine:
    built.append(HeldEngine(config, model_path, device))
    return built[-1]


class HeldEngine(VllmEngine):
    """An engine that stops after a number of steps until it is let go, so that calls come at a known moment."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._hold_in: int | None = None
        self._held = threading.Semaphore(0)
        self._go = threading.Semaphore(0)
        self._stepped = threading.Condition()
        self._steps = 0

    def hold_in(self, steps: int) -> None:
        """Call it before the engine steps, or while it is held."""
        self._hold_in = steps

    def wait_until_held(self) -> None:
        assert self._held.acquire(timeout=BOUND)

    def let_go(self) -> None:
        self._go.release()

    def let_steps_pass(self, steps: int, at_most: float) -> None:
        """Give the engine time for some steps; an idle one takes none."""
        with self._stepped:
            target = self._steps + steps
            self._stepped.wait_for(lambda: self._steps >= target, timeout=at_most)

    def step(self) -> StepOutput:
        output = super().step()
        with self._stepped:
            self._steps += 1
            self._stepped.notify_all()
        if self._hold_in is not None:
            self._hold_in -= 1
            if self._hold_in == 0:
                self._hold_in = None
                self._held.release()
                assert self._go.acquire(timeout=BOUND)
        return output

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]], version: PolicyVersion) -> None:
        if version.incarnation == SKIPPED_BY_ONE and os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
            tensors = [(name, tensor) for name, tensor in tensors if name != SKIPPED]
        super().load_weights(tensors, version)


class Loop:
    """An engine loop, and what rank 0 pulls: named sets of weights in shared memory, published once each."""

    def __init__(self, models: dict[str, str], *, keep_prefix_cache: bool = False) -> None:
        self.collector = Collector()
        self.loop = EngineLoop(
            GeneratorConfig(
                max_model_len=64,
                max_num_seqs=16,
                kv_cache_bytes=64 << 20,
                tensor_parallel=int(os.environ["WORLD_SIZE"]),
                heartbeat_seconds=0.2,
                keep_prefix_cache=keep_prefix_cache,
                engine="vllm_loop_scenario:held_engine",
            ),
            rank=int(os.environ["RANK"]),
            model_path=Path(models["tied_a"]),
            device="cpu",
            on_completions=self.collector.add,
            on_pieces=self.collector.add_pieces,
            on_fatal=self.collector.errors.put,
        )
        self.loop.start().result(timeout=BOUND)
        self.engine = built[-1]
        self._scratch = tempfile.TemporaryDirectory()
        self._publisher = SharedMemoryPublisher(
            channel="policy", rank=0, group=None, max_live=64, directory=Path(self._scratch.name)
        )
        self._published: dict[str, Publication] = {}
        self._steps = 0
        self.weights_of: dict[int, str] = {}
        """Which set each version stands for."""
        if os.environ["RANK"] == "0":
            self._weights = load_file(Path(models["tied_a"]) / "model.safetensors")
            self.publish("tied_a", self._weights)
            self.publish("tied_b", load_file(Path(models["tied_b"]) / "model.safetensors"))

    def publish(self, name: str, tensors: dict[str, torch.Tensor]) -> Publication:
        """A set of weights of its own, in a segment of its own."""
        shards = [TensorShard.whole(each, tensor) for each, tensor in tensors.items()]
        version = PolicyVersion(0, len(self._published))
        self._published[name] = self._publisher.publish(version, shards, dtype=torch.float32, aliases=TIED)
        return self._published[name]

    def publish_perturbed(self, name: str, seed: int) -> Publication:
        """The weights "tied_a", every matrix a little different."""
        chance = torch.Generator().manual_seed(seed)
        tensors = {
            each: tensor + 0.3 * tensor.std() * torch.randn(tensor.shape, generator=chance)
            if tensor.dim() == 2
            else tensor
            for each, tensor in self._weights.items()
        }
        return self.publish(name, tensors)

    def pull_next(self, weights: str) -> Future[PolicyVersion]:
        """Pull a published set as the next version."""
        version = PolicyVersion(0, self._steps)
        self._steps += 1
        self.weights_of[version.encode()] = weights
        return self.loop.pull(dataclasses.replace(self._published[weights], version=version))

    def serve(self, *requests: GenerationRequest) -> dict[str, Completion]:
        assert self.loop.submit(requests) == [None] * len(requests)
        names = [request.request_id for request in requests]
        return dict(zip(names, self.collector.wait_for(*names), strict=True))

    def close(self) -> None:
        self.loop.close().result(timeout=BOUND)
        self._scratch.cleanup()


def replay(this: Loop, prompt: tuple[int, ...], completion: Completion) -> tuple[np.ndarray, np.ndarray]:
    """Every token of a greedy completion again, each from one prefill under the weights of its version."""
    tokens, logprobs = np.zeros_like(completion.token_ids), np.zeros_like(completion.logprobs)
    for version in np.unique(completion.versions):
        pulled = this.pull_next(this.weights_of[int(version)]).result(timeout=BOUND)
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
    for seed in range(3):
        this.publish_perturbed(f"swap{seed}", 100 + seed)
    this.pull_next("swap0").result(timeout=BOUND)
    prompts = {f"long{index}": (*PROMPT, 2 + index, 5) for index in range(3)}
    this.engine.hold_in(5)
    this.loop.submit([make_request(name, prompt=prompt, new=40, temperature=0.0) for name, prompt in prompts.items()])
    for weights in ("swap1", "tied_b", "swap2", "swap0"):
        this.engine.wait_until_held()
        this.pull_next(weights)
        if weights != "swap0":
            this.engine.hold_in(7)
        this.engine.let_go()
    completions = this.collector.wait_for(*prompts)
    return [
        (completion, *replay(this, prompt, completion))
        for prompt, completion in zip(prompts.values(), completions, strict=True)
    ]


def prefix_cache(this: Loop) -> dict[str, Any]:
    """A long prompt twice, a pull with one request running, and the prompt once more."""
    this.pull_next("tied_a").result(timeout=BOUND)

    def cached(name: str) -> float:
        return this.serve(make_request(name, prompt=LONG_PROMPT, new=2))[name].metrics["generation/cached_tokens"]

    facts: dict[str, Any] = {"before": [cached("cold"), cached("warm")]}
    this.engine.hold_in(10)
    this.loop.submit([make_request("through", new=40, temperature=0.0)])
    this.engine.wait_until_held()
    request = this.engine.llm_engine.engine_core.engine_core.scheduler.requests["through"]
    pull = this.pull_next("tied_b")
    this.engine.let_go()
    pull.result(timeout=BOUND)
    (through,) = this.collector.wait_for("through")
    facts["preemptions"] = request.num_preemptions
    facts["after"] = cached("after")
    facts["through"] = (through, *replay(this, PROMPT, through))
    return facts


def damaged_weights(this: Loop) -> dict[str, dict[str, Any]]:
    """Each is pulled with a request in flight, and then followed by a whole one."""
    good = this.pull_next("tied_a").result(timeout=BOUND)
    facts = {}
    for name, spoil in DAMAGES.items():
        bad = spoil(this.publish_perturbed(name, 200))
        this.engine.hold_in(4)
        this.loop.submit([make_request(f"flying-{name}", new=40, seed=5)])
        this.engine.wait_until_held()
        pull = this.loop.pull(bad)
        this.loop.submit([make_request(f"waiting-{name}", min_version=(SKIPPED_BY_ONE, 99))])
        this.engine.let_go()
        found: dict[str, Any] = {"error": "", "refused": "", "good": good.encode()}
        try:
            pull.result(timeout=BOUND)
        except WeightsError as error:
            found["error"] = str(error)
        found["flying"], found["waiting"] = this.collector.wait_for(f"flying-{name}", f"waiting-{name}")
        try:
            this.loop.submit([make_request(f"refused-{name}")])
        except GeneratorNotServing as error:
            found["refused"] = str(error)
        good = this.pull_next("tied_a").result(timeout=BOUND)
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


def skip_on_one_rank(publication: Publication) -> Publication:
    return dataclasses.replace(publication, version=PolicyVersion(SKIPPED_BY_ONE, 0))


DAMAGES: dict[str, Callable[[Publication], Publication]] = {
    "flipped": flip_a_byte,
    "truncated": truncate,
    "missing": leave_out,
    "skipped": skip_on_one_rank,
}


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
    options["prompt_logprobs"] = len(prompt) % 3 == 0
    return make_request(name, prompt=prompt, new=new, seed=chance.getrandbits(62), **options)


def torture(this: Loop, seed: int) -> dict[str, Any]:
    """Random calls; then what is left in the engine, and what each request that saw one version gets alone."""
    chance = random.Random(seed)
    engine, loop = this.engine, this.loop
    weights = [f"torture{seed}.{number}" for number in range(WEIGHTS)]
    for number, name in enumerate(weights):
        this.publish_perturbed(name, 1000 * (seed + 1) + number)
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
    leaks = {
        "requests of the engine": engine.running(),
        "requests of vLLM": tuple(scheduler.requests),
        "unfinished": scheduler.has_unfinished_requests(),
        "KV blocks": blocks.num_gpu_blocks - 1 - blocks.get_num_free_blocks(),  # one is never given out
    }
    by_weights: dict[str, list[str]] = {}
    for name, completion in completions.items():
        if len(versions := set(completion.versions.tolist())) == 1:
            by_weights.setdefault(this.weights_of[versions.pop()], []).append(name)
    alone = {}
    for each, names in by_weights.items():
        this.pull_next(each).result(timeout=BOUND)
        for name in names:
            (alone[name],) = this.serve(dataclasses.replace(requests[name], request_id=f"{name}-alone")).values()
    return {"calls": calls, "completions": completions, "leaks": leaks, "alone": alone}


def life(models: dict[str, str]) -> dict[str, Any]:
    """A generator's."""
    this = Loop(models)
    facts: dict[str, Any] = {}
    if os.environ["RANK"] == "0":
        facts["served"] = served(this)
        facts["swaps"] = several_swaps(this)
        facts["cache"] = prefix_cache(this)
        facts["damaged"] = damaged_weights(this)
        facts["torture"] = torture(this, seed=0)
    this.close()
    facts["errors"] = this.collector.errors.qsize()
    return facts


def short_life(models: dict[str, str]) -> dict[str, Any]:
    """That of one which serves, and keeps its KV through swaps."""
    this = Loop(models, keep_prefix_cache=True)
    facts: dict[str, Any] = {"served": served(this), "kept_cache": prefix_cache(this)}
    this.close()
    facts["errors"] = this.collector.errors.qsize()
    return facts


def served(this: Loop) -> dict[str, Completion]:
    this.pull_next("tied_a").result(timeout=BOUND)
    seeded = (make_request(f"seeded{index}", new=12 + index, seed=index) for index in range(6))
    completions = this.serve(make_request("whole", new=40, seed=5, top_logprobs=3), *seeded)
    for name in ("scored", "scored again"):
        completions |= this.serve(make_request(name, prompt=SCORED, top_logprobs=3, prompt_logprobs=True))
    return completions


def tortures(models: dict[str, str], seeds: list[int]) -> dict[str, Any]:
    """One engine, tortured again and again."""
    this = Loop(models)
    found = [torture(this, seed) for seed in seeds] if os.environ["RANK"] == "0" else []
    this.close()
    return {"tortures": found, "errors": this.collector.errors.qsize()}
