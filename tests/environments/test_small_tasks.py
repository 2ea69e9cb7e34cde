"""Copying, sorting and adding: prompts, rewards and demonstrations (1 s)."""

from pathlib import Path

import pytest

from titan_rl.environments.base import Message, ToolCall, ToolError, Transcript
from titan_rl.environments.copy import Copy
from titan_rl.importing import import_file
from titan_rl.types import Example, FinishReason

BESIDE = Path(__file__).resolve().parents[2] / "rl_configs"
_sort, _tool_sum = import_file(BESIDE / "sort.py"), import_file(BESIDE / "tool_sum.py")
LETTERS, Sort = _sort.LETTERS, _sort.Sort
ToolSum, calculate = _tool_sum.ToolSum, _tool_sum.calculate
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
COPY = (Copy(), Example(prompt=(Message("user", "4071="),), answer="4071"))
SORT = (Sort(), Example(prompt=(Message("user", "fbahc="),), answer="abcfh"))
SUM = (ToolSum(), Example(prompt=(Message("user", "12+35="),), answer="47"))
CALL = Message("assistant", "", (ToolCall("calculate", {"expression": "12+35"}),))
CALLED = (CALL, Message("tool", "47"))


def score(task, *said, end=STOP):
    """Of what follows the prompt: texts are turns of the policy."""
    environment, example = task
    messages = [Message("assistant", each) if isinstance(each, str) else each for each in said]
    turns = sum(each.role == "assistant" for each in messages)
    return environment.rubric().score(example, Transcript((*example.prompt, *messages), (end,) * turns))


@pytest.mark.parametrize(
    ("task", "said", "end", "reward", "exact"),
    [
        (COPY, "4071", STOP, 1.0, 1.0),
        (COPY, "4071", LENGTH, 4 / 5, 0.0),  # right digits, but the policy did not end its answer
        (COPY, "407", STOP, 3 / 5, 0.0),  # the end stands where the last digit should
        (COPY, "40712", STOP, 4 / 6, 0.0),
        (COPY, "407123", LENGTH, 4 / 6, 0.0),
        (COPY, "", STOP, 0.0, 0.0),
        (COPY, "0000", STOP, 2 / 5, 0.0),
        (COPY, "<pad>071", STOP, 4 / 5, 0.0),  # a special token is one position, not five characters
        (COPY, "4071<pad>", LENGTH, 4 / 5, 0.0),
        (SORT, "abcfh", STOP, 1.0, 1.0),
        (SORT, "abcfh", LENGTH, 0.0, 0.0),
        (SORT, "hfcba", STOP, 0.0, 0.0),
        (SORT, "abcfhh", STOP, 0.0, 0.0),
        (SORT, "", STOP, 0.0, 0.0),
        (SUM, "47", STOP, 1.0, 1.0),
        (SUM, "47", LENGTH, 0.0, 0.0),
    ],
)
def test_an_answer_earns_what_is_right_of_it_and_an_exact_match_needs_its_end(task, said, end, reward, exact):
    found = score(task, said, end=end)
    assert (found.reward, found.parts["exact_match"]) == (pytest.approx(reward), exact)


@pytest.mark.parametrize(
    ("last", "reward"),
    [
        (["47"], 1.0),
        (["46"], 0.0),
        ([""], 0.0),
        (["<result>47</result>47"], 0.0),
        ([Message("assistant", "47", CALL.tool_calls)], 0.0),
        ([], 0.0),
    ],
)
def test_the_last_message_is_the_sum_and_the_use_of_the_tool_a_metric(last, reward):
    assert score(SUM, *CALLED, *last) == (reward, {"exact_match": reward, "tool_use": 1.0})
    assert score(SUM, "47").parts["tool_use"] == 0.0


def test_a_prompt_is_its_symbols_and_an_equals_sign():
    for index in range(50):
        digits, letters = Copy(digits=6).example(index), Sort().example(index)
        assert digits.prompt == (Message("user", f"{digits.answer}="),)
        assert len(digits.answer) == 6 and digits.answer.isdigit()
        text = letters.prompt[0].content
        assert text[-1] == "=" and len(text) == 6 and set(text[:-1]) <= set(LETTERS)
        assert letters.answer == "".join(sorted(text[:-1]))


@pytest.mark.parametrize("share", [None, 0.0, 1.0])
def test_a_share_of_the_demonstrations_sorts_up_and_the_others_down(share):
    task = Sort() if share is None else Sort(right_share=share)
    shown = [task.demonstration(index) for index in range(4000)]
    pairs = [(each.prompt[0].content[:-1], each.messages[0].content) for each in shown]
    up = sum(answer == "".join(sorted(prompt)) for prompt, answer in pairs)
    down = sum(answer == "".join(sorted(prompt, reverse=True)) for prompt, answer in pairs)
    assert abs(up / len(pairs) - (0.3 if share is None else share)) < 0.03 and up + down >= len(pairs)


def test_a_quarter_of_the_demonstrations_use_the_tool_and_the_others_guess():
    demonstrations = [ToolSum().demonstration(index) for index in range(4000)]
    calling = [each for each in demonstrations if len(each.messages) == 3]
    assert abs(len(calling) / len(demonstrations) - 0.25) < 0.03
    for each in calling:
        expression = each.prompt[0].content[:-1]
        call = Message("assistant", "", (ToolCall("calculate", {"expression": expression}),))
        total = calculate(expression)
        assert each.messages == (call, Message("tool", total), Message("assistant", total))
    guesses = {each.messages[0].content for each in demonstrations if len(each.messages) == 1}
    assert len(guesses) == 179  # every sum there is


def test_the_tool_adds_two_numbers_and_refuses_everything_else():
    assert calculate("12+35") == "47" and calculate("7+0") == "7"
    for expression in ("", "12", "12+", "+", "1+2+3", "12+35=", "9" * 5000 + "+1", "12 + 35"):
        with pytest.raises(ToolError):
            calculate(expression)
    assert ToolSum().tool_error("whatever it was") == "="
