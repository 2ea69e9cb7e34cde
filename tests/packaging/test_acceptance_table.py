"""scripts/acceptance.py: a job that fails, hangs or says nothing is a row that missed (2 s)."""

import importlib.util
import json
import os
import select
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def load_acceptance_module():
    spec = importlib.util.spec_from_file_location("acceptance_runner", SCRIPTS / "acceptance.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


acceptance = load_acceptance_module()


def job(program: str, at_most: dict[str, float] | None = None, **at_least: float):
    command = [sys.executable, "-c", program]
    return acceptance.Job("probe", lambda directory: command, acceptance.last_line_json, at_least, at_most or {})


def verdicts(rows) -> dict[str, bool]:
    return {row.figure: row.passed for row in rows}


def test_figures_come_from_the_last_line_and_are_held_against_their_bounds(tmp_path):
    figures = {"ratio": 0.93, "speed": 5.0, "size": 1100.0, "cells": {"tp1": 1}, "broken": float("nan")}
    program = f"print('a table'); print('''{json.dumps(figures)}''')"
    rows = acceptance.judge(job(program, {"size": 1024}, ratio=0.92, speed=6, broken=0, absent=1), tmp_path / "job")
    assert verdicts(rows) == {
        "the program": True,
        "ratio": True,
        "speed": False,
        "size": False,
        "cells.tp1": True,
        "broken": False,
        "absent": False,
    }
    assert "a table" in (tmp_path / "job" / "output.log").read_text()


def test_a_program_that_fails_misses_even_with_good_figures(tmp_path):
    rows = acceptance.judge(job("print('{\"ratio\": 1.0}'); raise SystemExit(1)", ratio=0.5), tmp_path / "job")
    assert verdicts(rows) == {"the program": False, "ratio": True}


@pytest.mark.parametrize("program", ["pass", "print('done')", "print([1])"])
def test_a_program_without_figures_misses(tmp_path, program):
    rows = acceptance.judge(job(program), tmp_path / "job")
    assert verdicts(rows) == {"the program": True, "figures": False}


def test_a_program_that_hangs_is_stopped_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(acceptance, "JOB_SECONDS", 1.0)
    child = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    program = f"import signal, subprocess, sys; subprocess.Popen([sys.executable, '-c', '''{child}''']); signal.pause()"
    rows = acceptance.judge(job(program), tmp_path / "job")
    assert not verdicts(rows)["the program"]
    pid = int((tmp_path / "job" / "output.log").read_text())
    assert ended(pid)


def ended(pid: int) -> bool:
    """Whether the process is gone, or goes within the seconds that a killed one may take."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    ready = poll.poll(10_000)
    os.close(descriptor)
    return bool(ready)


def test_a_run_is_judged_by_the_summary_it_wrote(tmp_path):
    run = tmp_path / "copy4-1"
    run.mkdir()
    (run / "summary.json").write_text('{"exact_match_after": 1.0}')
    assert acceptance.run_summary(tmp_path, "") == {"exact_match_after": 1.0}
    (tmp_path / "copy4-2").mkdir()
    (tmp_path / "copy4-2" / "summary.json").write_text("{}")
    with pytest.raises(acceptance.AcceptanceError, match="2 runs"):
        acceptance.run_summary(tmp_path, "")


def test_the_counts_of_pytest_are_figures(tmp_path):
    output = "...\n=== 2 failed, 1,5 passed ===\n=== 2 failed, 15 passed, 1 skipped in 3.2s ==="
    assert acceptance.test_counts(tmp_path, output) == {"failed": 2, "passed": 15, "skipped": 1}
    assert acceptance.test_counts(tmp_path, "15 passed in 1 s") == {"failed": 0, "passed": 15, "skipped": 0}
