"""What `deterministic = true` costs: tokens per second of a deterministic engine ÷ those of a plain one, in one run.

    python scripts/bench/deterministic.py [--pairs 7]

Four engines (TP 1), each in a process of its own: plain and deterministic, in float32 and in bfloat16. They take turns
on the same requests, so that a change of the machine's speed hits all of them; ratios are medians over the rounds. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import statistics
import time
from typing import Any

from generation import LOADS, Load, requests_of
from monarch.actor import Actor
from parts.fleet import POLICY, SECONDS
from parts.table import print_report

from titan_rl.config import RunConfig
from titan_rl.generation.config import GeneratorConfig
from titan_rl.hosts.facts import detect_host
from titan_rl.policy.config import PolicyConfig
from titan_rl.policy.models.tiny import model_directory
from titan_rl.rpc.connection import bounded, endpoint
from titan_rl.supervision.placement import plan
from titan_rl.supervision.provisioner import Provisioner
from titan_rl.types import GenerationRequest

LOADS = (*LOADS, Load("2 × 128 tokens", 2, 128))
LENGTH = 512
CONTENDERS = [(dtype, deterministic) for dtype in ("float32", "bfloat16") for deterministic in (False, True)]


class OneEngine(Actor):
    """An engine and nothing around it: add every request, step until all are done."""

    def __init__(self, config: GeneratorConfig, model_path: str) -> None:
        self._config = config
        self._model_path = model_path
        self._engine: Any = None

    @endpoint
    async def setup(self) -> None:
        from titan_rl.generation.vllm.engine import VllmEngine

        self._engine = VllmEngine(self._config, self._model_path)

    @endpoint
    async def run(self, requests: list[GenerationRequest]) -> tuple[float, int]:
        """(seconds, tokens) for these requests."""
        started = time.perf_counter()
        for request in requests:
            self._engine.add(request)
        tokens = 0
        while self._engine.has_work():
            tokens += len(self._engine.step().sampled)
        return time.perf_counter() - started, tokens


async def measure(pairs: int) -> dict[tuple[Load, str, bool], list[float]]:
    """Tokens per second by (load, dtype, deterministic), one entry per round."""
    provisioner = Provisioner(log_directory="", imports=(), on_fault=lambda fault: print(fault, flush=True))
    engines: dict[tuple[str, bool], Any] = {}
    speeds: dict[tuple[Load, str, bool], list[float]] = {}
    print("building four engines …", flush=True)
    try:
        for dtype, deterministic in CONTENDERS:
            settings = GeneratorConfig(count=1, max_model_len=LENGTH, dtype=dtype, deterministic=deterministic)
            policy = PolicyConfig(tiny=dataclasses.replace(POLICY, max_length=LENGTH))
            config = RunConfig(policy=policy, generator=settings)
            place = plan(config, detect_host()).meshes["generator0"]
            place = dataclasses.replace(place, name=f"{dtype}-{deterministic}")
            mesh = provisioner.spawn(place).spawn(place.name, OneEngine, settings, str(model_directory(config)))
            engines[dtype, deterministic] = mesh[0]
        setups = (bounded(each.setup.call_one(), what="setup", seconds=SECONDS) for each in engines.values())
        await asyncio.gather(*setups)
        for number in range(pairs + 1):  # the first round warms everything up
            for load, contender in itertools.product(LOADS, CONTENDERS):
                call = engines[contender].run.call_one(requests_of(load, number, ""))
                seconds, tokens = await bounded(call, what="run", seconds=SECONDS)
                if tokens != load.requests * load.new_tokens:
                    raise RuntimeError(f"{contender} sampled {tokens} tokens on {load.name}")
                if number:
                    speeds.setdefault((load, *contender), []).append(tokens / seconds)
            print(f"round {number} of {pairs} done", flush=True)
    finally:
        await provisioner.stop_all()
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7, help="measured rounds (at least 5 for a figure to quote)")
    pairs = parser.parse_args().pairs
    speeds = asyncio.run(measure(pairs))
    figures: dict[str, Any] = {"pairs": pairs}
    rows: list[list[str | float]] = []
    for load, dtype in itertools.product(LOADS, dict(CONTENDERS)):
        plain, deterministic = speeds[load, dtype, False], speeds[load, dtype, True]
        ratios = [a / b for a, b in zip(deterministic, plain, strict=True)]
        word = f"{dtype}_{load.requests}x{load.new_tokens}"
        figures[f"deterministic_to_plain_{word}"] = round(statistics.median(ratios), 3)
        figures[f"tokens_per_second_plain_{word}"] = round(statistics.median(plain))
        medians = statistics.median(plain), statistics.median(deterministic), statistics.median(ratios)
        rows.append([load.name, dtype, *medians, f"{min(ratios):.3f}–{max(ratios):.3f}"])
    header = ["requests", "dtype", "plain tokens/s", "deterministic tokens/s", "ratio", "of single rounds"]
    print_report("deterministic = true", header, rows, figures)


if __name__ == "__main__":
    main()
