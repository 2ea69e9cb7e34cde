"""What `titan-rl runs` says of run directories, from their files alone (milliseconds)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from titan_rl.cli import main
from titan_rl.directories import lock_run
from titan_rl.run.runs import State, list_runs

CONFIG = 'recipe = "nowhere:gone"\n[loop]\nsteps = 30\n'
STEPS = [{"step": 19, "train/loss": 1.0}, {"step": 20, "train/loss": 0.5}, {"step": 19, "evaluation/exact_match": 0.25}]
"""The evaluation of a step may be over after the next step."""


def make_run(runs: Path, name: str, *, ending: dict | None = None, age: int = 0) -> Path:
    run = runs / name
    run.mkdir()
    (run / "config.toml").write_text(CONFIG)
    os.utime(run / "config.toml", (1e9 - age, 1e9 - age))
    (run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in STEPS) + '{"step": 21, "tra')
    if ending is not None:
        (run / "ending.json").write_text(json.dumps(ending))
    return run


@pytest.mark.parametrize(("code", "state"), [(0, State.DONE), (1, State.FAILED), (2, State.FAILED), (143, "stopped")])
def test_a_run_that_ended_says_how(tmp_path, code, state):
    make_run(tmp_path, "one", ending={"exit_code": code, "how": "so"})
    (listed,) = list_runs(tmp_path)
    assert (listed.state, listed.how) == (state, "so")
    assert (listed.step, listed.steps, listed.score) == (20, 30, 0.25)


def test_a_run_without_an_ending_is_running_while_its_lock_is_held_and_dead_after(tmp_path):
    run = make_run(tmp_path, "one")
    lock = lock_run(run)
    assert list_runs(tmp_path)[0].state is State.RUNNING
    os.close(lock)
    assert list_runs(tmp_path)[0].state is State.DEAD


def test_a_run_that_goes_on_is_running_whatever_it_said_when_it_ended(tmp_path):
    run = make_run(tmp_path, "one", ending={"exit_code": 143, "how": "was stopped"})
    lock = lock_run(run)
    assert list_runs(tmp_path)[0].state is State.RUNNING
    os.close(lock)
    assert list_runs(tmp_path)[0].state is State.STOPPED


def test_looking_at_a_run_does_not_keep_it_from_going_on(tmp_path):
    run = make_run(tmp_path, "one")
    list_runs(tmp_path)
    os.close(lock_run(run))


def test_the_newest_run_is_the_last_and_each_that_ended_says_how_to_go_on(tmp_path, capsys):
    old = make_run(tmp_path, "zebra", age=60, ending={"exit_code": 1, "how": "failed: OSError: no space"})
    (old / "checkpoints" / "step-00000020").mkdir(parents=True)
    make_run(tmp_path, "ant")
    (tmp_path / "no run").mkdir()
    assert main(["runs", str(tmp_path)]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["run", "state", "step", "score", "started"],
        ["zebra", "failed", "20/30", "0.250", *f"{list_runs(tmp_path)[0].started:%Y-%m-%d %H:%M}".split()],
        "failed: OSError: no space".split(),
        f"titan-rl train --resume {old} goes on from step-00000020".split(),
        ["ant", "dead", "20/30", "0.250", *f"{list_runs(tmp_path)[1].started:%Y-%m-%d %H:%M}".split()],
        f"titan-rl train --resume {tmp_path / 'ant'} starts it over: it has no checkpoint".split(),
    ]


def test_damaged_files_are_no_reason_to_fail(tmp_path):
    run = make_run(tmp_path, "one")
    for file in ("config.toml", "metrics.jsonl", "ending.json"):
        (run / file).write_bytes(b"\xff{")
    (listed,) = list_runs(tmp_path)
    assert (listed.state, listed.step, listed.steps, listed.score) == (State.DEAD, 0, None, None)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["nowhere"], "no directory"), (["."], "no run"), ([".", "--loop.steps", "3"], "loop.steps")],
)
def test_what_cannot_be_listed_is_refused_in_a_sentence(tmp_path, monkeypatch, capsys, arguments, word):
    monkeypatch.chdir(tmp_path)
    assert main(["runs", *arguments]) == 2
    assert word in capsys.readouterr().err
