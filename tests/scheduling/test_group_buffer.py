"""What the window, the slots and the bound mean, in small cases that can be read."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from support.saved import saved_and_read

from titan_rl.errors import ConfigError, StalenessViolation
from titan_rl.scheduling.group import Group, GroupState
from titan_rl.scheduling.group_buffer import GroupBuffer
from titan_rl.types import PolicyVersion


def v(step: int, incarnation: int = 0) -> PolicyVersion:
    return PolicyVersion(incarnation, step)


def admit_and_start(buffer: GroupBuffer) -> list[int]:
    return [buffer.start(group.group_id).group_id for group in buffer.admit()]


def finish(buffer: GroupBuffer, *group_ids: int) -> None:
    """Sampled by the oldest policy that the group allows."""
    for group_id in group_ids:
        buffer.finish(group_id, buffer[group_id].min_version)


def train(buffer: GroupBuffer) -> tuple[int, ...]:
    """One step, published at once."""
    batch = buffer.take()
    assert batch is not None, buffer.waits_for()
    step = buffer.trainer_version.step + 1
    buffer.trained(v(step))
    buffer.published(v(step))
    return batch.group_ids


def test_at_staleness_0_it_is_synchronous():
    buffer = GroupBuffer(groups_per_step=3)
    for step in range(4):
        assert admit_and_start(buffer) == [3 * step, 3 * step + 1, 3 * step + 2]
        assert buffer.free_slots == 0
        finish(buffer, 3 * step + 2, 3 * step)
        assert buffer.take() is None
        finish(buffer, 3 * step + 1)
        batch = buffer.take()
        assert batch.ages == (0, 0, 0)
        buffer.trained(v(step + 1))
        assert buffer.free_slots == 0, "not before the new version is published"
        buffer.published(v(step + 1))


def test_window_1_is_strictly_in_order_of_admission():
    buffer = GroupBuffer(groups_per_step=2, max_staleness=2)
    admit_and_start(buffer)
    finish(buffer, 1, 2, 3, 4, 5)
    assert buffer.take() is None
    finish(buffer, 0)
    assert [train(buffer) for _ in range(3)] == [(0, 1), (2, 3), (4, 5)]


def test_a_window_ends_w_places_behind_the_oldest_group_however_many_batches_pass():
    buffer = GroupBuffer(groups_per_step=2, max_staleness=3, window=5)
    admit_and_start(buffer)
    finish(buffer, *range(1, 8))
    assert [train(buffer), train(buffer)] == [(1, 2), (3, 4)]
    assert buffer.take() is None, "5 is the sixth of the line that begins at 0"
    finish(buffer, 0)
    assert train(buffer) == (0, 5)


def test_what_was_filtered_or_has_failed_takes_no_place_in_the_window():
    buffer = GroupBuffer(groups_per_step=2, max_staleness=3, window=3)
    admit_and_start(buffer)
    buffer.filtered(1)
    buffer.failed(2)
    finish(buffer, 3, 4, 5)
    assert train(buffer) == (3, 4)
    finish(buffer, 6, 7)
    assert buffer.take() is None


def test_the_bound_is_reached_and_not_passed():
    """P = 2, S = 1, W = 4: a group that 3 older and 3 younger ones precede is S + ⌈3/2⌉ = 3 steps old."""
    buffer = GroupBuffer(groups_per_step=2, max_staleness=1, window=4)
    assert admit_and_start(buffer) == [0, 1, 2, 3]
    finish(buffer, 0, 1)
    assert train(buffer) == (0, 1)
    finish(buffer, 2)
    assert admit_and_start(buffer) == [4, 5]
    finish(buffer, 4)
    assert train(buffer) == (2, 4)
    assert admit_and_start(buffer) == [6, 7]
    finish(buffer, 5, 6)
    assert train(buffer) == (5, 6)
    assert admit_and_start(buffer) == [8, 9]
    finish(buffer, 7, 8, 9)
    assert buffer.take() is None, "3 has been overtaken by 4, 5 and 6"
    buffer.finish(3, v(0))
    batch = buffer.take()
    assert batch.group_ids == (3, 7)
    assert batch.ages == (3, 1)
    assert buffer.knobs.bound == 3


def test_a_batch_older_than_the_bound_ends_the_run():
    buffer = GroupBuffer(groups_per_step=1, max_staleness=1)
    admit_and_start(buffer)
    finish(buffer, 0)
    buffer._trainer = v(2)  # a trainer that stepped without the buffer: no schedule leads here
    with pytest.raises(
        StalenessViolation, match=r"group 0 .* token of v0 .* trained by v2, 2 steps later; the bound is 1"
    ):
        buffer.take()


def test_a_token_older_than_its_group_allows_ends_the_run():
    buffer = GroupBuffer(groups_per_step=1, max_staleness=1)
    admit_and_start(buffer)
    finish(buffer, 0)
    train(buffer)
    (group_id,) = admit_and_start(buffer)
    with pytest.raises(StalenessViolation, match=r"admitted at v1\) has a token of v0"):
        buffer.finish(group_id, v(0))


def test_a_token_of_a_policy_that_was_never_trained_ends_the_run():
    buffer = GroupBuffer(groups_per_step=1)
    admit_and_start(buffer)
    buffer.finish(0, v(1))
    with pytest.raises(StalenessViolation):
        buffer.take()


def test_a_group_without_a_trained_token_has_no_age():
    buffer = GroupBuffer(groups_per_step=2)
    admit_and_start(buffer)
    buffer.finish(0, None)
    finish(buffer, 1)
    assert buffer.take().ages == (0,)


@pytest.mark.parametrize("leave", ["lost", "filtered", "failed"])
def test_a_batch_that_loses_a_group_is_given_up_and_made_anew(leave):
    buffer = GroupBuffer(groups_per_step=2, max_staleness=1, window=2)
    admit_and_start(buffer)
    finish(buffer, 0, 1, 2)
    assert buffer.take().group_ids == (0, 1)
    getattr(buffer, leave)(0)
    assert buffer.batch is None
    assert buffer[1].state is GroupState.FINISHED
    if leave == "lost":
        assert buffer.take() is None, "2 is the third from group 0 on, which kept its place"
        assert buffer.waiting() == (Group(group_id=0, state=GroupState.WAITING, attempt=1, min_version=v(0)),)
        assert buffer.free_slots == 0
        buffer.start(0)
        finish(buffer, 0)
        assert buffer.take().group_ids == (0, 1)
    else:
        assert buffer.free_slots == 1
        assert buffer.take().group_ids == (1, 2)


def test_a_filtered_group_is_replaced_by_a_new_one_of_the_newest_version():
    buffer = GroupBuffer(groups_per_step=1, max_staleness=1)
    admit_and_start(buffer)
    finish(buffer, 0)
    train(buffer)
    buffer.filtered(1)
    assert [(group.group_id, group.min_version) for group in buffer.admit()] == [(2, v(1)), (3, v(1))]


@pytest.mark.parametrize("ends", ["trained", "filtered", "failed"])
def test_no_way_out_leaks_a_slot(ends):
    buffer = GroupBuffer(groups_per_step=2, max_staleness=1, window=2)
    for _ in range(20):
        ids = admit_and_start(buffer)
        finish(buffer, *ids)
        if ends == "trained":
            train(buffer)
        else:
            for group_id in ids:
                getattr(buffer, ends)(group_id)
    assert getattr(buffer.counts, ends) >= 40
    assert buffer.free_slots + buffer.counts.active == 4


def test_one_publication_of_several_steps_frees_the_slots_of_all():
    buffer = GroupBuffer(groups_per_step=1, max_staleness=2)
    admit_and_start(buffer)
    finish(buffer, 0, 1, 2)
    for step in (1, 2):
        buffer.take()
        buffer.trained(v(step))
    assert buffer.free_slots == 0
    buffer.published(v(2))
    assert buffer.free_slots == 2
    assert buffer.published_version == v(2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda b: b.admit(1), "0 slots are free"),
        (lambda b: b.start(0), "should be waiting"),
        (lambda b: b.finish(3, None), "should be running"),
        (lambda b: b.finish(7, None), "group 7 is not active"),
        (lambda b: b.lost(3), "should be running or finished or taken"),
        (lambda b: b.trained(v(1)), "no batch is out"),
        (lambda b: (b.take(), b.trained(v(2))), "does not follow v0 by one step"),
        (lambda b: b.published(v(1)), "cannot be published"),
    ],
)
def test_what_cannot_happen_is_refused(wrong, message):
    buffer = GroupBuffer(groups_per_step=2, max_staleness=1)
    buffer.admit()
    for group_id in range(3):
        buffer.start(group_id)
    finish(buffer, 0, 1)
    before = buffer.counts
    with pytest.raises(ValueError, match=message):
        wrong(buffer)
    assert buffer.counts.admitted == before.admitted and buffer.counts.active == before.active


def test_it_says_what_the_next_batch_waits_for():
    buffer = GroupBuffer(groups_per_step=2, max_staleness=0)
    assert buffer.waits_for() == "2 groups, of which 0 are ready; 2 slots are free, no group is admitted"
    admit_and_start(buffer)
    finish(buffer, 0)
    buffer.lost(1)
    buffer.start(1)
    assert buffer.waits_for() == (
        "2 groups, of which 1 are ready; the oldest that is not finished is group 1 (running, attempt 2, "
        "admitted at v0)"
    )
    finish(buffer, 1)
    assert buffer.waits_for() == "nothing: 2 of 2 groups are ready"
    buffer.take()
    assert buffer.waits_for() == "the trainer, which has a batch since v0"
    buffer.trained(v(1))
    assert buffer.waits_for() == "2 groups, of which 0 are ready; no slot is free until v1 is published"


def test_a_resumed_run_goes_on_with_the_same_groups_under_a_new_incarnation():
    buffer = GroupBuffer(groups_per_step=2, max_staleness=1, window=2)
    admit_and_start(buffer)
    finish(buffer, 0, 1, 3)
    train(buffer)
    admit_and_start(buffer)
    resumed = saved_and_read(buffer)
    resumed.go_on_from(v(1, 1))
    resumed.published(v(1, 1))
    assert resumed[3].state is GroupState.FINISHED
    assert [(g.group_id, g.attempt, g.min_version) for g in resumed.waiting()] == [
        (2, 0, v(0)),
        (4, 0, v(1, 1)),
        (5, 0, v(1, 1)),
    ], "what v1 was to play is played by the v1 that there is now"
    resumed.start(2)
    resumed.finish(2, v(1, 1))
    assert resumed.take().ages == (0, 1)
    resumed.trained(v(2, 1))
    resumed.published(v(2, 1))
    assert [group.group_id for group in resumed.admit()] == [6, 7], "no prompt is skipped or repeated"


def test_a_batch_that_was_out_is_finished_again():
    buffer = GroupBuffer(groups_per_step=2)
    admit_and_start(buffer)
    finish(buffer, 0, 1)
    buffer.take()
    buffer.go_on_from(v(0, 1))
    assert buffer.batch is None and buffer.take().group_ids == (0, 1)


def test_a_state_does_not_go_with_another_step_of_the_trainer():
    with pytest.raises(ValueError, match="restored to v1.3"):
        GroupBuffer(groups_per_step=1).go_on_from(v(3, 1))


@pytest.mark.parametrize("knob", [{"groups_per_step": 0}, {"max_staleness": -1}, {"window": 0}])
def test_a_knob_out_of_range_is_a_wrong_config(knob):
    with pytest.raises(ConfigError, match=next(iter(knob))):
        GroupBuffer(**{"groups_per_step": 1, **knob})


@pytest.mark.parametrize(
    ("knobs", "line"),
    [
        (
            {"groups_per_step": 32, "window": 64},
            "32 groups per step, max staleness 0, window 64: 32 groups in flight; every sample is on-policy",
        ),
        (
            {"groups_per_step": 32, "max_staleness": 1},
            "32 groups per step, max staleness 1, in order: 64 groups in flight; "
            "a sample is at most 1 step old, on average at most 1",
        ),
        (
            {"groups_per_step": 32, "max_staleness": 2, "window": 34},
            "32 groups per step, max staleness 2, window 34: 96 groups in flight; "
            "a sample is at most 4 steps old (2 + 2 for the window), on average at most 2",
        ),
    ],
)
def test_the_run_says_in_one_line_what_the_knobs_imply(knobs, line):
    assert GroupBuffer(**knobs).knobs.describe() == line


@pytest.mark.parametrize("window", [1, 16, 64])
def test_lengths_are_unbiased_because_nothing_is_dropped(window):
    """A long-tailed load on few workers: what was trained is what was admitted, but for the groups still inside."""
    rng = np.random.default_rng(7)
    buffer = GroupBuffer(groups_per_step=16, max_staleness=2, window=window)
    lengths = rng.lognormal(0.0, 1.2, size=8_000)
    running: list[tuple[float, int]] = []
    trained: list[int] = []
    now = 0.0
    while len(trained) < 7_200:
        buffer.admit()
        for group in buffer.waiting()[: 24 - len(running)]:
            buffer.start(group.group_id)
            heapq.heappush(running, (now + lengths[group.group_id], group.group_id))
        if buffer.ready == 16:
            trained += train(buffer)
            continue
        now, group_id = heapq.heappop(running)
        finish(buffer, group_id)
    population = lengths[: buffer.counts.admitted]
    assert lengths[trained].mean() / population.mean() == pytest.approx(1.0, abs=0.02)
    inside = set(range(buffer.counts.admitted)) - set(trained)
    assert len(inside) == buffer.counts.active <= buffer.knobs.slots
