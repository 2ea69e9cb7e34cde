"""The sorting task: reward, stream, held-out prompts and demonstrations (0.5 s)."""

import pytest

from titan_rl.environments.base import Environment
from titan_rl.environments.copy import Copy
from titan_rl.environments.dataset import fold, is_held_out
from titan_rl.environments.rubric import Transcript
from titan_rl.environments.sort import LETTERS, Sort, exact_match
from titan_rl.errors import ConfigError, TaskError
from titan_rl.types import Example, FinishReason, Message

EXAMPLE = Example(prompt=(Message("user", "fbahc="),), answer="abcfh")


def said(text: str, finish_reason: FinishReason = FinishReason.STOP) -> Transcript:
    return Transcript((*EXAMPLE.prompt, Message("assistant", text)), (finish_reason,))


def shown(index: int, **kwargs) -> tuple[str, str]:
    """Prompt and answer of a demonstration."""
    demonstration = Sort(**kwargs).demonstration(index)
    (prompt,), (answer,) = demonstration.prompt, demonstration.messages
    assert (prompt.role, answer.role) == ("user", "assistant")
    return prompt.content, answer.content


@pytest.mark.parametrize(
    ("text", "finish_reason", "reward"),
    [
        ("abcfh", FinishReason.STOP, 1.0),
        ("abcfh", FinishReason.LENGTH, 0.0),
        ("hfcba", FinishReason.STOP, 0.0),
        ("abcf", FinishReason.STOP, 0.0),
        ("abcfhh", FinishReason.STOP, 0.0),
        ("", FinishReason.STOP, 0.0),
    ],
)
def test_only_the_sorted_letters_and_the_end_are_rewarded(text, finish_reason, reward):
    assert exact_match(EXAMPLE, said(text, finish_reason)) == reward
    score = Sort().rubric().score(EXAMPLE, said(text, finish_reason))
    assert score.reward == reward and score.parts == {"exact_match": reward}


def test_a_prompt_is_its_letters_and_an_equals_sign():
    for index in range(50):
        example = Sort().example(index)
        (message,) = example.prompt
        assert message.content[-1] == "=" and len(message.content) == 6
        assert set(message.content[:-1]) <= set(LETTERS)
        assert example.answer == "".join(sorted(message.content[:-1]))


def test_neither_prompts_nor_demonstrations_show_a_held_out_prompt():
    held_out = {example.prompt for example in Sort().held_out(1000)}
    assert len(held_out) == 1000
    assert all(fold(prompt[0].content[:-1]) % 10 == 0 for prompt in held_out)
    trained = [Sort().example(index).prompt[0].content for index in range(3000)]
    taught = [shown(index)[0] for index in range(3000)]
    assert not any(is_held_out(text[:-1]) for text in trained + taught)


def test_the_held_out_prompts_are_all_of_them_where_there_are_fewer():
    everything = Sort(letters=3).held_out(100_000)
    texts = [first + second + third for first in LETTERS for second in LETTERS for third in LETTERS]
    assert {example.prompt[0].content[:-1] for example in everything} == {text for text in texts if is_held_out(text)}


def test_three_demonstrations_in_ten_sort_up_and_the_others_down():
    pairs = [shown(index) for index in range(4000)]
    up = sum(answer == "".join(sorted(prompt[:-1])) for prompt, answer in pairs)
    down = sum(answer == "".join(sorted(prompt[:-1], reverse=True)) for prompt, answer in pairs)
    assert abs(up / len(pairs) - 0.3) < 0.03
    assert up + down >= len(pairs)


@pytest.mark.parametrize(("share", "reverse"), [(1.0, False), (0.0, True)])
def test_the_share_of_right_demonstrations_is_a_setting(share, reverse):
    for index in range(100):
        prompt, answer = shown(index, right_share=share)
        assert answer == "".join(sorted(prompt[:-1], reverse=reverse))


def test_everything_is_a_function_of_its_index_and_the_seed():
    assert [Sort().example(index) for index in range(50)] == [Sort().example(index) for index in range(50)]
    assert [shown(index) for index in range(50)] == [shown(index) for index in range(50)]
    assert [Sort(seed=1).example(index) for index in range(50)] != [Sort(seed=2).example(index) for index in range(50)]
    assert [shown(index, seed=1) for index in range(50)] != [shown(index, seed=2) for index in range(50)]
    assert Sort(seed=1).held_out(20) == Sort(seed=2).held_out(20)


@pytest.mark.parametrize(("kwargs", "word"), [({"letters": 1}, "letters"), ({"right_share": 1.5}, "right_share")])
def test_a_task_that_cannot_be_is_refused(kwargs, word):
    with pytest.raises(ConfigError, match=word):
        Sort(**kwargs)


def test_a_task_without_demonstrations_says_so_when_it_is_asked():
    assert Copy.demonstration is Environment.demonstration
    with pytest.raises(TaskError, match="Copy has no method `demonstration`"):
        Copy().demonstration(0)
