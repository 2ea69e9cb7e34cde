"""Rewards of single turns, and turns of several roles (4 s)."""

from support.rollouts import TASKS, Lines, ScriptedPolicy, play, request, runner, text_of

from titan_rl.rollout.config import AdvantageConfig
from titan_rl.types import Message
from titan_rl.view.conversation import draw_end

TURNS = TASKS / "turns.py"


def turns_reward(group):
    """Credit that is the turn's reward itself."""
    return [[turn.reward for turn in rollout.turns] for rollout in group]


async def test_the_rewards_of_turns_are_added_to_the_grade_and_reach_the_algorithm(model_path):
    mine = AdvantageConfig(name=f"{__file__}:turns_reward")
    async with runner(model_path, f"{TURNS}:Rewarded", advantage=mine) as group_runner:
        result = await group_runner.run_group(request(samples=2), ScriptedPolicy(model_path, lambda a_request: "2"))
    rollout = result.rollouts[0]
    assert (rollout.error, rollout.reward) == ("", 4.5)
    assert rollout.reward_parts == {"exact_match": 0.0, "halves": 0.5, "turns": 4.0}, "the grade alone is no match"
    assert [turn.advantage for turn in result.trajectories[0].turns] == [0, 2, 2]
    record = result.describe(rollout, group_runner.renderer.decode, count=2)
    assert [(turn.role, turn.reward) for turn in record.turns] == [("", None), ("", 2), ("", 2)]
    assert draw_end(record).plain.endswith("turns: –, 2, 2")
    assert {*record.branches[0].advantages} == {None, 0.0, 2.0}, "the tokens of the last two turns have more"


async def test_a_turns_reward_that_is_no_number_costs_the_rollout(model_path):
    rollout, samples, _ = await play(model_path, "1$", "2$", name=f"{TURNS}:Rewarded", kwargs={"nan": True})
    assert "respond returned the reward nan, which is not finite" in rollout.error
    assert samples == ()


async def test_a_reward_function_is_told_how_many_tokens_each_turn_sampled(model_path):
    rollout, _, _ = await play(model_path, "1$", "22$", "3$", name=f"{TURNS}:Measured")
    assert (rollout.error, rollout.reward_parts["sampled"]) == ("", 232)


async def test_a_view_that_begins_anew_is_a_branch_and_calls_of_tools_belong_to_who_made_them(calling_path):
    policy = Lines(calling_path, "<tool>12</tool>", "34$", "5$")
    async with runner(calling_path, f"{TURNS}:Summing") as group_runner:
        result = await group_runner.run_group(request(7, samples=1, max_new_tokens=20), policy)
    (rollout,), (trajectory,) = result.rollouts, result.trajectories
    assert (rollout.error, rollout.reward) == ("", 1.5)
    assert [(turn.role, turn.reward) for turn in trajectory.turns] == [
        ("helper", None),
        ("helper", 1),
        ("writer", None),
    ]
    assert result.describe(rollout, str, count=1).branches[0].advantages is None, "all have the rollout's"
    texts = [text_of(calling_path, sample.token_ids) for sample in result.samples]
    assert texts == ["7=<tool>12</tool><result>2</result>34$", "34+5$"]
    assert trajectory.messages == [Message("user", "34+"), Message("assistant", "5")]
    (aside,) = trajectory.side_conversations
    assert [message.content for message in aside] == ["7=", "", "2", "34"]
