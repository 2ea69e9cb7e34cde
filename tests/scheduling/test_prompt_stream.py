"""Prompts are known by their index, over epochs and restarts, in memory that does not grow."""

from __future__ import annotations

import json
import random

import pytest
from support.saved import saved_and_read

from titan_rl.scheduling.group import Outcome, PromptStream
from titan_rl.scheduling.group_buffer import GroupBuffer
from titan_rl.types import PolicyVersion


def test_indices_follow_each_other_over_restarts():
    stream = PromptStream()
    assert stream.take(3) == [0, 1, 2]
    stream.settle(1, Outcome.FILTERED)
    resumed = saved_and_read(stream)
    assert resumed.take(2) == [3, 4]
    assert list(resumed.pending()) == [0, 2, 3, 4]
    assert resumed.outcome(1) is Outcome.FILTERED


def test_a_prompt_that_comes_again_in_a_later_epoch_is_another_one():
    """4 texts; the stream is at its third pass. An outcome of index 1 says nothing about indices 5 and 9."""
    stream = PromptStream()
    stream.take(10)
    stream.settle(5, Outcome.TRAINED)
    assert [index for index in (1, 5, 9) if stream.is_pending(index)] == [1, 9]


@pytest.mark.parametrize(("index", "message"), [(0, "has ended"), (2, "trained"), (9, "never handed out")])
def test_a_prompt_ends_once(index, message):
    stream = PromptStream()
    stream.take(3)
    stream.settle(0, Outcome.FAILED)
    stream.settle(2, Outcome.TRAINED)
    with pytest.raises(ValueError, match=message):
        stream.settle(index, Outcome.TRAINED)
    assert list(stream.pending()) == [1] and stream.outcome(2) is Outcome.TRAINED


def test_what_is_kept_does_not_grow_with_the_run():
    chance = random.Random(3)
    buffer = GroupBuffer(groups_per_step=4, max_staleness=1, window=8)
    sizes = []
    for step in range(1, 3001):
        for group in buffer.admit():
            buffer.start(group.group_id)
        running = [i for i in buffer.prompts.pending() if buffer[i].state == "running"]
        chance.shuffle(running)
        for group_id in running:
            if buffer.ready < 4:
                buffer.finish(group_id, buffer.published_version)
                assert buffer.decide() == group_id
        batch = buffer.take()
        assert batch is not None
        buffer.trained(PolicyVersion(0, step))
        buffer.published(PolicyVersion(0, step))
        sizes.append(len(json.dumps(buffer.state_dict())))
    assert buffer.counts.trained == 12_000
    assert max(sizes[1500:]) <= max(sizes[:1500]) + 200, "a few digits more"
