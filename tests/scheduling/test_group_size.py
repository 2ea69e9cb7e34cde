"""How many rollouts a group has follows from the steps after which groups grew."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from titan_rl.scheduling.group import GroupSize


@given(first=st.integers(2, 9), most=st.integers(0, 70), steps=st.lists(st.booleans(), max_size=12))
def test_it_doubles_up_to_the_most_and_no_later_step_changes_that_of_an_earlier_version(first, most, steps):
    size, seen = GroupSize(first=first, most=most), {0: first}
    for step, equal in enumerate(steps, 1):
        now = size.at(step)
        grows = size.trained(step, [(now, equal), (now, equal), (now, False)])
        seen[step] = min(most, 2 * now) if equal and now < most else now
        assert grows == (seen[step] > now)
        assert {step: size.at(step) for step in seen} == seen
        assert GroupSize(first=first, most=most, grown=[*size.grown]).at(step) == size.at(step), "as after a resume"


def test_groups_that_are_solved_or_smaller_do_not_count_and_half_is_not_most():
    size = GroupSize(first=4, most=16)
    assert not size.trained(1, [(4, True), (4, False)])
    assert size.trained(2, [(4, True), (4, True), (4, False)]) and size.at(1) == 4 and size.at(2) == 8
    assert not size.trained(3, [(4, True), (4, True), (8, True)]), "they were asked for before"
    assert size.trained(4, [(8, True)] * 3) and size.at(4) == 16
    assert not size.trained(5, [(16, True)] * 3), "they are as large as they may be"
    assert GroupSize(first=4, most=0, grown=size.grown).at(5) == 4, "the run went on with groups that stay as they are"
