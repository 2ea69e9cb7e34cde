"""`titan-rl try` as a user calls it: by hand, by demonstration, and what it says of a task that is wrong (each 1 s)."""

from __future__ import annotations

import asyncio
import io
import queue
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console

from titan_rl.cli import main
from titan_rl.errors import ConfigError
from titan_rl.playing import try_task
from titan_rl.playing.try_task import Person, read_turn
from titan_rl.types import Message, ToolCall, ToolSpec

RL_CONFIGS = Path(__file__).resolve().parents[2] / "rl_configs"

TASK = """
from titan_rl.environments.base import Demonstration, Environment, EnvironmentReply, Example, Message, Rubric, tool


@tool
def add(first: int, second: int = 1) -> str:
    "Adds two numbers."
    return str(first + second)


def right(example, transcript):
    return {"right": transcript.answer == example.answer, "turns": float(len(transcript.finish_reasons))}


def broken(example, transcript):
    return example.no_such_thing


class Sums(Environment):
    def __init__(self, base: int = 5):
        self.base = base

    def example(self, index):
        return Example(prompt=(Message("user", f"{self.base}+{index}="),), answer=str(self.base + index))

    def held_out(self, count):
        return [Example(prompt=(Message("user", "1000+1="),), answer="1001")][:count]

    def tools(self):
        return [add]

    def rubric(self):
        return Rubric(right)


class Broken(Sums):
    def rubric(self):
        return Rubric(broken)


class Shown(Sums):
    def demonstration(self, index):
        example = self.example(index)
        said = (Message("assistant", example.answer if index else "no idea"),)
        return Demonstration(prompt=example.prompt, messages=said, answer=example.answer if index < 2 else None)


class Ok(Shown):
    def example(self, index):
        return Example(prompt=(Message("user", "\\x1b[2J[bold]:Ok:"),), answer="\\x1b]0;")


class Unshown(Shown):
    def demonstration(self, index):
        raise ValueError("none today")


class Deadly(Shown):
    def demonstration(self, index):
        import os, time

        with open(f"/proc/{os.getppid()}/stat") as reaper:
            os.kill(int(reaper.read().rpartition(")")[2].split()[1]), 9)
        time.sleep(60)


class Editing(Sums):
    async def play(self, example, endpoint):
        from openai import AsyncOpenAI

        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as policy:
            for question in ("first?", "second?"):
                said = [{"role": "user", "content": question}]
                await policy.chat.completions.create(model=endpoint.model, messages=said)


class Endless(Shown):
    def respond(self, example, transcript):
        return EnvironmentReply(messages=(Message("user", "and now?"),))
"""


@pytest.fixture
def task(tmp_path, monkeypatch):
    (tmp_path / "sums.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def tried(name, *arguments, typed=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        return main(["try", f"sums.py{name}" if name.startswith(":") else name, *arguments])

    return tried


def lines_of(capsys) -> list[str]:
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_what_is_typed_is_played_with_tools_and_graded_part_by_part(task, capsys):
    typed = '/add {"first": 5, "second": 0}\n5\n/add {"first": "x"}\n/sub 3\nsix\\\nor so\n'
    assert task(":Sums", "--prompts", "3", typed=typed) == 0
    assert lines_of(capsys)[3:] == [
        "policy: type the policy's turns; a line that ends in \\ goes on; /TOOL {JSON} calls a tool; Ctrl-D ends",
        *[f"training prompt 0 {'─' * 102}", "user 5+0="],
        *["assistant → add(first=5, second=0)", "tool 5", "assistant 5"],
        "reward 1.000 (right 1, turns 2) stopped: stop",
        *[f"training prompt 1 {'─' * 102}", "user 5+1=", 'assistant → add(first="x")'],
        "tool Error: the arguments of add do not fit: first: Input should be a valid integer, unable to parse "
        "string as an integer",
        "there is no tool 'sub'; there are add",
        *["assistant six", "or so", "reward 0.000 (right 0, turns 2) stopped: stop wanted: 6"],
        *[f"training prompt 2 {'─' * 102}", "user 5+2=", "", "─" * 120],
        "2 rollouts graded, mean reward 0.500",
    ]


def test_demonstrations_are_played_against_the_task_and_graded_where_they_can_be(task, capsys):
    assert task(":Shown") == 0
    said = lines_of(capsys)
    assert "policy: its own demonstrations" in said
    assert [line for line in said if line.startswith(("assistant", "reward", "not graded"))] == [
        *["assistant no idea", "reward 0.000 (right 0, turns 1) stopped: stop wanted: 5"],
        *["assistant 6", "reward 1.000 (right 1, turns 1) stopped: stop"],
        *["assistant 7", "not graded: Demonstration.answer is not set"],
    ]
    assert said[-1] == "2 rollouts graded, mean reward 0.500"


def test_the_end_of_the_host_under_a_task_is_said_in_a_sentence(task, capsys):
    assert task(":Deadly") == 1
    assert "the process that it was forked from was killed by signal 9 (SIGKILL)" in capsys.readouterr().err


def test_names_and_texts_are_shown_as_they_are_and_cannot_control_the_terminal(task, capsys):
    assert task(":Ok", "--prompts", "1") == 0
    out = capsys.readouterr().out
    assert "sums.py:Ok: several turns" in out and "user       \\x1b[2J[bold]:Ok:\n" in out
    assert "wanted: \\x1b]0;\n" in out and "\x1b" not in out


def test_a_demonstration_that_cannot_be_made_or_ends_before_its_task_says_so(task, capsys):
    assert task(":Endless", "--prompts", "1") == 1
    assert "error the task goes on where the demonstration has ended: it has no further turn" in lines_of(capsys)
    assert task(":Unshown", "--prompts", "1") == 1
    assert "titan-rl try: demonstration 0: ValueError: none today" in capsys.readouterr().err


def test_weights_of_a_run_play_with_its_settings(task, tmp_path, monkeypatch):
    (tmp_path / "run" / "checkpoint").mkdir(parents=True)
    (tmp_path / "run" / "checkpoint" / "config.json").touch()
    (tmp_path / "run" / "config.toml").write_text('recipe = "copy4"\n[rollout.sampling]\nmax_new_tokens = 7\n')
    played = []
    monkeypatch.setattr(try_task, "run_until_signal", lambda verb, config, *_: played.append(config) or 0)
    assert task(":Sums", "--policy", "run") == task(":Sums", "--policy", "run/checkpoint") == 0
    assert [each.rollout.sampling.max_new_tokens for each in played] == [7, 7]
    assert played[0].environment.name.endswith("sums.py:Sums") and not played[0].environment.kwargs


def test_an_error_of_the_task_is_shown_with_its_line_and_fails_the_trial(task, tmp_path, capsys):
    assert task(":Broken", "--prompts", "1", "--held-out", typed="1001\n") == 1
    line = TASK.splitlines().index("    return example.no_such_thing") + 1
    where = f"({tmp_path / 'sums.py'}:{line} in broken)"
    said = "AttributeError: 'Example' object has no attribute 'no_such_thing'"
    out = lines_of(capsys)
    assert f"error score of evaluate prompt 0: {said} {where}" in out
    assert out[-1] == "0 rollouts graded; 1 failed and would not be trained"


def test_a_task_that_programs_play_is_typed_through_a_gateway(task, capsys):
    assert (
        task(
            f"{RL_CONFIGS}/tool_sum.py:ToolSumAgent",
            "--policy",
            "typed",
            "--prompts",
            "1",
            typed='/calculate {"expression": "4+5"}\n9\n',
        )
        == 0
    )
    said = lines_of(capsys)
    assert ['assistant → calculate(expression="4+5")', "tool 9", "assistant 9"] == said[6:9]
    assert said[9] == "reward 0.000 (exact_match 0, tool_use 1) stopped: done wanted: 55"


def test_the_arguments_of_a_task_reach_it(task, capsys):
    assert task(":Sums", "--environment.kwargs.base", "7", "--prompts", "1", typed="7\n") == 0
    assert "user 7+0=" in lines_of(capsys)


def test_every_question_of_a_program_that_edits_its_history_is_shown(task, capsys):
    assert task(":Editing", "--policy", "typed", "--prompts", "1", typed="one\ntwo\n") == 0
    assert [line for line in lines_of(capsys) if line.startswith(("user", "another", "assistant"))] == [
        *["user first?", "assistant one", "another conversation:", "user second?", "assistant two"]
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([":Nothing"], "has no 'Nothing'"),
        ([":right"], "is no subclass"),
        (["kopy"], "did you mean copy?"),
        (["sums.py"], "sums.py has several tasks: say which, as "),
        ([":Sums", "--policy", "no-such-run"], "there is no no-such-run: a policy is a run, a checkpoint"),
        ([":Sums", "--environment.kwargs.bse", "3"], "Sums takes no such argument (did you mean base?)"),
        ([":Sums", "--policy", "demonstrations"], "has no method `demonstration`; --policy typed asks you"),
        ([":Sums", "--prompts", "none"], "--prompts: expected a number from 1 on, got 'none'"),
        ([":Sums", "--policy", "."], " is no run directory: there is no config.toml"),
    ],
)
def test_what_cannot_be_tried_is_refused_in_a_sentence(task, capsys, arguments, words):
    assert task(*arguments) == 2
    assert words in capsys.readouterr().err


ADD = ToolSpec("add", "", {"properties": {"first": {"type": "integer"}, "note": {"type": "string"}}})
LOOK = ToolSpec("look", "", {"properties": {"where": {"type": "string"}}})


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ('/add {"first": [1]}', ("add", {"first": [1]})),
        ("/add", ("add", {})),
        ('/look\n{"where": "under the bed"}', ("look", {"where": "under the bed"})),
    ],
)
def test_a_typed_call_is_read(text, call):
    assert read_turn(text, [ADD, LOOK]) == Message("assistant", "", (ToolCall(*call),))
    assert read_turn(text, []) == Message("assistant", text), "without tools everything is text"


@pytest.mark.parametrize("text", ["/sub 1", "/add 5", '/add {"first"', "/add [5]"])
def test_a_typed_call_that_cannot_be_read_is_refused(text):
    with pytest.raises(ConfigError):
        read_turn(text, [ADD, LOOK])


async def test_a_line_typed_after_a_turn_that_was_cancelled_is_the_next_turns(monkeypatch):
    typed, asked = queue.Queue(), threading.Event()

    def read(prompt):
        asked.set()
        return typed.get()

    monkeypatch.setattr("builtins.input", read)
    person = Person(Console(file=io.StringIO()))
    cancelled = asyncio.ensure_future(person.next_message((), (), None))
    await asyncio.to_thread(asked.wait)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    async with asyncio.timeout(10):
        for line in ("first", "second"):
            typed.put(line)
            assert (await person.next_message((), (), None))[0].content == line


async def test_each_question_of_a_program_that_asks_several_at_once_is_shown_before_it_is_answered(monkeypatch):
    shown, seen = io.StringIO(), []

    def read(prompt):
        seen.append(shown.getvalue())
        return "said"

    monkeypatch.setattr("builtins.input", read)
    person = Person(Console(file=shown))
    async with asyncio.timeout(10):
        await asyncio.gather(*(person.next_message([Message("user", text)], (), None) for text in ("first", "second")))
    assert "second" not in seen[0] and seen[1].rstrip().endswith("second")
