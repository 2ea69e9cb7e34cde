"""How real runs end before their time: what they say and save, with which exit code, and that nothing stays behind.

Each run is real and small (one generator), and interrupted in another phase.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
from leftovers import (
    ENDLESS,
    REPOSITORY,
    SIMULATED,
    SMALL,
    assert_nothing_is_left,
    ending,
    finish,
    process_of,
    start_run,
    stop,
    wait_for_line,
)

from titan_rl.run.runs import State, list_runs

FULL = functools.partial(pytest.param, marks=pytest.mark.acceptance)  # a cell of the full matrix


EASY = """
from titan_rl import config_registry
from titan_rl.environments.base import Environment, Example, Message, Rubric
from titan_rl.rollout.config import EnvironmentConfig


def anything_goes(example, transcript):
    return 1.0


class Easy(Environment):
    def example(self, index):
        return Example(prompt=(Message("user", f"{index % 10}="),), answer="")

    def held_out(self, count):
        return [Example(prompt=(Message("user", "10="),), answer="")]

    def rubric(self):
        return Rubric(anything_goes)


def recipe():
    config = config_registry.copy4()
    config.environment = EnvironmentConfig(name=f"{__file__}:Easy")
    config.evaluation.target_exact_match = 1.0
    return config
"""


def saved_step(output: str, runs: Path) -> int:
    """After which step the weights are that the run says it has saved; they are there."""
    (directory,) = runs.iterdir()
    (line,) = [line for line in output.splitlines() if line.startswith("the weights after step ")]
    assert line.endswith(str(directory / "checkpoint"))
    assert (directory / "checkpoint" / "model.safetensors").is_file()
    return int(line.split()[4])


@pytest.mark.parametrize("number", [signal.SIGTERM, FULL(signal.SIGHUP)], ids=lambda number: number.name)
def test_one_signal_after_a_step_saves_the_weights_and_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    run = start_run(*ENDLESS, *SIMULATED, runs=tmp_path)
    wait_for_line(run, "step ")
    run.send_signal(signal.SIGUSR1)
    told = wait_for_line(run, "4 more processes answer")
    output = stop(run, number)
    assert saved_step(output, tmp_path) >= 1
    (directory,) = tmp_path.iterdir()
    assert ending(output).startswith(f"the run was stopped by {number.name}; the weights after step ")
    assert f"; titan-rl train --resume {directory} goes on from step-" in ending(output)
    (listed,) = list_runs(tmp_path)
    assert listed.state is State.STOPPED and listed.how == f"was stopped by {number.name}" and listed.step >= 1
    check_what_every_process_answered(told, directory / "logs")


def check_what_every_process_answered(told: str, logs: Path) -> None:
    """Who was asked with SIGUSR1: where each task is, and the stacks."""
    assert told.endswith(f"{logs}\n")
    answers = {log.stem: log.read_text() for log in logs.iterdir() if log.stem != "fork-server"}
    assert set(answers) == {"controller", "trainer", "generator0", "router", "rollout0"}
    for name, answer in answers.items():
        assert f"{name} " in answer and re.search(r"\(pid \d+\) has \d+ tasks; its threads: MainThread", answer)
        assert "(most recent call first):" in answer and re.search(r"^task .* at ", answer, re.MULTILINE)
    assert re.search(r"^task TrainingLoop._\w+ at loop.py:\d+", answers["controller"], re.MULTILINE)
    assert "trainer_0 0x" in answers["trainer"] and "engine-loop-0 0x" in answers["generator0"], "their threads"


@pytest.mark.acceptance  # in CI: a generator that is not to be replaced, and scripted runs whose trainer died
def test_the_weights_of_a_trainer_that_is_not_to_be_replaced_are_lost(tmp_path: Path) -> None:
    run = start_run(*ENDLESS, "--placement.restarts", "0", runs=tmp_path)
    wait_for_line(run, "step ")
    os.kill(process_of(run.pid, "trainer"), signal.SIGKILL)
    output = finish(run)
    assert run.returncode == 1, output
    assert "the weights were not saved: " in output
    assert_nothing_is_left(run)


def test_a_run_directory_that_is_removed_is_a_sentence(tmp_path: Path) -> None:
    run = start_run(*SMALL, *SIMULATED, "--loop.steps", "2", "--logging.save-final", "false", runs=tmp_path)
    wait_for_line(run, "held-out")
    shutil.rmtree(tmp_path)
    output = finish(run)
    assert run.returncode == 1, output
    (line,) = [line for line in output.splitlines() if line.startswith("failed: ")]
    assert "No such file or directory" in line
    assert ending(output).endswith("no weights were saved; there is nothing to go on from: start it again")
    assert "Traceback" not in output
    assert_nothing_is_left(run)


@pytest.mark.acceptance  # in CI: scripted runs, tests/loop/test_stopping_early.py
def test_a_policy_that_has_learned_everything_ends_its_run_well(tmp_path: Path) -> None:
    task = tmp_path / "easy.py"
    task.write_text(EASY)
    run = start_run(
        *("--recipe", f"{task}:recipe", *SIMULATED, "--generator.count", "1", "--loop.groups-per-step", "4"),
        *("--loop.steps", "100000", "--loop.untrainable-batches", "2", "--evaluation.every", "0"),
        runs=tmp_path / "runs",
    )
    output = finish(run)
    assert run.returncode == 0, output
    assert "stopping early: nothing is left to learn" in output
    assert "held-out exact match 1.000 → 1.000" in output
    assert saved_step(output, tmp_path / "runs") < 100
    assert re.match(r"the run is done after step \d+, early: nothing is left to learn", ending(output))
    assert_nothing_is_left(run)


BROKEN = """
from titan_rl.environments.base import Demonstration, Environment, Example, Message, Rubric, ToolCall, tool
from titan_rl.importing import import_file
from titan_rl.rollout.config import EnvironmentConfig

TRAINED, HELD_OUT = (Example(prompt=(Message("user", prompt),), answer="1") for prompt in ("1=", "2="))


@tool
def look(page: str) -> str:
    raise LookupError("the pages are gone")


def right(example, transcript):
    return float(transcript.answer == example.answer)


class Broken(Environment):
    def example(self, index):
        return TRAINED

    def held_out(self, count):
        return [HELD_OUT]

    def rubric(self):
        return Rubric(right)

    def tools(self):
        return (look,)

    def demonstration(self, index):
        if index % 2:
            return Demonstration(prompt=HELD_OUT.prompt, messages=(Message("assistant", "1"),))
        call = Message("assistant", "", (ToolCall("look", {"page": "1"}),))
        return Demonstration(prompt=TRAINED.prompt, messages=(call,))


def recipe():
    config = import_file("REPOSITORY/rl_configs/tool_sum.py").tool_sum()
    config.environment = EnvironmentConfig(name=f"{__file__}:Broken")
    config.evaluation.target_exact_match = 0.0
    return config
"""


def test_a_run_whose_tool_always_fails_stops_and_names_it(tmp_path: Path) -> None:
    task = tmp_path / "broken.py"
    task.write_text(BROKEN.replace("REPOSITORY", str(REPOSITORY)))
    run = start_run(
        *("--recipe", f"{task}:recipe", "--generator.count", "1", "--trainer.warmup.steps", "40"),
        *("--trainer.warmup.batch", "32", "--loop.groups-per-step", "4", "--evaluation.every", "0"),
        runs=tmp_path / "runs",
    )
    output = finish(run)
    assert run.returncode == 1, output
    sentence = (
        r"tool failures: \d+ of the last \d+ rollouts \(\d+%\), more than rollout.failure_share = 0.5; "
        r"\d+ × tool calls of train prompt: LookupError: the pages are gone \(\S+broken.py:\d+ in look\); correct"
    )
    assert re.search(f"^failed: NothingToTrain: {sentence}", output, re.MULTILINE), output
    assert "failed: NothingToTrain: tool failures: " in ending(output)
    assert saved_step(output, tmp_path / "runs") < 10
    assert_nothing_is_left(run)
