"""A short disturbed run and its undisturbed twin, as scripts/chaos.py makes them; about 50 s on two free cores."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from leftovers import REPOSITORY

KINDS = ("controller killed", "rollout worker killed", "router killed", "trainer rank killed")
"""Other tests in CI kill generators and gateways, and damage publications and samples."""
SMALL = (
    *("--seed", "1", "--minutes", "0.6", "--every", "3", "--deterministic"),  # 15 steps: a fault after each third
    *(word for kind in KINDS for word in ("--only", kind)),
    *("--generator.engine", "simulated", "--generator.count", "2", "--environment.kwargs.every", "13"),
    *("--loop.groups-per-step", "4", "--rollout.samples-per-group", "4"),
)


@pytest.mark.timeout(1200)
def test_a_disturbed_run_comes_out_as_if_nothing_was() -> None:
    command = [sys.executable, "scripts/chaos.py", *SMALL]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["bitwise_equal"] is True and figures["lost"] == 0
    happened = {line.strip().partition("  ")[0] for line in done.stdout.splitlines()}
    assert happened >= {*KINDS}
