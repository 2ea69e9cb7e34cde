"""When a run stops because its rollouts fail."""

from __future__ import annotations

import pytest

from titan_rl.metrics.metric_table import metric_of
from titan_rl.metrics.rollout_record import Failed
from titan_rl.scheduling.schedule import FEWEST, NEWEST, too_many_failures
from titan_rl.types import FailureKind

TOOL: Failed = (FailureKind.TOOL, "tool calls of train prompt: KeyError: 'x' (a.py:3 in look)")
GRADER: Failed = (FailureKind.GRADER, "score of train prompt: ValueError (a.py:9 in right)")


def of(failed: int, rollouts: int, failure: Failed = TOOL) -> list[Failed | None]:
    return [failure] * failed + [None] * (rollouts - failed)


@pytest.mark.parametrize(
    ("failed", "rollouts", "most", "stops"),
    [
        (FEWEST - 1, FEWEST - 1, 0.0, False),  # the first handful
        (FEWEST, FEWEST, 0.5, True),
        (FEWEST // 2, FEWEST, 0.5, False),  # the share itself is allowed
        (FEWEST // 2 + 1, FEWEST, 0.5, True),
        (NEWEST // 2 + 1, NEWEST, 0.5, True),
        (NEWEST, NEWEST, 1.0, False),  # off
        (1, NEWEST, 0.0, True),
        (0, NEWEST, 0.0, False),
        (0, 0, 0.0, False),
    ],
)
def test_a_run_stops_when_more_than_the_share_failed_of_enough_rollouts(
    failed: int, rollouts: int, most: float, stops: bool
) -> None:
    assert bool(too_many_failures(of(failed, rollouts), most)) is stops


def test_kinds_are_counted_apart() -> None:
    assert too_many_failures(of(40, 40) + of(40, 40, GRADER), 0.5) == ""
    assert too_many_failures(of(40, 40) + of(41, 41, GRADER), 0.5).startswith("grader failures: 41 of the last 81 ")


def test_the_sentence_says_kind_share_count_the_commonest_cause_and_what_to_change() -> None:
    rarer = (FailureKind.TOOL, "tool calls of train prompt: TypeError")
    told = too_many_failures([*of(60, 70), *of(20, 30, rarer)], 0.5)
    assert told == (
        "tool failures: 80 of the last 100 rollouts (80%), more than rollout.failure_share = 0.5; "
        "60 × tool calls of train prompt: KeyError: 'x' (a.py:3 in look); correct the tool, or let it raise ToolError "
        "where the policy is to blame: it is told, and its rollout goes on"
    )


def test_there_is_advice_for_every_kind() -> None:
    for kind in FailureKind:
        metric = metric_of(f"rollout/failed_{kind}")
        assert metric is not None and too_many_failures(of(64, 64, (kind, "it")), 0.5).endswith(f"× it; {metric.do}")
