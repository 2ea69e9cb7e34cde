"""Word problems in the published format, in files of our own, checked by math-verify (6 s; a child process starts)."""

import asyncio
import json
import threading
from pathlib import Path

import pytest

from titan_rl.environments.base import Message, Transcript
from titan_rl.errors import ConfigError
from titan_rl.importing import import_file
from titan_rl.isolation.pool import UserCodePool
from titan_rl.isolation.wire import CallKind, EnvironmentSetup, ExamplePrompt, UserCall
from titan_rl.types import Example, FinishReason, Purpose

FILE = Path(__file__).resolve().parents[2] / "rl_configs" / "gsm8k.py"
gsm8k = import_file(FILE)
INSTRUCTION, Gsm8k = gsm8k.INSTRUCTION, gsm8k.Gsm8k


def line(count: int, each: int = 3) -> str:
    """A problem of our own as the published files write theirs."""
    question = f"Mara packs {count} boxes with {each} lamps in each of them. How many lamps does she pack?"
    total = count * each
    answer = f"There are {count} boxes of {each} lamps.\nThat makes {count}*{each}=<<{count}*{each}={total}>>{total}.\n"
    return json.dumps({"question": question, "answer": f"{answer}#### {total:,}"})


@pytest.fixture
def files(tmp_path):
    train, test = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    train.write_text("\n".join(line(count) for count in range(400, 460)) + "\n")
    test.write_text("\n".join(line(count, 5) for count in range(2, 22)))
    return {"train_file": str(train), "test_file": str(test)}


@pytest.fixture
def task(files):
    return Gsm8k(**files)


EXAMPLE = Example(prompt=(Message("user", "…"),), answer="1234")


def said(text, finish_reason=FinishReason.STOP) -> Transcript:
    return Transcript((*EXAMPLE.prompt, Message("assistant", text)), (finish_reason,))


def score(task, text, finish_reason=FinishReason.STOP):
    return task.rubric().score(EXAMPLE, said(text, finish_reason))


# --- verification ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "So it is \\boxed{1234}.",
        "\\boxed{1,234}",
        "\\boxed{1234.00}",
        "\\boxed{1234 \\text{ lamps}}",
        "\\boxed{\\$1234}",
        "\\boxed{\\frac{2468}{2}}",
        "\\boxed{1200 + 34}",
        "first \\boxed{7}, no: \\boxed{1234}",
        "\\boxed{1234} \\boxed{",
    ],
)
def test_a_right_number_in_the_box_counts_however_it_is_written(task, text):
    assert score(task, text).parts == {"right_number": 1.0, "exact_match": 1.0, "boxed": 1.0}


@pytest.mark.parametrize(
    "text", ["\\boxed{1235}", "1234 \\boxed{}", "\\boxed{1234} no: \\boxed{7}", "\\boxed{7, 1234}", "\\boxed{lamps}"]
)
def test_anything_else_in_the_box_is_wrong(task, text):
    assert score(task, text).parts == {"right_number": 0.0, "exact_match": 0.0, "boxed": 1.0}


def test_the_number_counts_without_the_box_and_the_form_is_a_metric(task):
    result = score(task, "She packs 1,234 lamps.")
    assert (result.reward, result.parts["boxed"]) == (1.0, 0.0)
    assert score(task, "").parts == {"right_number": 0.0, "exact_match": 0.0, "boxed": 0.0}


def test_an_exact_match_needs_the_end_of_the_answer(task):
    parts = score(task, "\\boxed{1234}", FinishReason.LENGTH).parts
    assert (parts["right_number"], parts["exact_match"]) == (1.0, 0.0)


def test_an_answer_that_takes_for_ever_to_compare_is_wrong(task, monkeypatch):
    monkeypatch.setattr(gsm8k, "VERIFY_SECONDS", 1)
    assert score(task, "\\boxed{9^{9^{9^{9}}}}").reward == 0.0


# --- the files -------------------------------------------------------------------------------------------------------


def test_a_problem_is_its_question_an_instruction_and_a_number(task):
    asked = {example.prompt[0].content: example.answer for example in map(task.example, range(task.size))}
    question = json.loads(line(412))["question"]
    assert asked[f"{question}\n\n{INSTRUCTION}"] == "1236"  # `#### 1,236` in the file
    assert task.size == len(asked) == 60


def test_a_demonstration_is_the_worked_solution_without_its_notes(task):
    shown = task.demonstration(3)
    (answer,) = shown.messages
    assert "<<" not in answer.content and "####" not in answer.content and "That makes 4" in answer.content
    example = next(each for each in map(task.example, range(task.size)) if each.prompt == shown.prompt)
    assert task.rubric().score(example, said(answer.content)).parts["exact_match"] == 1.0


def test_every_row_of_a_question_is_demonstrated_by_its_own_solution(files, tmp_path):
    repeated = tmp_path / "repeated.jsonl"
    repeated.write_text("\n".join((line(412), line(412).replace("There are", "I see"))))
    task = Gsm8k(str(repeated), files["test_file"])
    assert {task.demonstration(index).messages[0].content[:5] for index in range(task.size)} == {"There", "I see"}


@pytest.mark.parametrize("final", ["#### 72", "####72", "#### -72 ", "#### 7,200", "#### 0.5", "#### .5"])
def test_the_ways_in_which_the_number_is_written_are_read(final, tmp_path):
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps({"question": "?", "answer": f"So.\n{final}"}) + "\n\n")
    other = tmp_path / "other.jsonl"
    other.write_text(line(3))
    answer = Gsm8k(str(file), str(other)).example(0).answer
    assert float(answer) == float(final.strip("# ").replace(",", ""))


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("{", "not a line of JSON"),
        (b"\xff\xfe", "not a line of JSON"),
        ("[1]", "expected an object"),
        ('{"question": "?"}', "expected an object with the texts `question` and `answer`"),
        ('{"question": "?", "answer": 3}', "expected an object"),
        ('{"question": " ", "answer": "#### 3"}', "the question is empty"),
        ('{"question": "?", "answer": "It is 3."}', "does not end in `#### N`.*'It is 3.'"),
        ('{"question": "?", "answer": "#### 3 lamps"}', "does not end in `#### N`"),
        ('{"question": "?", "answer": "#### 3\\nor so"}', "does not end in `#### N`"),
    ],
)
def test_a_line_that_is_no_problem_is_refused_with_its_number(bad, words, tmp_path):
    file = tmp_path / "bad.jsonl"
    bad = bad if isinstance(bad, bytes) else bad.encode()
    file.write_bytes(line(3).encode() + b"\n\n" + bad + b"\n" + line(4).encode())
    with pytest.raises(ConfigError, match=f"bad.jsonl:3: .*{words}"):
        Gsm8k(str(file))


# --- as it is used ---------------------------------------------------------------------------------------------------


async def test_a_group_is_asked_and_scored_in_a_process_of_its_own(files):
    setup = EnvironmentSetup(
        name=f"{FILE}:Gsm8k", kwargs=files, run_seed=3, grade_seconds=60.0, start_seconds=120.0, held_out=100
    )
    task = Gsm8k(**files, seed=3)
    process = UserCodePool(setup)
    info = await process.start()
    try:
        assert (info.size, info.held_out, info.multi_turn) == (60, 20, False)
        example = task.example(7)
        assert await process.call(UserCall(CallKind.EXAMPLE, Purpose.TRAIN, 7)) == ExamplePrompt(
            example.prompt, example.answer
        )
        texts = [f"\\boxed{{{example.answer}}}", "\\boxed{1}", "\\boxed{9^{9^{9^{9}}}}", ""]
        calls = [
            UserCall(CallKind.SCORE, Purpose.TRAIN, 7, Transcript(said(text).messages, said(text).finish_reasons))
            for text in texts
        ]
        assert [reward for reward, _ in await asyncio.gather(*map(process.call, calls))] == [1.0, 0.0, 0.0, 0.0]
        assert process.restarts == 0  # math-verify's own limits were kept
    finally:
        await process.close()


def test_answers_are_checked_in_any_thread(task):
    results = []
    thread = threading.Thread(target=lambda: results.append(score(task, "\\boxed{1234}").reward))
    thread.start()
    thread.join()
    assert results == [1.0]
