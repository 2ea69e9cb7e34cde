"""What the window, the slots and the bound mean, in small cases that can be read."""

from __future__ import annotations

import random

import msgspec
import pytest

from titan_rl.errors import InvariantError
from titan_rl.scheduling.config import StalenessLimits
from titan_rl.scheduling.group_buffer import GroupBuffer
from titan_rl.types import PolicyVersion


def v(step: int, incarnation: int = 0) -> PolicyVersion:
    return PolicyVersion(incarnation, step)


def admit_and_start(buffer: GroupBuffer) -> list[int]:
    return [buffer.start(group.group_id).group_id for group in buffer.admit()]


def finish(buffer: GroupBuffer, *group_ids: int) -> None:
    """Sampled by the oldest policy that the group allows."""
    for group_id in group_ids:
        buffer.finish(group_id, buffer.groups[group_id].min_version)


def train(buffer: GroupBuffer) -> tuple[int, ...]:
    """One step, published at once."""
    batch = buffer.take()
    assert batch is not None, buffer.waits_for()
    step = buffer.trainer_version.step + 1
    buffer.trained(v(step))
    buffer.published(v(step))
    return batch.group_ids


def test_a_window_ends_w_places_behind_the_oldest_group_however_many_batches_pass():
    buffer = GroupBuffer(StalenessLimits(groups_per_step=2, max_staleness=3, window=5))
    admit_and_start(buffer)
    finish(buffer, *range(1, 8))
    assert [train(buffer), train(buffer)] == [(1, 2), (3, 4)]
    assert buffer.take() is None, "5 is the sixth of the line that begins at 0"
    finish(buffer, 0)
    assert train(buffer) == (0, 5)


def test_the_bound_is_reached_and_not_passed():
    """P = 2, S = 1, W = 4: a group that 3 older and 3 younger ones precede is S + ⌈3/2⌉ = 3 steps old."""
    buffer = GroupBuffer(StalenessLimits(groups_per_step=2, max_staleness=1, window=4))
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
    assert buffer.limits.bound == 3


def test_a_batch_older_than_the_bound_ends_the_run():
    buffer = GroupBuffer(StalenessLimits(groups_per_step=1, max_staleness=1))
    admit_and_start(buffer)
    finish(buffer, 0)
    buffer.trainer_version = v(2)  # a trainer that stepped without the buffer: no schedule leads here
    with pytest.raises(InvariantError, match=r"group 0 .* token of v0 .* trained by v2, 2 steps later; the bound is 1"):
        buffer.take()


def test_a_token_older_than_its_group_allows_ends_the_run():
    buffer = GroupBuffer(StalenessLimits(groups_per_step=1, max_staleness=1))
    admit_and_start(buffer)
    finish(buffer, 0)
    train(buffer)
    (group_id,) = admit_and_start(buffer)
    with pytest.raises(InvariantError, match=r"admitted at v1\) has a token of v0"):
        buffer.finish(group_id, v(0))


def test_a_token_of_a_policy_that_was_never_trained_ends_the_run():
    buffer = GroupBuffer(StalenessLimits(groups_per_step=1))
    admit_and_start(buffer)
    buffer.finish(0, v(1))
    with pytest.raises(InvariantError):
        buffer.take()


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
        (lambda b: b.restart_from(v(3, 1)), "restored to v1.3"),
    ],
)
def test_what_cannot_happen_is_refused(wrong, message):
    buffer = GroupBuffer(StalenessLimits(groups_per_step=2, max_staleness=1))
    buffer.admit()
    for group_id in range(3):
        buffer.start(group_id)
    finish(buffer, 0, 1)
    before = buffer.counts
    with pytest.raises(ValueError, match=message):
        wrong(buffer)
    assert buffer.counts["admitted"] == before["admitted"] and buffer.counts["active"] == before["active"]


def test_it_says_what_the_next_batch_waits_for():
    buffer = GroupBuffer(StalenessLimits(groups_per_step=2, max_staleness=0))
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


@pytest.mark.parametrize(
    ("limits", "line"),
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
def test_the_run_says_in_one_line_what_the_limits_imply(limits, line):
    assert StalenessLimits(**limits).describe() == line


def test_what_is_kept_does_not_grow_with_the_run():
    chance = random.Random(3)
    buffer = GroupBuffer(StalenessLimits(groups_per_step=4, max_staleness=1, window=8))
    sizes = []
    running: list[int] = []
    for step in range(1, 3001):
        running += [buffer.start(group.group_id).group_id for group in buffer.admit()]
        chance.shuffle(running)
        while buffer.ready < 4:
            buffer.finish(running.pop(), buffer.published_version)
            buffer.decide()
        batch = buffer.take()
        assert batch is not None
        buffer.trained(PolicyVersion(0, step))
        buffer.published(PolicyVersion(0, step))
        sizes.append(len(msgspec.msgpack.encode(buffer)))
    assert buffer.counts["trained"] == 12_000
    assert max(sizes[1500:]) <= max(sizes[:1500]) + 200, "a few digits more"
