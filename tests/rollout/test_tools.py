"""Tools: declared, called by the policy, executed within limits, and answered in every case (8 s)."""

import pytest
from support.rollouts import TASKS, play, text_of

from titan_rl.importing import import_file
from titan_rl.types import Message, ToolCall


@pytest.mark.parametrize("cls", ["Calling", "CallingLater"])
async def test_a_call_is_answered_and_the_conversation_goes_on_from_its_exact_tokens(calling_path, cls):
    rollout, (sample,), requests = await play(calling_path, "<tool>12+35</tool>", "5$", cls=cls)
    assert rollout.error == "" and rollout.reward == 1.0
    assert rollout.messages == [
        Message("user", "5="),
        Message("assistant", "", (ToolCall("measure", {"expression": "12+35"}),)),
        Message("tool", "5"),
        Message("assistant", "5"),
    ]
    assert text_of(calling_path, sample.token_ids) == "5=<tool>12+35</tool><result>5</result>5$"
    assert "".join("x" if trained else "." for trained in sample.loss_mask) == "..xxxxxxx...xx"
    assert text_of(calling_path, requests[1].prompt_token_ids) == "5=<tool>12+35</tool><result>5</result>"


@pytest.mark.parametrize(
    "call",
    ["<tool>1</tool>", "12</tool>", "<tool>7+7<tool>1</tool>"],
    ids=["the tool refuses", "never opened", "opened twice: the last one counts"],
)
@pytest.mark.parametrize("cls", ["Calling", "CallingLater"])
async def test_a_call_that_cannot_be_made_is_told_to_the_policy_and_costs_nothing(calling_path, call, cls):
    rollout, (sample,), _ = await play(calling_path, call, "3$", cls=cls)
    assert rollout.error == "" and rollout.messages[2] == Message("tool", "=")
    assert text_of(calling_path, sample.token_ids) == f"5={call}<result>=</result>3$"


@pytest.mark.parametrize(("argument", "word"), [("2", "a bug"), ("3", "did not finish"), ("4", "a text or a number")])
async def test_a_tool_that_fails_costs_its_rollout(calling_path, argument, word):
    limit = 0.5 if argument == "3" else 20.0
    rollout, samples, _ = await play(calling_path, f"<tool>{argument}</tool>", step_seconds=limit)
    assert word in rollout.error and "tool calls of train prompt 5" in rollout.error
    assert samples == () and rollout.turn_count == 1


@pytest.mark.parametrize("texts", [("",), ("<tool>12</tool>", ""), ("<tool>12</tool>", "", "5$")])
async def test_a_turn_without_a_token_costs_its_rollout(calling_path, texts):
    rollout, samples, requests = await play(calling_path, *texts)
    assert samples == () and len(requests) == texts.index("") + 1
    assert "a generator answered train-5-0-" in rollout.error and "with no token" in rollout.error


async def test_an_environment_answers_the_turns_that_call_nothing(calling_path):
    rollout, _, _ = await play(calling_path, "1$", "<tool>12</tool>", "2$", "3$", cls="CallingAndAnswering")
    said = [(message.role, message.content) for message in rollout.messages[1:]]
    assert [role for role, _ in said] == [
        "assistant",
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
        "user",
    ]
    assert said[3] == ("tool", "2") and rollout.error == ""


async def test_all_turns_together_sample_no_more_than_the_rollouts_budget(calling_path):
    rollout, (sample,), requests = await play(
        calling_path, "<tool>12+35</tool>", "<tool>12+35</tool>", max_sampled_tokens=10
    )
    assert [request.sampling.max_new_tokens for request in requests] == [10, 3]
    assert sample.loss_mask.sum() == 10 and rollout.truncated
    rollout, _, requests = await play(calling_path, "<tool>12+35</tool>", max_sampled_tokens=7)
    assert len(requests) == 1 and rollout.error == ""  # nothing was left for an answer


async def test_a_tool_remembers_what_its_own_rollout_did(calling_path):
    """Each call, and the grader, may be in another process; the task's own words leave the memory as it is."""
    turns = ("<tool>4</tool>", "$", "<tool>7</tool>", "$")
    rollout, _, _ = await play(calling_path, *turns, cls="Noting", max_turns=4)
    assert [each.content for each in rollout.messages if each.role == "tool"] == ["1", "2"]
    assert rollout.error == "" and rollout.reward == 10 * 2 + 4 + 7
    again, _, _ = await play(calling_path, "<tool>5</tool>", "$", "$", "$", cls="Noting", max_turns=4)
    assert again.reward == 10 + 5


def test_the_policy_is_not_told_of_the_memory():
    assert set(import_file(TASKS / "calling.py").note.spec.parameters["properties"]) == {"expression"}
