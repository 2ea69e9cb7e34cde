"""Sorting names: prompts, turns, parsing and partial credit (1 s; one child process starts)."""

import re
from pathlib import Path

import pytest

from titan_rl.environments.rubric import Transcript
from titan_rl.importing import import_file
from titan_rl.types import Example, FinishReason, Message

_task = import_file(Path(__file__).resolve().parents[2] / "rl_configs" / "alphabet_sort.py")
AlphabetSort = _task.AlphabetSort
Sorting = _task.Sorting
exact_match = _task.exact_match
names_in_order = _task.names_in_order
sorted_names = _task.sorted_names

NAMES = ["Ada Abbott", "Boris Chen", "Carlos Dahl", "Daria Evans"]
EXAMPLE = Example(prompt=(Message("user", "…"),), answer=Sorting("first", (tuple(NAMES[::-1]),)))
TURNS = {"min_names": 2, "max_names": 3, "min_turns": 1, "max_turns": 4, "min_added": 1, "max_added": 2}


def answered(*turns: list[str]) -> Transcript:
    """What each turn answered."""
    messages = [*EXAMPLE.prompt]
    for names in turns:
        messages += [Message("assistant", "\n".join(["<sorted>", *names, "</sorted>"])), Message("user", "more")]
    return Transcript(tuple(messages[:-1]), (FinishReason.STOP,) * len(turns))


def test_credit_grows_with_the_longest_run_in_order():
    one_misplaced = [NAMES[1], NAMES[2], NAMES[3], NAMES[0]]
    assert names_in_order(EXAMPLE, answered(one_misplaced)) == pytest.approx((3 / 4) ** 2)
    assert names_in_order(EXAMPLE, answered(NAMES[::-1])) == pytest.approx((1 / 4) ** 2)
    assert names_in_order(EXAMPLE, answered(NAMES[:2])) == pytest.approx((2 / 4) ** 2)


def test_repeating_lines_does_not_pay():
    assert names_in_order(EXAMPLE, answered(NAMES * 50)) < names_in_order(EXAMPLE, answered(NAMES[:1]))


def test_an_answer_without_a_block_earns_nothing():
    transcript = Transcript((*EXAMPLE.prompt, Message("assistant", "\n".join(NAMES))), (FinishReason.STOP,))
    assert names_in_order(EXAMPLE, transcript) == exact_match(EXAMPLE, transcript) == 0.0


def test_the_last_block_counts():
    assert sorted_names("<sorted>\nA B\n</sorted> no: <sorted>\n  C D \n\nE F\n</sorted>") == ["C D", "E F"]


# --- turns -----------------------------------------------------------------------------------------------------------


def play(task: AlphabetSort, example: Example, answer) -> Transcript:
    """The conversation of a policy that answers turn t with `answer(t)`, to its end."""
    messages, reasons = list(example.prompt), ()
    while True:
        messages.append(Message("assistant", answer(len(reasons))))
        reasons += (FinishReason.STOP,)
        reply = task.respond(example, Transcript(tuple(messages), reasons))
        if reply.done:
            return Transcript(tuple(messages), reasons)
        messages.extend(reply.messages)


def block(names: list[str]) -> str:
    return "<sorted>\n" + "\n".join(names) + "\n</sorted>"


def test_every_turn_adds_names_and_the_right_answers_earn_everything():
    task = AlphabetSort(**TURNS)
    lengths = set()
    for index in range(100):
        example = task.example(index)
        targets = example.answer.targets()
        transcript = play(task, example, lambda turn, targets=targets: block(targets[turn]))
        lengths.add(len(transcript.finish_reasons))
        asked = [message.content for message in transcript.messages if message.role == "user"]
        shown: list[str] = []
        for prompt, batch, target in zip(asked, example.answer.batches, targets, strict=True):
            listed = re.findall(r"^(?!First Last$)\S+ \S+$", prompt, re.MULTILINE)
            assert listed == list(batch) and f"by {example.answer.by} name" in prompt
            shown += listed
            assert sorted(shown) == sorted(target)
        assert names_in_order(example, transcript) == exact_match(example, transcript) == 1.0
    assert lengths == {1, 2, 3, 4}


def test_credit_is_the_mean_over_the_turns_and_a_match_needs_all_of_them():
    example = Example(prompt=EXAMPLE.prompt, answer=Sorting("first", (("Boris Chen", "Ada Abbott"), ("Carlos Dahl",))))
    both = answered(NAMES[:2], NAMES[:3])
    assert names_in_order(example, both) == exact_match(example, both) == 1.0
    second_wrong = answered(NAMES[:2], NAMES[:3][::-1])
    assert names_in_order(example, second_wrong) == pytest.approx((1 + (1 / 3) ** 2) / 2)
    first_wrong = answered(NAMES[:2][::-1], NAMES[:3])
    assert names_in_order(example, first_wrong) == pytest.approx(((1 / 2) ** 2 + 1) / 2)
    assert exact_match(example, second_wrong) == exact_match(example, first_wrong) == 0.0


def test_the_user_goes_on_whatever_the_policy_says():
    task = AlphabetSort(**{**TURNS, "min_turns": 3, "max_turns": 3})
    example = task.example(0)
    transcript = play(task, example, lambda turn: ["", "no", "<sorted>\n</sorted>"][turn])
    assert len(transcript.finish_reasons) == 3 and names_in_order(example, transcript) == 0.0


def test_the_answer_is_sorted_by_what_the_prompt_asks_for():
    task = AlphabetSort(min_names=5, max_names=5)
    for index in range(50):
        example = task.example(index)
        prompt = example.prompt[0].content
        key = 1 if "by last name" in prompt else 0
        (target,) = example.answer.targets()
        parts = [name.split()[key] for name in target]
        assert parts == sorted(parts) and len(set(parts)) == 5
        assert all(name in prompt for name in target)
