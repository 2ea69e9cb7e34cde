"""Whole runs of a mixture of experts whose routes are replayed: two FSDP ranks, two ranks of a generator (1 min)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from leftovers import assert_nothing_is_left, finish, start_run

from tests.support.metrics import assert_metrics_are_known

MOE = ("--policy.tiny.architecture", "qwen3_moe")
LARGEST = 2e-5
"""Difference between the logprobs of trainer and generators, nats."""


def steps_of(*arguments: str, runs: Path) -> list[dict[str, Any]]:
    run = start_run(*arguments, *MOE, runs=runs)
    output = finish(run)
    assert run.returncode == 0, output
    assert_nothing_is_left(run)
    (metrics,) = runs.glob("*/metrics.jsonl")
    assert_metrics_are_known(metrics.parent)
    return [row for row in map(json.loads, metrics.read_text().splitlines()) if "train/loss" in row]


def test_old_samples_are_trained_with_the_experts_that_generators_chose(tmp_path: Path) -> None:
    """Where this very version sampled, trainer and generators agree."""
    stale = ("--loop.max_staleness", "1", "--weights.max_live", "3")
    steps = steps_of("--recipe", "cpu_smoke", *stale, runs=tmp_path)
    assert len(steps) == 3
    assert all(each["train/unrouted_tokens"] == 0 for each in steps)
    assert max(each["train/logprob_difference_max"] for each in steps) < LARGEST


@pytest.mark.acceptance
@pytest.mark.parametrize("replay", ["true", "false"])
def test_it_learns_copy4_with_and_without_replay(replay: str, tmp_path: Path) -> None:
    settings = ("--recipe", "copy4", "--generator.count", "1", "--trainer.replay_routes", replay)
    steps = steps_of(*settings, runs=tmp_path)  # it would end otherwise if it had not learned
    assert ("train/unrouted_tokens" in steps[-1]) == (replay == "true")
