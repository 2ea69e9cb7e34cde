"""How many more steps asynchronous training needs: copy4 against copy4_async, seed by seed.

    python scripts/bench/async_learning.py [--seeds 0,1,2] [--steps 150] [--prompts 250] [--target 0.95]

Both are evaluated every 5 steps; a run needs as many steps as its first evaluation at the target or above says. The
figure is the median over the seeds of asynchronous ÷ synchronous. The last line is one JSON object.

One run of the real training loop for a benchmark, without files or a display.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import io
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from parts.table import print_report
from rich.console import Console

from titan_rl.config import RunConfig
from titan_rl.config_registry import copy4, copy4_async
from titan_rl.launch.process import prepare_controller
from titan_rl.launch.start import start
from titan_rl.observability.display.progress import RunDisplay
from titan_rl.observability.metrics import MetricsWriter

prepare_controller()
from titan_rl.controller.loop import TrainingLoop  # noqa: E402
from titan_rl.controller.records import RunSummary  # noqa: E402


@dataclasses.dataclass
class Kept(MetricsWriter):
    """The numbers of every step, in memory."""

    steps: list[dict[str, float]] = dataclasses.field(default_factory=list)

    def write(self, step: int, numbers: dict[str, float], *, groups: Sequence[int] = ()) -> None:
        if "seconds/step" in numbers:
            self.steps.append(numbers)


class Silent(RunDisplay):
    """Shows nothing and notes when the generators began to serve."""

    serving_at = 0.0
    """`time.monotonic()` after the first pull."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps=steps, live=False, console=Console(file=io.StringIO()))

    def mesh(self, name: str, doing: str) -> None:
        if doing.startswith("serving"):
            self.serving_at = self.serving_at or time.monotonic()


class Run(NamedTuple):
    """What came of one run."""

    summary: RunSummary
    steps: list[dict[str, float]]
    """Every step's numbers."""
    serving_at: float
    """`time.monotonic()` when the first version was served."""


async def train(config: RunConfig, *, trainer: Any = None) -> Run:
    """Bring the system up and train.

    Args:
        trainer: called with the model's path; what it returns takes the place of the trainer mesh.
    """
    metrics, display = Kept(), Silent(config.loop.steps)
    async with start(config) as system:
        real = system.trainer
        if trainer is not None:
            system.trainer = trainer(system.model_path)
        try:
            loop = TrainingLoop(system, display=display, metrics=metrics)
            await loop.run()
            await loop.end(failed=False)
            return Run(loop.summary, metrics.steps, display.serving_at)
        finally:
            if system.trainer is not real:
                await system.trainer.close()
                system.trainer = real


TARGET_RATIO = 1.3


def steps_needed(run: Run, target: float) -> int | None:
    """Steps before the first evaluation that reached the target; None: none did."""
    reached = (each.version.step for each in run.summary.evaluations if each.exact_match >= target)
    return next(reached, None)


def configs(seed: int, steps: int, prompts: int) -> dict[str, RunConfig]:
    evaluation = dataclasses.replace(copy4_async().evaluation, prompts=prompts)
    return {
        name: dataclasses.replace(
            recipe, seed=seed, loop=dataclasses.replace(recipe.loop, steps=steps), evaluation=evaluation
        )
        for name, recipe in (("sync", copy4()), ("async", copy4_async()))
    }


async def measure(seeds: list[int], steps: int, prompts: int, target: float) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for seed in seeds:
        row: dict[str, Any] = {"seed": seed}
        for name, config in configs(seed, steps, prompts).items():
            run = await train(config)
            ages = run.summary.ages
            row[f"{name}_steps"] = steps_needed(run, target)
            row[f"{name}_final"] = run.summary.evaluations[-1].exact_match
            row[f"{name}_age"] = sum(age * count for age, count in ages.items()) / ages.total()
            print(f"seed {seed} {name}: {row[f'{name}_steps']} steps, ends at {row[f'{name}_final']:.3f}", flush=True)
        found.append(row)
    return found


def ratio(row: dict[str, Any]) -> float:
    """Asynchronous ÷ synchronous steps; infinite where either run never got there."""
    return row["async_steps"] / row["sync_steps"] if row["async_steps"] and row["sync_steps"] else float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=lambda text: [int(word) for word in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--prompts", type=int, default=250, help="held-out prompts of each evaluation")
    parser.add_argument("--target", type=float, default=0.95)
    options = parser.parse_args()
    found = asyncio.run(measure(options.seeds, options.steps, options.prompts, options.target))
    rows = [
        [
            f"seed {row['seed']}",
            row["sync_steps"] or "never",
            row["async_steps"] or "never",
            ratio(row),
            row["sync_final"],
            row["async_final"],
            row["async_age"],
        ]
        for row in found
    ]
    median = statistics.median(ratio(row) for row in found)
    figures = {
        "seeds": options.seeds,
        "async_learning_steps_ratio": median if median < float("inf") else "never",
        "async_learning_within": "yes" if median <= TARGET_RATIO else "no",
        "async_steps": [row["async_steps"] or 0 for row in found],
        "sync_steps": [row["sync_steps"] or 0 for row in found],
        "async_exact_match_least": min(row["async_final"] for row in found),
    }
    header = ["", "sync steps", "async steps", "÷", "sync ends at", "async ends at", "mean age"]
    print_report(f"copy4: steps to exact match {options.target}", header, rows, figures)


if __name__ == "__main__":
    main()
