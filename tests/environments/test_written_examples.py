"""The tasks that READMEs show (0.2 s)."""

import re
from pathlib import Path

import pytest

import titan_rl.environments.base as base
from titan_rl.environments.base import Environment, Message, Transcript
from titan_rl.types import FinishReason

PACKAGE = Path(base.__file__).parents[1]


def python_blocks(room: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (PACKAGE / room / "README.md").read_text(), re.DOTALL)


def tasks_of(code: str) -> list[type[Environment]]:
    names: dict = {"__name__": "written", "__file__": "written.py"}
    exec(compile(code, "written", "exec"), names)
    return [each for each in names.values() if isinstance(each, type) and issubclass(each, Environment)]


@pytest.mark.parametrize("code", python_blocks("environments")[:2])
def test_a_task_that_is_shown_plays(code):
    task = tasks_of(code)[-1]()
    trained = [task.example(index) for index in range(20)]
    held_out = task.held_out(20)
    assert held_out and not {each.prompt for each in trained} & {each.prompt for each in held_out}
    for example, reward in ((trained[0], 1.0), (held_out[0], 1.0)):
        said = Transcript((*example.prompt, Message("assistant", str(example.answer))), (FinishReason.STOP,))
        assert task.rubric().score(example, said).reward == reward


@pytest.mark.parametrize("room", ["environments", "rollout"])
def test_every_snippet_runs(room):
    for code in python_blocks(room):
        tasks_of(code)
