"""Spans feed everything that watches a run; the watchdog says who stands still. On a clock of the test's own."""

import pytest

from titan_rl.metrics.activity import Activities


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def watched() -> tuple[Activities, Clock]:
    clock = Clock()
    return Activities(clock=clock), clock


def test_a_phase_lasts_while_at_least_one_of_its_spans_is_open():
    activity, clock = watched()
    with activity("rollout", group=1):
        clock.now = 2.0
        with activity("rollout", group=2), activity("train", step=1), activity("trainer", waits_for=str):
            clock.now = 3.0
        assert activity.take_seconds() == {"rollout": 3.0, "train": 1.0}
        clock.now = 5.0
    assert activity.take_seconds() == {"rollout": 2.0}
    assert activity.take_seconds() == {}


def test_a_span_that_fails_has_ended():
    activity, clock = watched()
    with pytest.raises(ValueError), activity("train", step=1):
        raise ValueError
    clock.now += 10
    assert "train" not in activity.stuck(10)


def test_while_something_moves_there_is_nothing_to_report():
    activity, clock = watched()
    with activity("train", step=1):
        for step in range(5):
            clock.now += 9
            with activity("rollout", group=step):
                assert activity.stuck(10) == ""


def test_the_first_span_without_progress_is_named_with_what_it_is_and_who_waits():
    activity, clock = watched()
    with activity("publish", version="v2"):
        clock.now += 2
        with activity("rollout", group=4), activity("trainer", waits_for=lambda: "group 4"):
            clock.now += 10
            assert activity.stuck(10) == (
                "nothing has moved for 10 s. publish has been at it for 12 s: version v2; "
                "trainer waits for group 4 (10 s)"
            )


def test_waiting_is_no_progress_and_says_what_it_waits_for_by_now():
    activity, clock = watched()
    missing = ["2 groups"]
    with activity("trainer", waits_for=lambda: missing[-1]):
        clock.now += 10
        missing.append("1 group")
        with activity("data", waits_for=lambda: "a free slot"):
            assert activity.stuck(10) == (
                "nothing has moved for 10 s. every task waits for another one; "
                "trainer waits for 1 group (10 s); data waits for a free slot (0 s)"
            )


def test_the_end_of_work_is_progress():
    activity, clock = watched()
    with activity("train", step=1):
        clock.now += 30
        assert "train has been at it for 30 s: step 1" in activity.stuck(10)
    assert activity.stuck(10) == ""
