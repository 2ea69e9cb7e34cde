"""Rewards and their sum (0.2 s)."""

import asyncio

import pytest

from titan_rl.environments.rubric import GroupReward, Reward, Rubric, Transcript, run_plain
from titan_rl.errors import ConfigError, TaskError
from titan_rl.types import Example, FinishReason, Message

EXAMPLE = Example(prompt=(Message("user", "hi"),), answer=3)
TRANSCRIPT = Transcript((Message("user", "hi"), Message("assistant", "abc")), (FinishReason.STOP,))


def length(example, transcript):
    return len(transcript.answer) / example.answer


def ended(example, transcript):
    return transcript.stopped


async def slow_length(example, transcript):
    await asyncio.sleep(0)
    return length(example, transcript)


def test_the_reward_is_the_weighted_sum_and_the_parts_are_unweighted():
    score = Rubric(Reward(length, weight=2.0), Reward(ended, weight=0.5, name="eos")).score(EXAMPLE, TRANSCRIPT)
    assert score.reward == 2.5
    assert score.parts == {"length": 1.0, "eos": 1.0, "exact_match": 1.0}


@pytest.mark.parametrize(
    ("rewards", "exact"),
    [
        ((length, Reward(ended, weight=-0.05)), 1.0),  # right, with a small penalty
        ((Reward(length, weight=0.5),), 1.0),
        ((Reward(length, name="long", weight=-0.01), Reward(lambda e, t: 0.0, name="wrong")), 0.0),
        ((Reward(lambda e, t: 0.5, name="half"), ended), 0.0),
        ((Reward(lambda e, t: 0.5, name="metric", weight=0.0), Reward(ended, weight=2.0)), 1.0),
        ((length, Reward(lambda e, t: 0.0, name="exact_match", weight=-1.0)), 0.0),  # it says so itself
        ((length, GroupReward(lambda e, t: [0.0] * len(t), name="rank")), 1.0),
    ],
)
def test_the_weightiest_function_decides_about_exact_matches_where_none_says_it(rewards, exact):
    assert Rubric(*rewards).score(EXAMPLE, TRANSCRIPT).parts["exact_match"] == exact


def test_a_function_of_weight_zero_is_only_reported():
    assert Rubric(length, Reward(ended, weight=0.0)).score(EXAMPLE, TRANSCRIPT) == (1.0, {"length": 1.0, "ended": 1.0})


async def test_async_functions_are_awaited():
    rubric = Rubric(slow_length, Reward(ended, weight=0.0))
    assert rubric.asynchronous and not Rubric(length).asynchronous
    assert await rubric.score_async(EXAMPLE, TRANSCRIPT) == (1.0, {"slow_length": 1.0, "ended": 1.0})


@pytest.mark.parametrize(
    "value", [None, "much", "0.5", b"1", {"reward": "1"}, float("nan"), float("inf"), [1, 2], 1e308, -1.1e30]
)
def test_a_reward_that_is_no_ordinary_number_is_refused_by_name(value):
    with pytest.raises(TaskError, match="broken"):
        Rubric(Reward(lambda example, transcript: value, name="broken")).score(EXAMPLE, TRANSCRIPT)


def test_rewards_that_add_up_to_too_much_are_refused_by_name():
    with pytest.raises(TaskError, match="weighted sum of length, ended is inf, which is not finite"):
        Rubric(Reward(length, weight=1e308), Reward(ended, weight=1e308)).score(EXAMPLE, TRANSCRIPT)


def rank(example, transcripts):
    return range(len(transcripts))


async def slow_rank(example, transcripts):
    await asyncio.sleep(0)
    return rank(example, transcripts)


def test_a_group_reward_gives_each_rollout_its_own_part():
    rubric = Rubric(length, GroupReward(rank, weight=2.0), GroupReward(lambda e, t: [5] * len(t), weight=0.0, name="m"))
    assert rubric.score(EXAMPLE, TRANSCRIPT) == (1.0, {"length": 1.0, "exact_match": 1.0})
    assert run_plain(rubric.score_group_async(EXAMPLE, [TRANSCRIPT] * 2)) == [
        (0.0, {"rank": 0.0, "m": 5.0}),
        (2.0, {"rank": 1.0, "m": 5.0}),
    ]


async def test_async_group_rewards_are_awaited_and_may_be_all_there_is():
    rubric = Rubric(GroupReward(slow_rank))
    assert rubric.group_asynchronous and not rubric.asynchronous
    assert rubric.score(EXAMPLE, TRANSCRIPT) == (0.0, {})
    assert await rubric.score_group_async(EXAMPLE, [TRANSCRIPT] * 2) == [(0, {"slow_rank": 0}), (1, {"slow_rank": 1})]


@pytest.mark.parametrize(
    "values", [None, 3.0, [1.0], [1.0, 2.0, 3.0], [1.0, "x"], [1.0, "1"], "12", [1.0, float("nan")], [0, 1e31]]
)
def test_a_group_reward_that_is_not_one_ordinary_number_each_is_refused_by_name(values):
    with pytest.raises(TaskError, match="broken"):
        run_plain(Rubric(GroupReward(lambda e, t: values, name="broken")).score_group_async(EXAMPLE, [TRANSCRIPT] * 2))


def test_two_functions_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="length"):
        Rubric(length, GroupReward(rank, name="length"))
    with pytest.raises(ConfigError, match="length"):
        Rubric(length, length)


def test_a_transcript_without_a_turn_has_an_empty_unfinished_answer():
    empty = Transcript((Message("user", "hi"),), ())
    assert empty.answer == "" and not empty.stopped
