"""The copy task: reward, stream and held-out prompts (0.5 s)."""

import pytest

from titan_rl.environments.copy import Copy, exact_match, positions_equal
from titan_rl.environments.dataset import fold, is_held_out
from titan_rl.environments.rubric import Transcript
from titan_rl.errors import ConfigError
from titan_rl.types import Example, FinishReason, Message

EXAMPLE = Example(prompt=(Message("user", "4071="),), answer="4071")


def said(text: str, finish_reason: FinishReason = FinishReason.STOP) -> Transcript:
    return Transcript((*EXAMPLE.prompt, Message("assistant", text)), (finish_reason,))


@pytest.mark.parametrize(
    ("text", "finish_reason", "reward"),
    [
        ("4071", FinishReason.STOP, 1.0),
        ("4071", FinishReason.LENGTH, 4 / 5),  # right digits, but the policy did not end its answer
        ("407", FinishReason.STOP, 3 / 5),  # the end stands where the last digit should
        ("40712", FinishReason.STOP, 4 / 6),
        ("407123", FinishReason.LENGTH, 4 / 6),
        ("", FinishReason.STOP, 0.0),
        ("", FinishReason.LENGTH, 0.0),
        ("0000", FinishReason.STOP, 2 / 5),
        ("<pad>071", FinishReason.STOP, 4 / 5),  # a special token is one position, not five characters
        ("4071<pad>", FinishReason.LENGTH, 4 / 5),
    ],
)
def test_the_reward_is_the_share_of_equal_positions_the_end_included(text, finish_reason, reward):
    assert positions_equal(EXAMPLE, said(text, finish_reason)) == pytest.approx(reward)


def test_an_exact_match_needs_the_end_of_the_answer():
    assert exact_match(EXAMPLE, said("4071")) == 1.0
    assert exact_match(EXAMPLE, said("4071", FinishReason.LENGTH)) == 0.0
    assert exact_match(EXAMPLE, said("40711")) == 0.0


def test_exact_match_moves_no_gradient():
    score = Copy().rubric().score(EXAMPLE, said("4071", FinishReason.LENGTH))
    assert score.reward == pytest.approx(0.8)
    assert score.parts == {"positions_equal": pytest.approx(0.8), "exact_match": 0.0}


def test_the_training_stream_never_shows_a_held_out_prompt():
    task = Copy(digits=4)
    held_out = {example.answer for example in task.held_out(100_000)}
    trained = {task.example(index).answer for index in range(5000)}
    assert held_out and not held_out & trained
    assert all(is_held_out(text) for text in held_out)


def test_the_held_out_prompts_are_all_of_them_or_as_many_as_asked_for():
    everything = Copy(digits=4).held_out(100_000)
    assert len(everything) == sum(fold(f"{number:04d}") % 10 == 0 for number in range(10_000))
    some = Copy(digits=4).held_out(50)
    assert len(some) == len({example.answer for example in some}) == 50
    assert len({example.answer for example in Copy(digits=9).held_out(300)}) == 300


def test_a_prompt_is_a_function_of_its_index_and_the_seed():
    assert [Copy().example(index) for index in range(50)] == [Copy().example(index) for index in range(50)]
    assert [Copy(seed=1).example(index) for index in range(50)] != [Copy(seed=2).example(index) for index in range(50)]
    assert Copy(seed=1).held_out(20) == Copy(seed=2).held_out(20)


def test_a_prompt_is_its_digits_and_an_equals_sign():
    example = Copy(digits=6).example(3)
    assert example.prompt == (Message("user", f"{example.answer}="),)
    assert len(example.answer) == 6 and example.answer.isdigit()


def test_one_digit_is_refused():
    with pytest.raises(ConfigError, match="digits"):
        Copy(digits=1)
