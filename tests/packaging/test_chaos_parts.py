"""The pure parts of scripts/chaos.py: which fault comes when, and what a run's numbers say."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

from chaos_parts.checks import check_steps
from chaos_parts.schedule import KINDS, schedule


@pytest.mark.parametrize("seed", range(5))
def test_a_schedule_is_a_function_of_its_seed_and_brings_every_kind_before_any_comes_again(seed: int) -> None:
    faults = schedule(seed, 1000, 20)
    assert faults == schedule(seed, 1000, 20) != schedule(seed + 1, 1000, 20)
    assert {fault.kind for fault in faults[: len(KINDS)]} == KINDS.keys()
    gaps = [after.step - before.step for before, after in zip(faults, faults[1:], strict=False)]
    assert min(gaps) >= 10 and max(gaps) <= 30
    assert 15 <= faults[0].step <= 25 and 970 <= faults[-1].step <= 990
    assert all(0 <= fault.luck < 1 for fault in faults)


def lines(*groups: list[int], age: int = 2) -> list[dict[str, Any]]:
    return [{"step": step, "groups": ids, "staleness/age_max": age} for step, ids in enumerate(groups, 1)]


@pytest.mark.parametrize(
    ("recorded", "problem"),
    [
        (lines([0, 1]), "not 1 to 2, once each"),
        (lines([0, 1], [2, 3])[::-1], "not 1 to 2, once each"),
        (lines([0, 1], [1, 2]), "more than once: [1]"),
        (lines([0, 1], [2]), "step 2 trained 1 groups"),
        (lines([0, 1], [2, 3], age=3), "3 steps old"),
    ],
)
def test_every_breach_is_named(recorded: list[dict[str, Any]], problem: str) -> None:
    assert list(check_steps(lines([0, 1], [3, 2]), steps=2, groups=2)) == []
    assert any(problem in said for said in check_steps(recorded, steps=2, groups=2))
