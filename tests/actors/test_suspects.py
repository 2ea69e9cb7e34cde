"""Whom losses are blamed on."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from titan_rl.actors.rollouts import GUILTY, SUSPECTED, Suspects


def test_losses_with_the_worker_are_nobodys_fault_while_nothing_reaches_its_end() -> None:
    suspects = Suspects()
    for _ in range(100):
        assert not any(suspects.lost(group, with_worker=True, alone=False) for group in range(64))


def test_a_group_that_was_lost_and_reaches_its_end_begins_anew() -> None:
    suspects = Suspects()
    for _ in range(100):
        for _ in range(SUSPECTED + GUILTY - 1):
            suspects.ended("another")
            assert not suspects.lost("a", with_worker=True, alone=True)
        assert "a" in suspects
        suspects.ended("a")
        assert "a" not in suspects


def test_a_group_under_which_engines_die_is_to_blame_if_others_end_meanwhile() -> None:
    suspects = Suspects()
    for _ in range(100):
        assert not suspects.lost("a", with_worker=False, alone=False)
    for number in range(1, GUILTY + 1):
        suspects.ended("another")
        assert suspects.lost("a", with_worker=False, alone=False) == (number == GUILTY)
    assert "a" not in suspects


@given(st.integers(1, 64), st.integers(1, 80), st.integers(0, 64), st.data())
def test_the_one_group_that_ends_its_worker_is_found_and_no_other(slots, groups, kills_after, data) -> None:
    """One worker plays as the real one: groups in order, at most one suspect, `slots` in all."""
    guilty = data.draw(st.integers(0, groups - 1))
    suspects, waiting, ended, blamed, workers = Suspects(), deque(range(groups)), set(), [], 0
    while waiting:
        playing: list[int] = []
        for group in [*waiting]:
            if len(playing) < slots and not (group in suspects and any(each in suspects for each in playing)):
                playing.append(group)
                waiting.remove(group)
        if guilty in playing:  # some may be faster than it
            for group in [each for each in playing if each != guilty][:kills_after]:
                playing.remove(group)
                suspects.ended(group)
                ended.add(group)
            workers += 1
            assert workers <= SUSPECTED * groups + GUILTY
            alone = playing == [guilty] and not waiting
            for group in playing:
                (blamed if suspects.lost(group, with_worker=True, alone=alone) else waiting).append(group)
        else:
            for group in playing:
                suspects.ended(group)
                ended.add(group)
    assert blamed == [guilty] and len(ended) == groups - 1
