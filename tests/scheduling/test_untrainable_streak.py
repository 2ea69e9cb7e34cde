"""A run that learns nothing ends with its reasons."""

from __future__ import annotations

import pytest

from titan_rl.errors import NothingToTrain
from titan_rl.scheduling.schedule import Untrainable, UntrainableStreak


def test_a_run_whose_groups_all_fail_stops_with_the_first_error():
    streak = UntrainableStreak(groups_per_step=2, batches=2)
    for group_id in range(3):
        streak.untrainable(group_id, Untrainable.FAILED, f"reward raised KeyError {group_id}")
    with pytest.raises(NothingToTrain) as stop:
        streak.untrainable(3, Untrainable.FAILED, "reward raised KeyError 3")
    assert str(stop.value) == (
        "the last 4 groups in a row (2 batches of 2) taught nothing: 4 failed (first group 0: reward raised KeyError 0)"
    )


def test_every_reason_is_counted_most_frequent_first():
    streak = UntrainableStreak(groups_per_step=4, batches=1)
    streak.untrainable(5, Untrainable.FILTERED, "too long")
    streak.untrainable(7, Untrainable.EQUAL_REWARDS, "0.0")
    streak.untrainable(6, Untrainable.EQUAL_REWARDS, "1.0")
    with pytest.raises(
        NothingToTrain, match=r"2 all rewards equal \(first group 7: 0.0\); 1 filtered .*; 1 no token to train"
    ):
        streak.untrainable(8, Untrainable.EMPTY)


@pytest.mark.parametrize("unsolved", [0, 1, 2])
def test_only_groups_of_which_nearly_all_are_solved_end_a_run_well(unsolved: int):
    streak = UntrainableStreak(groups_per_step=10, batches=2)
    for group_id in range(19):
        reason = Untrainable.EQUAL_REWARDS if group_id < unsolved else Untrainable.SOLVED
        assert not streak.untrainable(group_id, reason)
    if unsolved < 2:
        assert streak.untrainable(19, Untrainable.SOLVED)
    else:
        with pytest.raises(NothingToTrain, match="18 solved .*; 2 all rewards equal"):
            streak.untrainable(19, Untrainable.SOLVED)


def test_one_group_that_teaches_something_starts_the_count_again():
    streak = UntrainableStreak(groups_per_step=3, batches=1)
    for group_id in range(0, 30, 3):
        streak.untrainable(group_id, Untrainable.FILTERED)
        streak.untrainable(group_id + 1, Untrainable.EQUAL_REWARDS)
        streak.trainable()
    assert streak.length == 0
