"""A signal in any phase of a run ends it in time and with a last line, and nothing stays behind.

The run sends itself the signals at a named point of the controller, so that a phase of milliseconds is hit as well.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from killed_run import PHASES as PLACES
from killed_run import POINTS, owner_of
from leftovers import assert_nothing_is_left, ending, finish, process_of, start_run, wait_for_line

KILLED_RUN = str(Path(__file__).with_name("killed_run.py"))
SETTINGS = (
    *(
        "--recipe",
        "rl_configs/sort.py:sort5",
        "--generator.count",
        "1",
        "--loop.groups-per-step",
        "4",
        "--evaluation.prompts",
        "20",
    ),
    *("--loop.steps", "4", "--checkpoint.every", "1", "--trainer.warmup.steps", "2"),
    *("--trainer.warmup.lr-warmup-steps", "0", "--trainer.warmup.batch", "16"),
    *("--evaluation.every", "2", "--evaluation.target-exact-match", "0"),
)
BOUND_SECONDS = 15.0
BUSY = 4.0
"""How many times slower this machine may be than a quiet one with two cores."""

ONCE, TWICE = "SIGTERM", "SIGINT SIGINT"
PHASES = {  # name → turn
    **{"config check": 1, "spawn": 1, "mid-spawn": 1, "set-up": 1, "warm-up": 1, "first pull": 1, "restore": 1},
    **{"mid-generation": 5, "mid-step": 2, "mid-publication": 2, "mid-evaluation": 2},
    **{"mid-cut": 1, "mid-checkpoint": 1, "before the rename": 1, "final save": 1, "closing": 1},
}
LATE = ("closing", "final save")
"""The result may have been decided before."""
SAMPLE = {("set-up", TWICE)}
"""Of CI, beside SIGTERM after a step (test_endings); the others belong to the acceptance list."""


@pytest.mark.parametrize("target", sorted({target for target, _, _ in (POINTS | PLACES).values()}))
def test_a_run_can_be_killed_or_stopped_at_every_point_that_is_named(target: str) -> None:
    owner, name = owner_of(target)
    assert callable(getattr(owner, name))


@pytest.fixture(scope="module")
def checkpointed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of which one has a checkpoint."""
    runs = tmp_path_factory.mktemp("runs")
    run = start_run(*SETTINGS, "--loop.steps", "2", "--logging.name", "before", runs=runs)
    output = finish(run)
    assert run.returncode == 0, output
    assert ending(output).startswith("the run is done after step 2; the weights after step 2 are in ")
    assert ending(output).endswith(" --loop.steps N trains it further")
    (directory,) = runs.iterdir()
    assert output.endswith(f"\nreport: {directory / 'report.html'}\n")
    assert "titan_rl report" in (directory / "report.html").read_text()
    return runs


@pytest.mark.parametrize(
    ("phase", "signals"),
    [
        pytest.param(phase, signals, marks=() if (phase, signals) in SAMPLE else pytest.mark.acceptance)
        for phase in PHASES
        for signals in (ONCE, TWICE)
    ],
)
def test_a_stopped_run_is_over_in_time_and_leaves_nothing(
    phase: str, signals: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("SIGNALS", signals)
    start: tuple[str, ...] = SETTINGS
    if phase == "restore":
        (before,) = shutil.copytree(request.getfixturevalue("checkpointed"), tmp_path, dirs_exist_ok=True).iterdir()
        start = ("--resume", str(before), "--loop.steps", "4")
    run = start_run(phase, str(PHASES[phase]), *start, runs=tmp_path, program=(KILLED_RUN,))
    wait_for_line(run, "signalled")
    asked = time.monotonic()
    output = finish(run)
    seconds = time.monotonic() - asked
    print(f"{phase}, {signals}: over after {seconds:.1f} s with exit code {run.returncode}: {ending(output)}")
    assert seconds < BUSY * BOUND_SECONDS, output
    assert "Traceback" not in output and "FATAL" not in output
    assert_nothing_is_left(run)
    stopped = -15 if phase == "config check" and signals == ONCE else {ONCE: 143, TWICE: 130}[signals]
    assert run.returncode in ((stopped, 0) if phase in LATE else (stopped,)), output
    if phase == "config check":
        assert list(tmp_path.iterdir()) == []
        return
    how = "is done after step 4" if run.returncode == 0 else "was stopped by "
    assert re.match(rf"the run {how}.*; (the weights after step \d+ are in|no weights were saved).*; ", ending(output))
    (directory,) = tmp_path.iterdir()
    assert f"titan-rl train --resume {directory} " in ending(output)


@pytest.mark.acceptance
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("victim", ["trainer", "generator0", "router", "rollout0"])
def test_a_run_that_is_stopped_while_a_part_is_replaced_is_over_in_time(
    victim: str, twice: bool, tmp_path: Path
) -> None:
    run = start_run(*SETTINGS, "--loop.steps", "100000", "--evaluation.every", "0", runs=tmp_path)
    wait_for_line(run, "step ")
    os.kill(process_of(run.pid, victim), signal.SIGKILL)
    wait_for_line(run, f"lost {victim}")
    asked = time.monotonic()
    run.send_signal(signal.SIGINT)
    if twice:
        wait_for_line(run, "Ctrl-C (SIGINT)")
        run.send_signal(signal.SIGINT)
    output = finish(run)
    seconds = time.monotonic() - asked
    print(f"{victim} is replaced, twice {twice}: over after {seconds:.1f} s: {ending(output)}")
    assert run.returncode == 130, output
    assert ending(output).startswith("the run was stopped by Ctrl-C (SIGINT); ")
    assert seconds < BUSY * BOUND_SECONDS, output
    assert "Traceback" not in output and "FATAL" not in output
    assert_nothing_is_left(run)
