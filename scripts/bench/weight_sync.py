"""How long new weights take from a trainer into a running vLLM engine, in units of one warm copy of the same bytes.

    python scripts/bench/weight_sync.py [--repetitions 15]

Each policy is measured in a process of its own with the environment of a generator: trainer-side tensors (float32,
one rank), a publisher, a reader and a real vLLM engine, one thread. Every repetition decodes a few steps of a batch,
times one warm copy, and then everything else, so that a change of the machine's speed hits all of them; figures are
medians over the repetitions. Every pull is a hot swap with requests in flight, is verified, and brings other weights
than the one before it.

`ratio_to_memcpy`: the copies alone, from the trainer's tensors to where readers find them and from there into memory of
the engine's size. `ratio_total`: publish with fingerprints, load where vLLM computes, drop the KV cache, verify what
the engine computes with. `units_pause`: the part of it in which the generator stands still. `gb_per_s`: published bytes
by the time of publish and load. `pause_steps`: the time between the last engine step before the pull and the first one
after it, by a decode step; what the requests in flight then recompute of their KV is `recompute_steps`. Figures without
a size are of 100M parameters.

Memory bounds it. A segment is recycled, so nothing is allocated; what is above the two copies is two passes over the
bytes for fingerprints, the publisher's on bytes that are still in the cache. The recomputed KV is not in it: that step
also samples, and is bound by arithmetic.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from parts.policies import POLICY_100M
from parts.table import print_report

from titan_rl.generation.config import GeneratorConfig, generator_environment
from titan_rl.policy.config import TinyPolicyConfig
from titan_rl.types import GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from parts.publishing_trainer import Trainer

    from titan_rl.generation.vllm.engine import VllmEngine

POLICIES = {"100M": POLICY_100M, "3M": TinyPolicyConfig(dim=256, layers=4, heads=8, kv_heads=4, head_dim=32, ffn=768)}
WARM_UP = 3
"""Repetitions that are not counted: both slots are made in them."""
FLOAT32_BYTES = 4
REQUESTS, PROMPT_TOKENS, DECODE_STEPS = 16, 8, 4
"""What is in flight when the weights change: requests, their prompts, and steps after the prefill."""
ROWS = {
    "memcpy": "one warm copy",
    "copy_in": "copy to where readers find it",
    "copy_out": "copy from there",
    "publish": "publish: copy + fingerprint",
    "load": "load where vLLM computes with it",
    "drop_cache": "drop the KV cache",
    "verify": "verify what vLLM computes with",
    "decode": "a decode step",
    "recompute": "first step after the pull",
}
COPIES, TOTAL, PAUSE = (
    ("copy_in", "copy_out"),
    ("publish", "load", "drop_cache", "verify"),
    ("load", "drop_cache", "verify"),
)


class Measured(NamedTuple):
    parameters: int
    seconds: dict[str, list[float]]
    """Of each row, by repetition."""

    def units(self, rows: Sequence[str], of: str = "memcpy") -> float:
        """Median over the repetitions of these rows' seconds by those of `of` in the same repetition."""
        return statistics.median(
            sum(parts) / unit
            for unit, parts in zip(
                self.seconds[of], zip(*(self.seconds[row] for row in rows), strict=True), strict=True
            )
        )

    def milliseconds(self, rows: Sequence[str]) -> float:
        return statistics.median(map(sum, zip(*(self.seconds[row] for row in rows), strict=True))) * 1e3

    def gb_per_s(self, rows: Sequence[str]) -> float:
        return self.parameters * FLOAT32_BYTES / self.milliseconds(rows) / 1e6


class Stopwatch:
    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {row: [] for row in ROWS}

    @contextmanager
    def __call__(self, row: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[row].append(time.perf_counter() - started)


def measure(config: TinyPolicyConfig, repetitions: int, cache: Path) -> Measured:
    from parts.publishing_trainer import Trainer

    from titan_rl.generation.vllm.engine import VllmEngine
    from titan_rl.policy.models.tiny import make_tiny_policy

    engine = VllmEngine(GeneratorConfig(kv_cache_bytes=64 << 20), make_tiny_policy(config, cache))
    trainer = Trainer(config)
    try:
        return _measure(engine, trainer, range(1, 1 + WARM_UP + repetitions))
    finally:
        trainer.close()
        engine.close()


def _measure(engine: VllmEngine, trainer: Trainer, steps: range) -> Measured:
    import torch

    from titan_rl.types import PolicyVersion
    from titan_rl.weights.puller import SharedMemoryReader, verify

    publication, _ = trainer.publish(steps[0])
    trainer.release(publication.version)
    reader = SharedMemoryReader()
    engine_like = {entry.name: torch.zeros(entry.shape) for entry in publication.manifest.entries}
    parameters = sum(tensor.numel() for tensor in engine_like.values())
    source, target = torch.randn(parameters), torch.randn(parameters)
    timed = Stopwatch()
    for step in steps:
        version = PolicyVersion(0, step)
        timed.seconds["decode"].append(_decode(engine, step))
        with timed("memcpy"):
            target.copy_(source)
        publication, seconds = trainer.publish(step)
        timed.seconds["publish"].append(seconds)
        with timed("load"):
            engine.load_weights(reader.tensors(publication), version)
        with timed("drop_cache"):
            engine.drop_cache()
        with timed("verify"):
            verify(publication, engine.served_shards(), None)
        with timed("recompute"):
            engine.step()
        engine.abort(engine.running())
        # The copies alone go through the same memory: the publication is verified by now, and released below.
        timed.seconds["copy_in"].append(trainer.copy_in(publication))
        with timed("copy_out"):
            for name, view in reader.tensors(publication):
                engine_like[name].copy_(view)
        trainer.release(version)
    return Measured(parameters, {row: values[WARM_UP:] for row, values in timed.seconds.items()})


def _decode(engine: VllmEngine, salt: int) -> float:
    """Fill the engine, and return the seconds of one decode step."""
    for index in range(REQUESTS):
        engine.add(
            GenerationRequest(
                request_id=f"{salt}.{index}",
                prompt_token_ids=np.full(PROMPT_TOKENS, 2 + (salt + index) % 10, np.int32),
                sampling=SamplingParams(max_new_tokens=48),
                seed=index,
            )
        )
    engine.step()
    seconds = []
    for _ in range(DECODE_STEPS):
        started = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def measured_apart(size: str, repetitions: int) -> Measured:
    """`measure` in a process that starts with a generator's environment."""
    # The publishing process finds this directory's modules too.
    paths = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2])]
    environment = os.environ | generator_environment("cpu") | {"PYTHONPATH": os.pathsep.join(paths)}
    environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "measured.json"
        command = [sys.executable, __file__, "--repetitions", str(repetitions), "--only", size, "--output", str(output)]
        subprocess.run(command, env=environment, check=True)
        return Measured(*json.loads(output.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--only", choices=POLICIES, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        measured = measure(POLICIES[arguments.only], arguments.repetitions, arguments.output.parent)
        arguments.output.write_text(json.dumps(measured))
        return
    figures: dict[str, float] = {"repetitions": arguments.repetitions}
    rows: list[list[str | float]] = []
    for size, suffix in (("100M", ""), ("3M", "_3M")):
        measured = measured_apart(size, arguments.repetitions)
        for figure, title, parts in [
            *((f"units_{row}", title, (row,)) for row, title in ROWS.items()),
            ("ratio_to_memcpy", "copies alone", COPIES),
            ("ratio_total", "all of it", TOTAL),
            ("units_pause", "pause of the generator", PAUSE),
        ]:
            units = measured.units(parts)
            rows.append([size, title, measured.milliseconds(parts), units])
            figures[f"{figure}{suffix}"] = round(units, 3)
        figures |= {
            f"parameters{suffix}": measured.parameters,
            f"memcpy_gb_per_s{suffix}": round(measured.gb_per_s(["memcpy"]), 2),
            f"gb_per_s{suffix}": round(measured.gb_per_s(["publish", "load"]), 2),
            f"pause_steps{suffix}": round(measured.units(PAUSE, of="decode"), 2),
            f"recompute_steps{suffix}": round(measured.units(["recompute"], of="decode"), 2),
        }
    print_report("weight sync, float32", ["policy", "part", "ms (median)", "in warm copies"], rows, figures)


if __name__ == "__main__":
    main()
