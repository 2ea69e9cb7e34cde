"""The pure parts of scripts/chaos.py: which fault comes when, what a log says of it, and what a run's numbers say."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

from chaos_parts.checks import check_steps
from chaos_parts.schedule import KINDS, Fault, Injected, Line, judge, must_be_detected, schedule


@pytest.mark.parametrize("seed", range(5))
def test_a_schedule_is_a_function_of_its_seed_and_brings_every_kind_before_any_comes_again(seed: int) -> None:
    faults = schedule(seed, 1000, 20)
    assert faults == schedule(seed, 1000, 20) != schedule(seed + 1, 1000, 20)
    assert {fault.kind for fault in faults[: len(KINDS)]} == KINDS.keys()
    gaps = [after.step - before.step for before, after in zip(faults, faults[1:], strict=False)]
    assert min(gaps) >= 10 and max(gaps) <= 30
    assert 15 <= faults[0].step <= 25 and 970 <= faults[-1].step <= 990
    assert all(0 <= fault.luck < 1 for fault in faults)


AT = datetime(2026, 11, 22, 13, 0, 0).timestamp()


def log(*lines: tuple[float, str]) -> list[Line]:
    return [Line(AT + seconds, text) for seconds, text in lines]


def fault(kind: str, seconds: float, mesh: str = "") -> Injected:
    return Injected(fault=Fault(20, kind, 0.5), what=kind, at=AT + seconds, mesh=mesh)


def test_a_lost_mesh_is_detected_and_over_when_the_log_says_so_of_that_mesh_after_the_fault() -> None:
    killed, again = fault("generator killed", 1.0, "generator1"), fault("generator stopped", 20.0, "generator1")
    judge(
        [killed, again],
        log(
            (0.5, "lost generator1: earlier"),
            (1.2, "lost generator0: another one"),
            (1.5, "lost generator1: killed"),
            (3.0, "[actor=<root>] group 7 (running, admitted at v3) is played again: its worker was lost"),
            (3.1, "groups 8, 9 were finished and are played again: rollout1 is gone"),
            (3.2, "[actor=<root>] 4 finished steps are done again"),
            (9.0, "generator1 is back after 7.5 s"),
            (28.0, "lost generator1: it has made no progress for 8 s"),
        ),
        [AT + 2.0, AT + 30.0],
    )
    assert (killed.detected, killed.recovered) == (0.5, 8.0)
    assert (killed.groups_redone, killed.steps_redone) == (3, 4)
    assert (again.detected, again.recovered, again.groups_redone) == (8.0, None, 0)


def test_a_controller_that_ends_soon_after_a_fault_need_not_have_noticed_it() -> None:
    stopped, killed = fault("generator stopped", 1.0, "generator1"), fault("controller killed", 3.0)
    judge([stopped, killed], log((20.0, "lost generator1: it hangs again")), [AT + 30.0])
    assert (stopped.detected, must_be_detected(stopped)) == (None, False)
    assert must_be_detected(killed)
    judge([stopped], [], [AT + 9.0])
    assert not must_be_detected(stopped)


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
