"""Bundled tasks and those of `rl_configs`: prompts are functions of index and seed, held-out ones are never shown."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from titan_rl.environments.base import Environment, Message
from titan_rl.environments.copy import Copy
from titan_rl.environments.dataset import is_held_out
from titan_rl.errors import ConfigError, TaskError
from titan_rl.importing import import_file, import_name

BESIDE = Path(__file__).resolve().parents[2] / "rl_configs"
_sort, _tool_sum = import_file(BESIDE / "sort.py"), import_file(BESIDE / "tool_sum.py")
LETTERS, Sort = _sort.LETTERS, _sort.Sort
ToolSum, ToolSumAgent = _tool_sum.ToolSum, _tool_sum.ToolSumAgent
AlphabetSort = import_name(f"{BESIDE}/alphabet_sort.py:AlphabetSort")
Gsm8k = import_name(f"{BESIDE}/gsm8k.py:Gsm8k")
ReasoningGym = import_name(f"{BESIDE}/reasoning.py:ReasoningGym")
TURNS = {"min_turns": 2, "max_turns": 3}
SUMS = {
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 1,
    "max_digits": 1,
    "operators": ["+"],
    "allow_parentheses": False,
}
TASKS: dict[str, Callable[[int], Environment]] = {
    "copy": lambda seed: Copy(seed=seed),
    "copy of two digits": lambda seed: Copy(digits=2, seed=seed),
    "sort": lambda seed: Sort(seed=seed),
    "sort of three letters": lambda seed: Sort(letters=3, seed=seed),
    "tool_sum": lambda seed: ToolSum(seed=seed),
    "tool_sum_openai": lambda seed: ToolSumAgent(seed=seed),
    "alphabet_sort": lambda seed: AlphabetSort(seed=seed),
    "alphabet_sort of several turns": lambda seed: AlphabetSort(seed=seed, **TURNS),
    "reasoning_gym": lambda seed: ReasoningGym("chain_sum", seed=seed),
    "gsm8k": lambda seed: Gsm8k("problems.jsonl", seed=seed),
    "reasoning_gym with few questions": lambda seed: ReasoningGym("basic_arithmetic", SUMS, seed=seed),
}


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = ({"question": f"How much is {number} + 1?", "answer": f"#### {number + 1}"} for number in range(1500))
    Path("problems.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture(params=TASKS)
def make(request: pytest.FixtureRequest, rows: None) -> Callable[[int], Environment]:
    return TASKS[request.param]


def streams(task: Environment) -> list[Callable[[int], object]]:
    demonstrates = type(task).demonstration is not Environment.demonstration
    return [task.example, *([task.demonstration] if demonstrates else [])]


def test_everything_is_a_function_of_its_index_and_the_seed(make: Callable[[int], Environment]) -> None:
    for first, again, other in zip(*map(streams, map(make, (1, 1, 2))), strict=True):
        shown = [first(index) for index in range(20)]
        assert shown == [again(index) for index in reversed(range(20))][::-1]
        assert shown != [other(index) for index in range(20)]


def test_the_held_out_prompts_are_distinct_and_whatever_the_seed_and_at_most_as_many_as_asked_for(
    make: Callable[[int], Environment],
) -> None:
    some = make(1).held_out(5)
    assert some == make(2).held_out(5) and len({example.prompt for example in some}) == len(some) == 5


def test_neither_prompts_nor_demonstrations_show_a_held_out_prompt(make: Callable[[int], Environment]) -> None:
    task = make(1)
    held_out = {example.prompt for example in task.held_out(1000)}
    for stream in streams(task):
        assert held_out.isdisjoint(stream(index).prompt for index in range(1000))


def test_where_there_are_fewer_held_out_prompts_all_of_them_are_played():
    digits = {f"{number:04d}" for number in range(10_000)}
    letters = {first + second + third for first in LETTERS for second in LETTERS for third in LETTERS}
    for task, texts in ((Copy(digits=4), digits), (Sort(letters=3), letters)):
        held_out = [each.prompt[0].content.removesuffix("=") for each in task.held_out(100_000)]
        assert sorted(held_out) == sorted(filter(is_held_out, texts))
    assert len(ToolSum().held_out(1000)) > 700


def test_a_question_generator_that_makes_no_others_than_held_out_ones_is_refused(monkeypatch):
    monkeypatch.setattr(import_file(BESIDE / "reasoning.py"), "is_held_out", lambda text: True)
    with pytest.raises(TaskError, match="too few different questions"):
        ReasoningGym("gcd").example(0)


@pytest.mark.parametrize(
    ("cls", "kwargs", "words"),
    [
        (Copy, {"digits": 1}, "digits"),
        (Sort, {"letters": 1}, "letters"),
        (Sort, {"right_share": 1.5}, "right_share"),
        (ToolSum, {"tool_share": 1.5}, "tool_share"),
        (AlphabetSort, {"min_names": 6, "max_names": 5}, "2 <= min_names <= max_names, got 6 and 5"),
        (AlphabetSort, {"min_turns": 0}, "1 <= min_turns <= max_turns"),
        (AlphabetSort, {"min_turns": 2}, "got 2 and 1"),
        (AlphabetSort, {"min_added": 0}, "min_added"),
        (AlphabetSort, {"max_names": 20, "max_turns": 10, "max_added": 10}, "is 110, and there are only"),
        (ReasoningGym, {"task": "basic_arithmetics"}, "has no task 'basic_arithmetics'; it has .*basic_arithmetic,"),
        (ReasoningGym, {"task": "gcd", "config": {"terms": 2}}, "does not fit reasoning-gym's task 'gcd': .*'terms'"),
        (ReasoningGym, {"task": "gcd", "config": {"min_value": -5}}, "does not fit reasoning-gym's task 'gcd'"),
        (ReasoningGym, {"task": "gcd", "config": {"seed": 5}}, "the seed of task 'gcd' is environment.kwargs.seed"),
        (ReasoningGym, {"task": "gcd", "size": 0}, "size must be at least 1"),
        (ReasoningGym, {"task": "gcd", "answer": "box"}, "answer must be one of tags, text"),
    ],
)
def test_what_makes_no_task_is_refused(cls, kwargs, words):
    with pytest.raises(ConfigError, match=words):
        cls(**kwargs)


@pytest.mark.parametrize(
    ("package", "name", "extra"),
    [
        ("math_verify", "gsm8k", "math"),
        ("reasoning_gym", "reasoning_gym", "reasoning-gym"),
        ("openai", "tool_sum_openai", "agents"),
    ],
)
@pytest.mark.usefixtures("rows")
def test_a_missing_package_is_named_with_the_extra_to_install(monkeypatch, package, name, extra):
    for loaded in [each for each in sys.modules if each.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"needs? the package {package.replace('_', '-')} .*'titan-rl\[{extra}\]'"):
        TASKS[name](1)


def test_a_task_without_demonstrations_shows_its_right_answers():
    shown, example = Copy().demonstration(7), Copy().example(7)
    assert (shown.prompt, shown.messages) == (example.prompt, (Message("assistant", example.answer),))


def test_a_task_with_neither_says_so_when_it_is_asked():
    rows = [{"prompt": str(each), "answer": [each]} for each in range(30)]
    task = Environment.from_examples(rows, lambda example, transcript: 1.0)
    with pytest.raises(TaskError, match=r"no method `demonstration`, and example\(0\) no answer, a text or a"):
        task().demonstration(0)
