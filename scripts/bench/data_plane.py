"""What samples by reference cost the controller: bytes in its messages per sample, by the sample's length.

    python scripts/bench/data_plane.py [--longest 16000]

`controller_bytes_per_sample_<tokens>`: every argument and result that is serialised in the controller's process during
whole steps (groups played, samples trained and released, weights published and pulled), by the tokens that were sampled
for a sample. The engine is a simulated one, which samples any length at once; 16 and 256 tokens
are also sampled by vLLM (`…_vllm`), which changes nothing of the messages but the numbers that engines report.
`controller_bytes_per_sample` is the largest of all. `…_2_ranks`: two trainer ranks, each is told of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from parts.table import print_report

from titan_rl.config import RunConfig
from titan_rl.config_registry import copy4
from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.generation.config import GeneratorConfig
from titan_rl.policy.config import PolicyConfig, TinyPolicyConfig, TrainerConfig
from titan_rl.routing.config import RouterConfig
from titan_rl.run.start import start
from titan_rl.supervision.process import prepare_controller
from titan_rl.types import GroupRequest, Purpose, SamplingParams
from titan_rl.weights.manifest import Publication

prepare_controller()
from parts.message_bytes import counted  # noqa: E402

from titan_rl.loop.system import System  # noqa: E402

GROUPS, SAMPLES = 8, 4
"""Of a step. Few samples, because the longest ones take a trainer on a CPU seconds each; what a step costs besides its
samples weighs all the more."""
CYCLES = 1
"""Counted, after one that is not. The bytes of a step hardly change from one to the next."""
HERE = Path(__file__).resolve().parent
ENGINES = {"vllm": "vllm", "simulated": f"{HERE / 'parts' / 'simulated.py'}:endless"}


class Bytes(NamedTuple):
    """Of one sample."""

    controller: float
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
        async with start(
            run_config(engine, max(lengths), trainer_ranks), log_directory=Path(scratch) / "logs"
        ) as system:
            publication = await system.trainer.push_model_state_dict()
            await system.router.pull_model_state_dict(publication)
            steps = itertools.count()
            for length in lengths:
                publication = await _cycle(system, length, next(steps), publication)
                before = counts.copy()
                for _ in range(CYCLES):
                    publication = await _cycle(system, length, next(steps), publication)
                parts = counts - before
                samples = CYCLES * GROUPS * SAMPLES
                measured[length] = Bytes(
                    controller=parts.total() / samples,
                    parts={name: round(nbytes / samples, 1) for name, nbytes in parts.most_common()},
                )
                print(f"{engine}, {length} tokens: {measured[length]}", flush=True)
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


SYSTEMS = (
    ("simulated", (16, 256, 4096, 16_000), 1, ""),
    ("vllm", (16, 256), 1, "_vllm"),
    ("simulated", (16,), 2, "_2_ranks"),
)
"""Engine, lengths, trainer ranks, and what their figures end with."""


async def measure_systems(longest: int) -> tuple[list[list[Any]], dict[str, Any]]:
    """Rows for people, and figures."""
    rows: list[list[Any]] = []
    figures: dict[str, Any] = {}
    for engine, lengths, ranks, suffix in SYSTEMS:
        lengths = tuple(length for length in lengths if length <= longest)
        for length, measured in (await measure_bytes(engine, lengths, ranks)).items():
            rows.append([f"{length:,}", engine, ranks, measured.controller])
            figures[f"controller_bytes_per_sample_{length}{suffix}"] = round(measured.controller, 1)
    worst = max(value for name, value in figures.items() if name.startswith("controller"))
    return rows, figures | {"controller_bytes_per_sample": worst}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longest", type=int, default=16_000, help="tokens; longer samples are left out")
    rows, figures = asyncio.run(measure_systems(parser.parse_args().longest))
    header = ["tokens sampled", "engine", "trainer ranks", "controller"]
    print_report("bytes per sample in messages of the controller", header, rows, figures)


if __name__ == "__main__":
    main()
