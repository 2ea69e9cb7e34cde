"""A task whose timing is random: slow rewards and pulls, a filter, a routing strategy without a plan.

For runs that must not depend on any of it.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

from titan_rl.environments.base import Example, Rubric, Transcript
from titan_rl.environments.copy import Copy, positions_equal
from titan_rl.rollout.report import GroupReport
from titan_rl.routing.strategies import RoundRobin
from titan_rl.types import GenerationRequest

_luck = random.SystemRandom()


def late(example: Example, transcript: Transcript) -> float:
    """`positions_equal`, sometimes after a while."""
    time.sleep(_luck.choice((0.0, 0.0, 0.0, 0.02, 0.1)))
    return positions_equal(example, transcript)


class Late(Copy):
    def rubric(self) -> Rubric:
        return Rubric(late)


def every_fifth(report: GroupReport) -> str:
    """A filter that refuses groups by their ids."""
    return "its id" if report.group_id % 5 == 3 else ""


PLAYED = "GROUPS_THAT_WERE_PLAYED"
"""Variable with the name of the file that `noted` writes to."""


def noted(report: GroupReport) -> str:
    """`every_fifth`; writes down which groups it sees."""
    with open(os.environ[PLAYED], "a") as file:
        file.write(f"{report.group_id}\n")
    return every_fifth(report)


class Anywhere(RoundRobin):
    """Chooses any generator that may serve the request."""

    def choose(self, request: GenerationRequest) -> str | None:
        able = [name for name, version in self.serving.items() if request.allows(version)]
        return _luck.choice(able) if able else None


def slow_pulls(config: Any, model_path: Path, device: str) -> Any:
    """vLLM, to which weights sometimes come late."""
    from titan_rl.generation.vllm.engine import VllmEngine

    engine = VllmEngine(config, model_path, device)
    load = engine.load_weights

    def late_load(*args: Any) -> None:
        time.sleep(_luck.choice((0.0, 0.0, 0.1, 0.5)))
        load(*args)

    engine.load_weights = late_load  # type: ignore[method-assign]
    return engine
