"""Sorting names: prompts, turns, parsing and partial credit (1 s; one child process starts)."""

import re

import pytest

from titan_rl.environments.alphabet_sort import (
    FAMILY_NAMES,
    GIVEN_NAMES,
    AlphabetSort,
    Sorting,
    exact_match,
    names_in_order,
    sorted_names,
)
from titan_rl.environments.dataset import is_held_out
from titan_rl.environments.rubric import Transcript
from titan_rl.errors import ConfigError
from titan_rl.sandbox.sandbox import Sandbox
from titan_rl.sandbox.wire import Call, CallKind, Conversation, EnvironmentSetup
from titan_rl.types import Example, FinishReason, Message, Purpose

NAMES = ["Ada Abbott", "Boris Chen", "Carlos Dahl", "Daria Evans"]
EXAMPLE = Example(prompt=(Message("user", "…"),), answer=Sorting("first", (tuple(NAMES[::-1]),)))
TURNS = {"min_names": 2, "max_names": 3, "min_turns": 1, "max_turns": 4, "min_added": 1, "max_added": 2}


def answered(*turns: list[str]) -> Transcript:
    """What each turn answered."""
    messages = [*EXAMPLE.prompt]
    for names in turns:
        messages += [Message("assistant", "\n".join(["<sorted>", *names, "</sorted>"])), Message("user", "more")]
    return Transcript(tuple(messages[:-1]), (FinishReason.STOP,) * len(turns))


def names_of(example: Example) -> str:
    """What decides whether an example is held out."""
    return "\n".join(sorted(name for batch in example.answer.batches for name in batch))


def test_the_right_order_earns_everything():
    assert names_in_order(EXAMPLE, answered(NAMES)) == exact_match(EXAMPLE, answered(NAMES)) == 1.0


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


@pytest.mark.parametrize("kwargs", [{}, TURNS])
def test_no_example_is_both_trained_and_held_out(kwargs):
    task = AlphabetSort(**kwargs)
    assert all(is_held_out(names_of(example)) for example in task.held_out(200))
    assert not any(is_held_out(names_of(task.example(index))) for index in range(2000))


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


def test_a_turn_that_was_not_reached_earns_nothing():
    example = Example(prompt=EXAMPLE.prompt, answer=Sorting("first", (("Boris Chen", "Ada Abbott"), ("Carlos Dahl",))))
    cut = answered(NAMES[:2])
    assert (names_in_order(example, cut), exact_match(example, cut)) == (0.5, 0.0)


def test_the_user_goes_on_whatever_the_policy_says():
    task = AlphabetSort(**{**TURNS, "min_turns": 3, "max_turns": 3})
    example = task.example(0)
    transcript = play(task, example, lambda turn: ["", "no", "<sorted>\n</sorted>"][turn])
    assert len(transcript.finish_reasons) == 3 and names_in_order(example, transcript) == 0.0


def test_the_stream_depends_on_index_and_seed_only():
    assert AlphabetSort(seed=3).example(7) == AlphabetSort(seed=3).example(7)
    assert AlphabetSort(seed=3).example(7) != AlphabetSort(seed=4).example(7)
    assert AlphabetSort(seed=3).held_out(5) == AlphabetSort(seed=4).held_out(5)
    assert AlphabetSort(seed=3, **TURNS).example(7) == AlphabetSort(seed=3, **TURNS).example(7)


def test_no_name_is_bundled_twice():
    assert len(set(GIVEN_NAMES)) == len(GIVEN_NAMES)
    assert len(set(FAMILY_NAMES)) == len(FAMILY_NAMES)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"min_names": 6, "max_names": 5}, "2 <= min_names <= max_names, got 6 and 5"),
        ({"min_turns": 0}, "1 <= min_turns <= max_turns"),
        ({"min_turns": 2}, "got 2 and 1"),
        ({"min_added": 0}, "min_added"),
        ({"max_names": 20, "max_turns": 10, "max_added": 10}, "is 110, and there are only"),
    ],
)
def test_bounds_that_contradict_each_other_are_refused(kwargs, words):
    with pytest.raises(ConfigError, match=words):
        AlphabetSort(**kwargs)


async def test_a_conversation_is_answered_and_scored_in_a_process_of_its_own():
    setup = EnvironmentSetup(
        name="alphabet_sort", kwargs={**TURNS, "min_turns": 2}, run_seed=3, step_seconds=60.0, start_seconds=120.0
    )
    example = AlphabetSort(**{**TURNS, "min_turns": 2}, seed=3).example(5)
    targets = example.answer.targets()
    process = Sandbox(setup)
    info = await process.start()
    try:
        assert info.multi_turn
        messages = (await process.call(Call(CallKind.EXAMPLE, Purpose.TRAIN, 5))).prompt
        assert messages == example.prompt
        reasons: tuple[FinishReason, ...] = ()
        done = False
        while not done:
            messages = (*messages, Message("assistant", block(targets[len(reasons)])))
            reasons = (*reasons, FinishReason.STOP)
            added, done, _ = await process.call(
                Call(CallKind.RESPOND, Purpose.TRAIN, 5, Conversation(messages, reasons))
            )
            messages = (*messages, *added)
        assert len(reasons) == len(targets) >= 2
        reward, parts = await process.call(Call(CallKind.SCORE, Purpose.TRAIN, 5, Conversation(messages, reasons)))
        assert (reward, parts) == (1.0, {"names_in_order": 1.0, "exact_match": 1.0})
    finally:
        await process.close()
