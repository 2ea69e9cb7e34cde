"""Processes of a run that share cores do not interrupt each other at every message."""

import os
import subprocess
import sys

import pytest

from titan_rl.supervision.process import prepare_controller

PROGRAM = """
import os, subprocess, sys, threading
from titan_rl.supervision.process import prepare_controller
prepare_controller()
asked = "import os; print(os.sched_getscheduler(0))"
print(os.sched_getscheduler(0))
thread = threading.Thread(target=lambda: subprocess.run([sys.executable, "-c", asked]))
thread.start()
thread.join()
"""


@pytest.mark.parametrize(
    ("before", "then"), [(os.SCHED_OTHER, os.SCHED_BATCH), (os.SCHED_IDLE, os.SCHED_IDLE)], ids=["usual", "own choice"]
)
def test_a_run_and_what_it_starts_is_batch_work_unless_the_user_chose_otherwise(before: int, then: int) -> None:
    done = subprocess.run(
        [sys.executable, "-u", "-c", PROGRAM],
        preexec_fn=lambda: os.sched_setscheduler(0, before, os.sched_param(0)),
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert done.stdout.split() == [str(then)] * 2, done.stderr


@pytest.mark.parametrize("call", ["sched_getscheduler", "sched_setscheduler"])
def test_a_run_starts_where_the_policy_may_not_be_asked_or_set(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    before = os.sched_getscheduler(0)

    def refused(*arguments: object) -> int:
        raise PermissionError

    monkeypatch.setattr(os, call, refused)
    prepare_controller()
    monkeypatch.undo()
    assert os.sched_getscheduler(0) == before
