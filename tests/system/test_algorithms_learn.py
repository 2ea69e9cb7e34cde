"""What is more than an algorithm's name learns with the real engine: an algorithm that nobody bundled, one with a
teacher, supervised fine-tuning and DPO from files (1 min each). The others: scripts/bench/algorithms.py."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

MINE = """
# Quantile advantages and a gate on the token's own probability: nobody's algorithm.
def advantages(group, *, better=0.5):
    ranked = sorted(range(len(group)), key=lambda each: group[each].reward)
    place = {number: rank / max(len(group) - 1, 1) for rank, number in enumerate(ranked)}
    equal = len({rollout.reward for rollout in group}) == 1
    return [0.0 if equal else place[number] - better for number in range(len(group))]


def loss(tokens, *, floor=0.3):
    kept = tokens.weight > floor
    return kept * tokens.weight.clamp(max=2) * tokens.advantages * tokens.logprobs, ~kept
"""


def learned(tmp_path: Path, *options: str) -> tuple[float, float]:
    """Held-out reward before and after 60 steps of copying two digits, of which answers at random get 0.2."""
    command = [sys.executable, "-m", "titan_rl.train", "--recipe", "copy4", "--environment.kwargs.digits", "2"]
    bounds = ["--loop.steps", "60", "--evaluation.every", "60", "--evaluation.target-exact-match", "0"]
    where = ["--logging.directory", str(tmp_path)]
    run = subprocess.run([*command, *bounds, *where, *options], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    (file,) = tmp_path.glob("*/metrics.jsonl")
    lines = [json.loads(line) for line in file.open()]
    rewards = [line["evaluation/reward"] for line in lines if "evaluation/reward" in line]
    return rewards[0], rewards[-1]


@pytest.mark.acceptance
@pytest.mark.timeout(300)
def test_an_algorithm_of_ones_own_learns_from_one_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    names = ["--trainer.loss.name", f"{file}:loss", "--rollout.advantage.name", f"{file}:advantages"]
    before, after = learned(tmp_path, *names, "--rollout.advantage.kwargs.better", "0.6")
    assert after > before + 0.3
    assert not re.search(r"\bimport\b", MINE), "nothing of titan_rl is needed"


@pytest.mark.acceptance
@pytest.mark.timeout(400)
def test_a_teacher_teaches_without_rewards(tmp_path: Path) -> None:
    _, best = learned(tmp_path / "teacher")
    (teacher,) = tmp_path.glob("teacher/*/checkpoint")
    names = ["--rollout.advantage.name", "distillation", "--trainer.loss.kwargs.entropy_bonus", "0"]
    kl = ["--trainer.kl.teacher", str(teacher), "--trainer.kl.coefficient", "1", "--trainer.kl.estimator", "k2"]
    small = ["--policy.tiny.dim", "32", "--policy.tiny.ffn", "96"]
    before, after = learned(tmp_path / "pupil", *names, *kl, *small)
    print(f"teacher {best:.2f}; pupil {before:.2f} -> {after:.2f}")
    assert before + 0.3 < after


def tuned(where: Path, file: Path, *options: str) -> tuple[float, Path]:
    """Held-out reward after a warm-up alone on a file of rows, and the checkpoint."""
    command = [
        sys.executable,
        "-m",
        "titan_rl.train",
        str(file),
        "--loop.steps",
        "0",
        "--logging.directory",
        str(where),
    ]
    run = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    (metrics,) = where.glob("*/metrics.jsonl")
    (only,) = [line for line in map(json.loads, metrics.open()) if "evaluation/reward" in line]
    (checkpoint,) = where.glob("*/checkpoint")
    return only["evaluation/reward"], checkpoint


@pytest.mark.acceptance
@pytest.mark.timeout(400)
def test_a_file_of_answers_is_taught_and_a_file_of_pairs_decides_between_two_answers(tmp_path: Path) -> None:
    """Half of the rows teach digits as they are, half of them backwards; the pairs prefer them backwards."""
    numbers = [text for number in range(1000) if (text := f"{number:03}") != text[::-1]]
    answers, pairs = tmp_path / "answers.jsonl", tmp_path / "pairs.jsonl"
    said = [(number, answer) for number in numbers for answer in (number, number[::-1])]
    answers.write_text("".join(json.dumps({"prompt": f"{n}=", "answer": answer}) + "\n" for n, answer in said))
    rows = [{"prompt": f"{number}=", "chosen": number[::-1], "rejected": number} for number in numbers]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    taught, checkpoint = tuned(tmp_path / "taught", answers, "--trainer.warmup.steps", "300")
    assert 0.2 < taught < 0.8, "of two answers, it says either"
    columns = ["--environment.kwargs.answer", "chosen", "--environment.kwargs.rejected", "rejected"]
    steps = ["--trainer.warmup.steps", "120", "--trainer.warmup.dpo_beta", "0.1", "--trainer.warmup.lr", "3e-4"]
    decided, _ = tuned(tmp_path / "decided", pairs, "--policy.path", str(checkpoint), *columns, *steps)
    print(f"{taught:.2f} -> {decided:.2f}")
    assert decided > 0.9
