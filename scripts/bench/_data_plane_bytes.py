"""Part (a): bytes that pass through the controller and through the router for a sample, by the sample's length.

A whole small system. Every cycle plays groups, trains on them, releases them, publishes the new
weights and brings the generator to them, as the training loop does.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

from titan_rl.config import RunConfig
from titan_rl.config_registry import copy4
from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.generation.config import GeneratorConfig
from titan_rl.launch.process import prepare_controller
from titan_rl.launch.start import start
from titan_rl.policy.config import PolicyConfig, TinyPolicyConfig, TrainerConfig
from titan_rl.routing.config import RouterConfig
from titan_rl.types import GroupRequest, Purpose, SamplingParams
from titan_rl.weights.manifest import Publication

prepare_controller()
from _message_bytes import ROUTER_COUNTS, RouterCounts, counted  # noqa: E402

from titan_rl.controller.system import System  # noqa: E402

GROUPS, SAMPLES = 8, 4
"""Of a step. Few samples, because the longest ones take a trainer on a CPU seconds each; what a step costs besides its
samples weighs all the more."""
CYCLES = 1
"""Counted, after one that is not. The bytes of a step hardly change from one to the next."""
HERE = Path(__file__).resolve().parent
ENGINES = {"vllm": "vllm", "simulated": f"{HERE / '_endless_engine.py'}:endless"}


class Bytes(NamedTuple):
    """Of one sample."""

    controller: float
    router: float
    parts: dict[str, float]
    """Of the controller's, by what they were."""


def run_config(engine: str, longest: int, trainer_ranks: int) -> RunConfig:
    positions = longest + 16
    tiny = TinyPolicyConfig(dim=32, layers=1, heads=1, kv_heads=1, head_dim=32, ffn=32, max_length=positions)
    generator = GeneratorConfig(
        count=1,
        engine=ENGINES[engine],
        max_model_len=positions,
        max_num_batched_tokens=max(positions, 8192),
        kv_cache_bytes=64 << 20,
    )
    return dataclasses.replace(
        copy4(),
        policy=PolicyConfig(tiny=tiny),
        generator=generator,
        trainer=TrainerConfig(data_parallel=trainer_ranks, max_tokens_per_microbatch=max(positions, 4096)),
        # An engine that must not stop early cannot take up an interrupted request.
        router=RouterConfig(resume=False),
    )


async def measure_bytes(engine: str, lengths: tuple[int, ...], trainer_ranks: int = 1) -> dict[int, Bytes]:
    """By tokens sampled."""
    measured: dict[int, Bytes] = {}
    with tempfile.TemporaryDirectory() as scratch, counted() as counts:
        router = RouterCounts(Path(scratch))
        async with start(
            run_config(engine, max(lengths), trainer_ranks),
            imports=(str(HERE / "_message_bytes.py"),),
            log_directory=Path(scratch) / "logs",
        ) as system:
            publication = await system.trainer.push_model_state_dict()
            await system.router.pull_model_state_dict(publication)
            steps = itertools.count()
            for length in lengths:
                publication = await _cycle(system, length, next(steps), publication)
                before, routed_before = counts.copy(), router.total()
                for _ in range(CYCLES):
                    publication = await _cycle(system, length, next(steps), publication)
                parts = counts - before
                samples = CYCLES * GROUPS * SAMPLES
                measured[length] = Bytes(
                    controller=parts.total() / samples,
                    router=(router.total() - routed_before) / samples,
                    parts={name: round(nbytes / samples, 1) for name, nbytes in parts.most_common()},
                )
                print(f"(a) {engine}, {length} tokens: {measured[length]}", flush=True)
        del os.environ[ROUTER_COUNTS]
    return measured


async def _cycle(system: System, length: int, step: int, before: Publication) -> Publication:
    """One step on new groups, all of whose samples have `length` sampled tokens; returns what it published."""
    requests = [
        GroupRequest(
            group_id=group_id,
            purpose=Purpose.TRAIN,
            samples=SAMPLES,
            sampling=SamplingParams(max_new_tokens=length, min_new_tokens=length),
            min_version=before.version,
        )
        for group_id in range(step * GROUPS, (step + 1) * GROUPS)
    ]
    reports = await system.rollouts.run_groups(requests)
    batch = SampleBatch.concat(report.samples for report in reports)
    if batch.trained_tokens != GROUPS * SAMPLES * length:
        raise RuntimeError(f"{batch.trained_tokens} tokens were sampled, not {GROUPS * SAMPLES} times {length}")
    await system.trainer.train_step(batch)
    await system.rollouts.release(batch)
    publication = await system.trainer.push_model_state_dict()
    await system.router.pull_model_state_dict(publication)
    await system.trainer.release(before)
    await system.router.fleet_status()
    return publication
