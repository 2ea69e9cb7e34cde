"""Runs on one machine leave each other alone: a start removes what dead runs left, and nothing of a living one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from leftovers import assert_nothing_is_left, ending, finish, shared_memory_of, start_run, wait_for_line

from titan_rl.supervision.process import PREFIX

SMALL = ("--recipe", "copy4", "--generator.count", "1", "--loop.groups-per-step", "4", "--evaluation.prompts", "20")
ENDLESS = (*SMALL, "--loop.steps", "100000", "--evaluation.every", "0")

SAME_ID = """
import os, sys
from titan_rl.weights.segment_files import DIRECTORY, segment_path
for channel in ("policy", "samples.worker0", "samples.rollout0"):
    segment_path(DIRECTORY, os.getpid(), channel, 0).write_bytes(b"of a dead run with this process id")
os.execv(sys.executable, [sys.executable, "-m", "titan_rl.train", *sys.argv[1:]])
"""
"""As in a container that is started again and keeps its /dev/shm."""


def remains_of_a_dead_run() -> list[Path]:
    """What a killed controller leaves."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    segment = Path(f"/dev/shm/titan_rl-{dead.pid}-policy-0")
    segment.write_bytes(b"weights")
    scratch = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{dead.pid}."))
    return [segment, scratch]


@pytest.mark.acceptance
def test_a_start_removes_what_a_dead_run_left_and_nothing_of_a_living_one(tmp_path: Path) -> None:
    first = start_run(*ENDLESS, runs=tmp_path / "first")
    wait_for_line(first, "step ")
    remains = remains_of_a_dead_run()
    owned = shared_memory_of(first.pid)
    second = start_run(*ENDLESS, runs=tmp_path / "second", program=("-c", SAME_ID))
    wait_for_line(second, "step ")
    assert [each for each in remains if each.exists()] == []
    assert owned and set(owned) & set(shared_memory_of(first.pid)), "its publications live on"
    second.send_signal(signal.SIGTERM)
    output = finish(second)
    assert second.returncode == 143, output
    assert_nothing_is_left(second)
    for _ in range(2):
        wait_for_line(first, "step ")
    first.send_signal(signal.SIGTERM)
    output = finish(first)
    assert first.returncode == 143 and ending(output).startswith("the run was stopped by SIGTERM"), output
    assert_nothing_is_left(first)
    assert not any(os.path.exists(each) for each in remains)
