"""One run of the real training loop for a benchmark, without files or a display."""

from __future__ import annotations

import dataclasses
import io
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Console

from titan_rl.config import RunConfig
from titan_rl.metrics.writer import MetricsWriter
from titan_rl.run.start import start
from titan_rl.supervision.process import prepare_controller
from titan_rl.view.display import RunDisplay

prepare_controller()
from titan_rl.loop.loop import TrainingLoop  # noqa: E402
from titan_rl.loop.records import RunSummary  # noqa: E402


@dataclasses.dataclass
class Numbers(MetricsWriter):
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
    metrics, display = Numbers(), Silent(config.loop.steps)
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
