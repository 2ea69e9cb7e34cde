"""A machine, a task of the user and a run that is not started, for tests of the command line."""

from __future__ import annotations

import sys
import types

import pytest

from titan_rl import train
from titan_rl.config import RunConfig
from titan_rl.hosts.facts import HostFacts
from titan_rl.supervision.placement import TORCHRUN_VARIABLES

TASK = '''
from titan_rl.config import RunConfig
from titan_rl.config_registry import copy4
from titan_rl.environments.base import Environment, Example, Message, Rubric
import dataclasses

class Doubles(Environment):
    """Doubles numbers."""
    def __init__(self, top: int, shift: float = 0.0, seed: int = 0): ...
    def example(self, index):
        return Example(prompt=(Message("user", f"{1000 + index}="),), answer="")
    def held_out(self, count):
        return [Example(prompt=(Message("user", "1="),), answer="")]
    def rubric(self):
        return Rubric(lambda example, transcript: 0.0)

class NoTask: ...

def recipe():
    base = copy4()
    environment = dataclasses.replace(base.environment, name="task.py:Doubles", kwargs={"top": 3})
    return dataclasses.replace(base, environment=environment)

def nothing():
    return None
'''


@pytest.fixture(autouse=True)
def host(monkeypatch):
    """A machine without GPUs, whatever runs the tests."""
    for name in TORCHRUN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(train, "detect_host", lambda: HostFacts(cpus=2))


@pytest.fixture
def task(tmp_path):
    file = tmp_path / "task.py"
    file.write_text(TASK)
    return file


@pytest.fixture
def started(monkeypatch):
    """Runs that were started, in place of starting them."""
    runs: list[RunConfig] = []
    module = types.ModuleType("titan_rl.run.run")
    module.run = lambda config, resume, **_: runs.append(config) or 0
    monkeypatch.setitem(sys.modules, "titan_rl.run.run", module)
    return runs
