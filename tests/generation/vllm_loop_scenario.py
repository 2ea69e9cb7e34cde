"""What every rank of test_vllm_loop does: one engine loop over vLLM, at TP 1 or TP 2.

Rank 0 drives it and returns facts; the other ranks follow and return what they ended with.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import vllm_swap_scenario
from loop_harness import PROMPT, Collector, make_request
from safetensors.torch import load_file

from titan_rl.errors import GeneratorFailed, GeneratorNotServing, WeightsError
from titan_rl.generation.config import GeneratorConfig
from titan_rl.generation.engine import Engine, StepOutput
from titan_rl.generation.engine_loop import EngineLoop
from titan_rl.generation.lockstep import Lockstep, SoloChannel
from titan_rl.generation.rank import GlooChannel
from titan_rl.generation.vllm.engine import VllmEngine
from titan_rl.processes import RENDEZVOUS
from titan_rl.types import Completion, PolicyVersion
from titan_rl.weights.manifest import Publication, PullReport, TensorShard
from titan_rl.weights.publisher import SharedMemoryPublisher
from titan_rl.weights.puller import SharedMemoryReader, verify

BOUND = 120.0
DAMAGED = "damaged"
"""Channel of which the last rank leaves out a tensor."""
SKIPPED = "model.layers.1.mlp.down_proj.weight"


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


class StrayEngine(HeldEngine):
    """Samples a request with another seed from its sixth step on."""

    steps = 0

    def step(self) -> StepOutput:
        self.steps += 1
        if self.steps == 6:
            (request_id,) = self._sampling.seeds
            self._sampling.seeds[request_id] += 1
        return super().step()


class Loop:
    """An engine loop, and on rank 0 what it pulls: named sets of weights in shared memory, published once each."""

    def __init__(
        self, models: dict[str, str], engine: Callable[..., HeldEngine] = HeldEngine, *, keep_prefix_cache: bool = False
    ) -> None:
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.collector = Collector()
        self._gloo = GlooChannel(timeout_seconds=60.0) if self.world_size > 1 else None
        self.engine: HeldEngine | None = None
        self._reader = SharedMemoryReader()
        self._scratch = tempfile.TemporaryDirectory()
        self._publisher = SharedMemoryPublisher(
            channel="policy", rank=0, group=None, max_live=64, directory=Path(self._scratch.name)
        )
        self._published: dict[str, Publication] = {}
        self._steps = 0
        self.weights_of: dict[int, str] = {}
        """Which set each version stands for."""
        for name in ("tied_a", "tied_b") if self.rank == 0 else ():
            self.publish(name, load_file(Path(models[name]) / "model.safetensors"))
        config = GeneratorConfig(
            max_model_len=64,
            max_num_seqs=16,
            kv_cache_bytes=64 << 20,
            tensor_parallel=self.world_size,
            keep_prefix_cache=keep_prefix_cache,
        )

        channel = self._gloo or SoloChannel()

        def build() -> Lockstep:
            self.engine = engine(config, models["tied_a"])
            self.collector.lockstep = Lockstep(
                self.engine,
                rank=self.rank,
                channel=channel,
                load_publication=self._load,
                verify=self._verify,
                keep_cache=config.keep_prefix_cache,
            )
            return self.collector.lockstep

        self.loop = EngineLoop(
            build,
            rank=self.rank,
            world_size=self.world_size,
            burst_steps=4,
            heartbeat_seconds=0.2,
            channel=channel,
            on_completions=self.collector.add,
            on_pieces=self.collector.add_pieces,
            on_fatal=self.collector.errors.put,
        )
        self.loop.start().result(timeout=BOUND)

    def publish(self, name: str, tensors: dict[str, torch.Tensor]) -> Publication:
        """A set of weights of its own, in a segment of its own."""
        shards = [
            TensorShard(name=each, data=tensor, global_shape=tuple(tensor.shape), offset=(0,) * tensor.dim())
            for each, tensor in tensors.items()
        ]
        self._published[name] = self._publisher.publish(
            PolicyVersion(0, len(self._published)),
            shards,
            dtype=torch.float32,
            aliases=(("lm_head.weight", "model.embed_tokens.weight"),),
        )
        return self._published[name]

    def perturbed(self, seed: int) -> dict[str, torch.Tensor]:
        """The weights "tied_a", every matrix a little different."""
        chance = torch.Generator().manual_seed(seed)
        tensors = self._reader.tensors(self._published["tied_a"])
        return {
            name: tensor + 0.3 * tensor.std() * torch.randn(tensor.shape, generator=chance)
            if tensor.dim() == 2
            else tensor
            for name, tensor in tensors
        }

    def pull(self, step: int, weights: str, channel: str = "policy") -> Future[PullReport]:
        """Pull a published set as version `step`."""
        version = PolicyVersion(0, step)
        self._steps = step + 1
        self.weights_of[version.encode()] = weights
        publication = dataclasses.replace(self._published[weights], version=version, channel=channel)
        return self.loop.pull(publication)

    def pull_next(self, weights: str) -> Future[PullReport]:
        """Pull a published set as the next version."""
        return self.pull(self._steps, weights)

    def serve(self, *requests: Any) -> dict[str, Completion]:
        assert self.loop.submit(requests) == [None] * len(requests)
        names = [request.request_id for request in requests]
        return dict(zip(names, self.collector.wait_for(*names), strict=True))

    def close(self) -> None:
        self.loop.close().result(timeout=BOUND)
        self.release()

    def release(self) -> None:
        """Give up the files."""
        self._scratch.cleanup()

    def _load(self, publication: Publication) -> Iterator[tuple[str, torch.Tensor]]:
        skips = publication.channel == DAMAGED and self.rank == self.world_size - 1
        for name, tensor in self._reader.tensors(publication):
            if not (skips and name == SKIPPED):
                yield name, tensor

    def _verify(self, publication: Publication, engine: Engine) -> int:
        return verify(publication, engine.served_shards(), self._gloo.group if self._gloo else None)


def lead(this: Loop) -> dict[str, Any]:
    loop, engine = this.loop, this.engine
    assert engine is not None
    facts: dict[str, Any] = {}

    early = [
        *(make_request(f"seeded{index}", new=12 + index, seed=index) for index in range(6)),
        make_request("greedy", new=24, temperature=0.0),
        make_request("joined-alone", new=8, seed=77),
    ]
    loop.submit(early)
    facts["answered_before_pull"] = list(this.collector.completions)
    facts["first_pull"] = this.pull(0, "tied_a").result(timeout=BOUND)
    facts["early"] = dict(
        zip(
            [request.request_id for request in early],
            this.collector.wait_for(*(r.request_id for r in early)),
            strict=True,
        )
    )
    facts["whole"] = this.serve(make_request("whole", new=40, seed=5))["whole"]

    engine.hold_in(6)
    loop.submit([make_request("decoding", new=40, seed=5)])
    engine.wait_until_held()
    loop.submit([make_request("joined", new=8, seed=77)])
    engine.let_go()
    facts["decoding"], facts["joined"] = this.collector.wait_for("decoding", "joined")

    engine.hold_in(10)
    loop.submit([make_request("same-weights", new=40, seed=5)])
    engine.wait_until_held()
    same = this.pull(1, "tied_a")
    engine.let_go()
    facts["same_pull"] = same.result(timeout=BOUND)
    (facts["same_weights"],) = this.collector.wait_for("same-weights")

    engine.hold_in(10)
    loop.submit([make_request("swapped", new=40, temperature=0.0), make_request("to-abort", new=40, seed=5)])
    engine.wait_until_held()
    hot = this.pull(2, "tied_b")
    loop.abort(["to-abort"])
    engine.let_go()
    facts["hot_pull"] = hot.result(timeout=BOUND)
    facts["swapped"], facts["aborted"] = this.collector.wait_for("swapped", "to-abort")
    kept = [int(token) for token in facts["swapped"].token_ids[facts["swapped"].versions == 1]]
    oracle = make_request("oracle", prompt=[*PROMPT, *kept], new=40 - len(kept), temperature=0.0)
    facts["oracle"] = this.serve(oracle)["oracle"]

    engine.hold_in(4)
    loop.submit([make_request("flying", new=40, seed=5)])
    engine.wait_until_held()
    bad = this.pull(3, "tied_a", DAMAGED)
    engine.let_go()
    try:
        bad.result(timeout=BOUND)
    except WeightsError as error:
        facts["bad_pull"] = str(error)
    (facts["flying"],) = this.collector.wait_for("flying")
    try:
        loop.submit([make_request("refused")])
    except GeneratorNotServing as error:
        facts["refused"] = str(error)
    facts["repaired_pull"] = this.pull(3, "tied_a").result(timeout=BOUND)
    facts["repaired"] = this.serve(make_request("repaired", new=40, seed=5))["repaired"]
    return facts


def one_life(models: dict[str, str], seed: int) -> dict[str, Any]:
    this = Loop(models)
    facts: dict[str, Any] = {}
    if this.rank == 0:
        facts = lead(this)
        facts["swaps"] = vllm_swap_scenario.several_swaps(this)
        facts["stream"] = vllm_swap_scenario.streamed_through_a_swap(this)
        facts["cache"] = vllm_swap_scenario.prefix_cache(this)
        facts["corrupted"] = vllm_swap_scenario.corrupted_publications(this)
        facts["torture"] = vllm_swap_scenario.torture(this, seed)
    this.close()
    facts["end"] = this.collector.digest
    facts["errors"] = this.collector.errors.qsize()
    return facts


def stray_draw(models: dict[str, str]) -> dict[str, Any]:
    """One draw too many on the last rank. Its process exits with the error, as a generator's does."""
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    this = Loop(models, StrayEngine if last else HeldEngine)
    facts: dict[str, Any] = {}
    if this.rank == 0:
        this.pull(0, "tied_a").result(timeout=BOUND)
        this.loop.submit([make_request("doomed", new=50, seed=5)])
        facts["steps_with_equal_tokens"] = 5
    try:
        facts["fatal"] = repr(this.collector.errors.get(timeout=BOUND))
    except queue.Empty:
        facts["fatal"] = ""
    facts["steps"] = getattr(this.engine, "steps", 0)
    this.release()
    if this.rank == 0:
        facts["answered"] = sorted(this.collector.completions)
        try:
            this.loop.submit([make_request("late")])
        except GeneratorFailed as error:
            facts["late"] = str(error)
    return facts


def kept_cache(models: dict[str, str]) -> dict[str, Any]:
    this = Loop(models, keep_prefix_cache=True)
    facts = vllm_swap_scenario.prefix_cache(this)
    this.close()
    return facts


def tortures(models: dict[str, str], seeds: list[int]) -> dict[str, Any]:
    """One engine, tortured again and again."""
    this = Loop(models)
    facts: dict[str, Any] = {}
    if this.rank == 0:
        facts["tortures"] = [vllm_swap_scenario.torture(this, seed) for seed in seeds]
    this.close()
    return facts | {"end": this.collector.digest, "errors": this.collector.errors.qsize()}


def lives(models: dict[str, str]) -> dict[str, Any]:
    facts = {"first": one_life(models, seed=0)}
    if int(os.environ["WORLD_SIZE"]) > 1:
        os.environ[RENDEZVOUS] += ".second"
        facts["stray"] = stray_draw(models)
    else:
        facts["kept_cache"] = kept_cache(models)
    return facts
