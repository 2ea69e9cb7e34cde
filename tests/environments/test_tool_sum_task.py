"""The calculator task: reward, stream, held-out prompts and demonstrations (1 s)."""

import pytest

from titan_rl.environments.base import Message, ToolCall, ToolError, Transcript
from titan_rl.environments.dataset import is_held_out
from titan_rl.environments.tool_sum import ToolSum, calculate
from titan_rl.errors import ConfigError
from titan_rl.types import Example, FinishReason

EXAMPLE = Example(prompt=(Message("user", "12+35="),), answer="47")
CALL = Message("assistant", "", (ToolCall("calculate", {"expression": "12+35"}),))


def score(*messages, finish_reason=FinishReason.STOP) -> tuple[float, float]:
    """Reward and tool use."""
    turns = sum(message.role == "assistant" for message in messages)
    result = ToolSum().rubric().score(EXAMPLE, Transcript((*EXAMPLE.prompt, *messages), (finish_reason,) * turns))
    assert result.reward == result.parts["exact_match"]
    return result.reward, result.parts["tool_use"]


def test_the_sum_is_rewarded_however_it_was_found():
    assert score(CALL, Message("tool", "47"), Message("assistant", "47")) == (1.0, 1.0)
    assert score(Message("assistant", "47")) == (1.0, 0.0)


@pytest.mark.parametrize(
    "last",
    [
        Message("assistant", "46"),
        Message("assistant", ""),
        Message("assistant", "<result>47</result>47"),
        Message("assistant", "47", (ToolCall("calculate", {"expression": "1+1"}),)),
    ],
)
def test_anything_else_in_the_last_message_is_wrong(last):
    assert score(CALL, Message("tool", "47"), last) == (0.0, 1.0)


def test_a_conversation_that_ends_with_the_tool_or_is_cut_off_is_wrong():
    assert score(CALL, Message("tool", "47")) == (0.0, 1.0)
    assert score(Message("assistant", "47"), finish_reason=FinishReason.LENGTH) == (0.0, 0.0)


def test_the_tool_adds_two_numbers_and_refuses_everything_else():
    assert calculate("12+35") == "47" and calculate("7+0") == "7"
    for expression in ("", "12", "12+", "+", "1+2+3", "12+35=", "9" * 5000 + "+1", "12 + 35"):
        with pytest.raises(ToolError):
            calculate(expression)
    assert ToolSum().tool_error("whatever it was") == "="


def test_neither_prompts_nor_demonstrations_show_a_held_out_sum():
    held_out = [example.prompt[0].content for example in ToolSum().held_out(1000)]
    assert len(set(held_out)) == len(held_out) > 700
    assert all(is_held_out(text[:-1]) for text in held_out)
    shown = [ToolSum().demonstration(index).prompt[0].content for index in range(2000)]
    trained = [ToolSum().example(index).prompt[0].content for index in range(2000)]
    assert not any(is_held_out(text[:-1]) for text in shown + trained)
    assert len(ToolSum().held_out(50)) == 50 and ToolSum(seed=1).held_out(50) == ToolSum(seed=2).held_out(50)


def test_a_quarter_of_the_demonstrations_use_the_tool_and_the_others_guess():
    demonstrations = [ToolSum().demonstration(index) for index in range(4000)]
    calling = [each for each in demonstrations if len(each.messages) == 3]
    assert abs(len(calling) / len(demonstrations) - 0.25) < 0.03
    for each in calling:
        call, result, answer = each.messages
        expression = each.prompt[0].content[:-1]
        assert call == Message("assistant", "", (ToolCall("calculate", {"expression": expression}),))
        assert result == Message("tool", calculate(expression)) and answer == Message(
            "assistant", calculate(expression)
        )
    guesses = {each.messages[0].content for each in demonstrations if len(each.messages) == 1}
    assert len(guesses) == 179  # every sum there is


def test_everything_is_a_function_of_its_index_and_the_seed():
    first, second = ToolSum(seed=1), ToolSum(seed=2)
    for method in ("example", "demonstration"):
        assert [getattr(first, method)(n) for n in range(20)] == [
            getattr(ToolSum(seed=1), method)(n) for n in range(20)
        ]
        assert [getattr(first, method)(n) for n in range(20)] != [getattr(second, method)(n) for n in range(20)]


def test_a_share_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="tool_share"):
        ToolSum(tool_share=1.5)
