"""Tasks of reasoning-gym with their own verifiers (10 s, most of it imports, several child processes)."""

import asyncio
import importlib.util
import pickle
from pathlib import Path

import pytest

from titan_rl.environments.base import Message, Transcript
from titan_rl.errors import ConfigError, TaskError
from titan_rl.importing import import_file
from titan_rl.isolation.pool import UserCodePool
from titan_rl.isolation.wire import CallKind, EnvironmentSetup, UserCall
from titan_rl.types import FinishReason, Purpose

FILE = Path(__file__).resolve().parents[2] / "rl_configs" / "reasoning.py"
reasoning = import_file(FILE)
INSTRUCTION, SOURCE_ONLY = reasoning.INSTRUCTION, reasoning.SOURCE_ONLY
ReasoningGym, import_gym = reasoning.ReasoningGym, reasoning.import_gym

SUMS = {
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 1,
    "max_digits": 1,
    "operators": ["+"],
    "allow_parentheses": False,
    "allow_negation": False,
}
VARIED = ("basic_arithmetic", "spell_backward", "countdown", "maze", "knights_knaves", "number_sorting", "arc_1d")


def said(example, text, finish_reason=FinishReason.STOP) -> Transcript:
    return Transcript((*example.prompt, Message("assistant", text)), (finish_reason,))


def score(task, example, text, finish_reason=FinishReason.STOP):
    return task.rubric().score(example, said(example, text, finish_reason))


def question(example) -> str:
    return example.answer["question"]


def available_tasks() -> list[str]:
    left_out = {task for name, tasks in SOURCE_ONLY.items() if importlib.util.find_spec(name) is None for task in tasks}
    return sorted(import_gym().factory.DATASETS.keys() - left_out - {"composite"})


@pytest.mark.parametrize("name", VARIED)
def test_a_tasks_own_answer_satisfies_its_own_verifier(name):
    task = ReasoningGym(name)
    example = task.example(3)
    parts = score(task, example, f"I think <answer>{example.answer['answer']}</answer>").parts
    assert parts == {"verified": 1.0, "exact_match": 1.0, "verifier_failed": 0.0}
    assert example.prompt == (Message("user", f"{question(example)}\n\n{INSTRUCTION}"),)


@pytest.mark.acceptance
@pytest.mark.parametrize("name", available_tasks())
def test_every_task_asks_the_same_again_and_scores_every_text(name):
    task = ReasoningGym(name, size=40)
    example, again = task.example(3), ReasoningGym(name, size=40).example(3)
    assert (example.prompt, example.answer["answer"]) == (again.prompt, again.answer["answer"])
    assert question(pickle.loads(pickle.dumps(example))) == question(example)
    assert task.held_out(2) and not {question(each) for each in task.held_out(2)} & {question(example)}
    for text in ("", "x", "42", "[1, 2]", "{}", "((", "é", "1/0"):
        assert score(task, example, f"<answer>{text}</answer>").parts.keys() >= {"verified", "exact_match"}
    answer = example.answer["answer"]
    if isinstance(answer, str):
        assert score(task, example, f"<answer>{answer}</answer>").parts["exact_match"] == 1.0


def test_the_last_answer_between_tags_counts():
    task = ReasoningGym("basic_arithmetic", SUMS)
    example = task.example(0)
    right = example.answer["answer"]
    assert score(task, example, f"<answer>x</answer> no: <answer>\n{right}\n</answer>").reward == 1.0
    assert score(task, example, f"<answer>{right}</answer> no: <answer>x</answer>").reward == 0.0
    assert score(task, example, right).reward == 0.0
    assert score(task, example, f"<answer>{right}").reward == 0.0


def test_the_whole_text_can_be_the_answer_and_an_exact_match_needs_its_end():
    task = ReasoningGym("basic_arithmetic", SUMS, answer="text")
    example = task.example(0)
    assert example.prompt == (Message("user", question(example)),)
    assert score(task, example, example.answer["answer"]).reward == 1.0
    cut = score(task, example, example.answer["answer"], FinishReason.LENGTH).parts
    assert (cut["verified"], cut["exact_match"]) == (1.0, 0.0)
    assert score(task, example, "").reward == 0.0


def test_tasks_can_be_mixed():
    sources = [{"name": "gcd", "weight": 1, "config": {}}, {"name": "lcm", "weight": 1, "config": {}}]
    task = ReasoningGym("composite", {"datasets": sources})
    examples = [task.example(index) for index in range(20)]
    assert {example.answer["metadata"]["source_dataset"] for example in examples} == {"gcd", "lcm"}
    assert all(score(task, each, f"<answer>{each.answer['answer']}</answer>").reward == 1.0 for each in examples)


def test_demonstrations_are_right_answers():
    for kwargs in ({}, {"answer": "text"}):
        task = ReasoningGym("basic_arithmetic", SUMS, **kwargs)
        shown = task.demonstration(4)
        (answer,) = shown.messages
        example = next(
            each for each in map(task.example, range(10_000)) if each.prompt == shown.prompt
        )  # a hundred sums: it is also asked
        assert score(task, example, answer.content).parts["exact_match"] == 1.0


def test_a_task_without_answers_cannot_be_demonstrated():
    with pytest.raises(TaskError, match="'graph_color' comes without answers"):
        ReasoningGym("graph_color").demonstration(0)


def test_a_verifier_that_chokes_on_an_answer_gives_nothing_and_is_counted():
    task = ReasoningGym("prime_factorization")
    example = task.example(0)
    assert score(task, example, "<answer>no idea</answer>").parts == {
        "verified": 0.0,
        "exact_match": 0.0,
        "verifier_failed": 1.0,
    }
    assert score(task, example, f"<answer>{example.answer['answer']}</answer>").reward == 1.0


@pytest.mark.parametrize(("package", "tasks"), SOURCE_ONLY.items())
def test_a_task_that_takes_a_package_without_wheels_is_refused_without_it(package, tasks):
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    for task in tasks:
        with pytest.raises(ConfigError, match=f"pip install {package}"):
            ReasoningGym(task)


@pytest.mark.parametrize("name", ["isomorphic_strings", "word_ladder"])
async def test_a_task_that_walks_sets_asks_the_same_in_another_process(name):
    setup = EnvironmentSetup(
        name=f"{FILE}:ReasoningGym", kwargs={"task": name}, run_seed=3, step_seconds=60.0, start_seconds=120.0
    )
    prompts = []
    for _ in range(2):
        process = UserCodePool(setup)
        await process.start()
        try:
            calls = [UserCall(CallKind.EXAMPLE, Purpose.TRAIN, index) for index in range(4)]
            prompts.append(await asyncio.gather(*map(process.call, calls)))
        finally:
            await process.close()
    assert prompts[0] == prompts[1]
