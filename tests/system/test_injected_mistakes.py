"""Mistakes in a task or its settings are named on the screen within 100 steps, with the setting to change (4 min)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TASK = """
from titan_rl.environments.base import Environment, Reward, Rubric
ROWS = [{"prompt": f"{a}{b}{c}=", "turned": f"{c}{b}{a}", "first": "?"} for a in "abcd" for b in "abcd" for c in "abcd"]
def right(example, transcript):
    wanted = example.prompt[0].content[2::-1]
    return sum(x == y for x, y in zip(transcript.answer, wanted)) / max(len(transcript.answer), 3)
def exact_match(example, transcript):
    return float(transcript.answer == example.answer)
def long(example, transcript):
    return len(transcript.answer) / 8
Turn = Environment.from_examples(ROWS, Rubric(REWARD, Reward(exact_match, weight=0)), answer="ANSWER")
"""
MISTAKES = {
    "a reward that pays for length": (
        "long", "turned", ["--rollout.sampling.max-new-tokens", "8"], "The reward pays for something else",
    ),
    "another column": ("right", "first", [], "is their column the right one"),
    "thirty times the learning rate": (
        "right", "turned", ["--trainer.optimizer.lr", "0.03"], "The learning rate is too high",
    ),
    "two samples": ("right", "turned", ["--rollout.samples-per-group", "2"], "Groups are small"),
    "answers that are cut": (
        "right", "turned", ["--rollout.sampling.max-new-tokens", "2"], "Answers are cut by length",
    ),
}  # fmt: skip


@pytest.mark.acceptance
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake: str, tmp_path: Path) -> None:
    reward, answer, options, finding = MISTAKES[mistake]
    (tmp_path / "turn.py").write_text(TASK.replace("REWARD", reward).replace("ANSWER", answer))
    command = [sys.executable, "-m", "titan_rl.train", "turn.py", "--loop.steps", "100", "--trainer.warmup.steps", "0"]
    run = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert finding in run.stdout + run.stderr
