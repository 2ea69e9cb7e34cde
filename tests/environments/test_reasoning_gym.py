"""Tasks of reasoning-gym with their own verifiers (10 s, most of it imports, several child processes)."""

import asyncio
import importlib.util
import pickle
import subprocess
import sys

import pytest

from titan_rl.environments.base import Message, Transcript
from titan_rl.environments.dataset import is_held_out
from titan_rl.environments.reasoning_gym import INSTRUCTION, SOURCE_ONLY, ReasoningGym, import_gym
from titan_rl.errors import ConfigError, TaskError
from titan_rl.sandbox.sandbox import Sandbox
from titan_rl.sandbox.wire import Call, CallKind, Conversation, EnvironmentSetup, ExamplePrompt
from titan_rl.types import FinishReason, Purpose

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
SLOW_TO_IMPORT = ("torch", "vllm", "transformers", "monarch")


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
    task = ReasoningGym(name, split="seed", size=40)
    example, again = task.example(3), ReasoningGym(name, split="seed", size=40).example(3)
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


def test_the_whole_text_can_be_the_answer():
    task = ReasoningGym("basic_arithmetic", SUMS, answer="text")
    example = task.example(0)
    assert example.prompt == (Message("user", question(example)),)
    assert score(task, example, example.answer["answer"]).reward == 1.0
    assert score(task, example, "").reward == 0.0


def test_an_exact_match_needs_the_end_of_the_answer():
    task = ReasoningGym("basic_arithmetic", SUMS, answer="text")
    example = task.example(0)
    parts = score(task, example, example.answer["answer"], FinishReason.LENGTH).parts
    assert (parts["verified"], parts["exact_match"]) == (1.0, 0.0)


def test_the_tasks_own_settings_and_an_instruction_are_passed_on():
    short, long = (ReasoningGym("chain_sum", {"min_terms": terms, "max_terms": terms}) for terms in (2, 9))
    assert len(question(short.example(0))) < len(question(long.example(0)))
    task = ReasoningGym("chain_sum", instruction="In tags, please.")
    assert task.example(0).prompt[0].content.endswith("\n\nIn tags, please.")


def test_tasks_can_be_mixed():
    sources = [{"name": "gcd", "weight": 1, "config": {}}, {"name": "lcm", "weight": 1, "config": {}}]
    task = ReasoningGym("composite", {"datasets": sources})
    examples = [task.example(index) for index in range(20)]
    assert {example.answer["metadata"]["source_dataset"] for example in examples} == {"gcd", "lcm"}
    assert all(score(task, each, f"<answer>{each.answer['answer']}</answer>").reward == 1.0 for each in examples)


def test_no_question_is_both_trained_and_held_out_even_where_there_are_few():
    task = ReasoningGym("basic_arithmetic", SUMS)
    held_out = {question(example) for example in task.held_out(1000)}
    trained = {question(task.example(index)) for index in range(1000)}
    taught = {task.demonstration(index).prompt[0].content.partition("\n")[0] for index in range(1000)}
    assert 5 < len(held_out) < 30 and len(trained) > 80  # of some 120 there are
    assert all(is_held_out(text) for text in held_out)
    assert not held_out & trained and not held_out & taught


def test_a_task_that_draws_slowly_can_be_split_by_seed():
    task = ReasoningGym("sudoku", split="seed")
    held_out = [question(example) for example in task.held_out(3)]
    assert len(held_out) == len(set(held_out)) == 3
    assert not {question(task.example(index)) for index in range(3)} & set(held_out)


def test_a_prompt_is_a_function_of_its_index_and_the_seed():
    first, again, other = (ReasoningGym("chain_sum", seed=seed) for seed in (1, 1, 2))
    examples = [first.example(index) for index in range(20)]
    assert examples == [again.example(index) for index in reversed(range(20))][::-1]
    assert examples != [other.example(index) for index in range(20)]
    assert first.held_out(10) == other.held_out(10)
    assert [first.demonstration(n) for n in range(9)] == [again.demonstration(n) for n in range(9)]


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


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"task": "basic_arithmetics"}, "has no task 'basic_arithmetics'; it has .*basic_arithmetic,"),
        ({"task": "gcd", "config": {"terms": 2}}, "does not fit reasoning-gym's task 'gcd': .*'terms'"),
        ({"task": "gcd", "config": {"min_value": -5}}, "does not fit reasoning-gym's task 'gcd'"),
        ({"task": "gcd", "config": {"seed": 5}}, "the seed of task 'gcd' is environment.kwargs.seed"),
        ({"task": "gcd", "size": 0}, "size must be at least 1"),
        ({"task": "gcd", "split": "luck"}, "split must be one of question, seed"),
        ({"task": "gcd", "answer": "box"}, "answer must be one of tags, text"),
    ],
)
def test_what_makes_no_task_is_refused(kwargs, words):
    with pytest.raises(ConfigError, match=words):
        ReasoningGym(**kwargs)


def test_the_missing_package_is_named_with_the_extra_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"needs the package reasoning-gym .*pip install 'titan-rl\[reasoning-gym\]'"):
        ReasoningGym("gcd")


@pytest.mark.parametrize(("package", "tasks"), SOURCE_ONLY.items())
def test_a_task_that_takes_a_package_without_wheels_is_refused_without_it(package, tasks):
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    for task in tasks:
        with pytest.raises(ConfigError, match=f"pip install {package}"):
            ReasoningGym(task)


NEEDED = """
import sys, types
packages = sys.argv[1:]
for blocked in packages:
    sys.modules.update({package: types.ModuleType(package) for package in packages})
    sys.modules[blocked] = None
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        print(error.name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]:
        del sys.modules[name]
"""


def test_reasoning_gym_still_imports_those_packages_whatever_the_task():
    """Fails when one of them can be dropped from `SOURCE_ONLY`."""
    run = subprocess.run([sys.executable, "-c", NEEDED, *SOURCE_ONLY], capture_output=True, text=True, check=True)
    assert run.stdout.split() == [*SOURCE_ONLY]


def test_making_a_task_loads_nothing_slow():
    program = (
        "import sys, titan_rl.environments.reasoning_gym as adapter\n"
        "assert 'reasoning_gym' not in sys.modules\n"
        "adapter.ReasoningGym('gcd').example(0)\n"
        f"print([name for name in {SLOW_TO_IMPORT} if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["isomorphic_strings", "word_ladder"])
async def test_a_task_that_walks_sets_asks_the_same_in_another_process(name):
    setup = EnvironmentSetup(
        name="reasoning_gym", kwargs={"task": name}, run_seed=3, step_seconds=60.0, start_seconds=120.0
    )
    prompts = []
    for _ in range(2):
        process = Sandbox(setup)
        await process.start()
        try:
            calls = [Call(CallKind.EXAMPLE, Purpose.TRAIN, index) for index in range(4)]
            prompts.append(await asyncio.gather(*map(process.call, calls)))
        finally:
            await process.close()
    assert prompts[0] == prompts[1]


async def test_a_group_is_asked_and_scored_in_a_process_of_its_own():
    kwargs = {"task": "basic_arithmetic", "config": SUMS, "answer": "text"}
    setup = EnvironmentSetup(
        name="reasoning_gym", kwargs=kwargs, run_seed=3, step_seconds=60.0, start_seconds=120.0, held_out=4
    )
    task = ReasoningGym(**kwargs, seed=3)
    process = Sandbox(setup)
    info = await process.start()
    try:
        assert (info.size, info.held_out, info.multi_turn) == (10_000, 4, False)
        asked: ExamplePrompt = await process.call(Call(CallKind.EXAMPLE, Purpose.TRAIN, 7))
        assert asked.prompt == task.example(7).prompt and str(task.example(7).answer["answer"]) in asked.wanted
        for purpose, example in ((Purpose.TRAIN, task.example(7)), (Purpose.EVALUATE, task.held_out(4)[2])):
            index = 7 if purpose is Purpose.TRAIN else 2
            for text, reward in ((example.answer["answer"], 1.0), ("x", 0.0)):
                transcript = said(example, text)
                call = Call(
                    CallKind.SCORE, purpose, index, Conversation(transcript.messages, transcript.finish_reasons)
                )
                assert (await process.call(call))[0] == reward
    finally:
        await process.close()
