"""What an evaluation makes of rollouts that could not be graded (1 s)."""

import pytest
from scripted_system import World, rollout

from titan_rl.errors import TaskError


async def test_a_held_out_rollout_without_a_reward_is_counted_and_shown_and_neither_right_nor_wrong():
    world = World(steps=1)
    world.rollouts.evaluation = (rollout(0, 1.0), rollout(0, 0.0, "boom 1"))
    summary = await world.run()
    assert [(each.exact_match, each.prompts, each.failed) for each in summary.evaluations] == [(1.0, 1, 1)] * 2
    assert "1 of 2 held-out rollouts failed and are not counted; the first: boom 1" in world.printed
    assert [1, 1] == [each["evaluation/failed"] for _, each in world.metrics.written if "evaluation/failed" in each]


async def test_an_evaluation_of_which_nothing_is_graded_ends_the_run_with_the_cause():
    world = World(steps=1)
    world.rollouts.evaluation = (rollout(0, 0.0, "boom 0"), rollout(0, 0.0, "boom 1"))
    with pytest.raises(TaskError, match="all 2 held-out rollouts failed; the first: boom 0"):
        await world.run()
