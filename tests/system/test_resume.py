"""A deterministic run that is killed anywhere, and goes on, ends bit for bit as the one that was not.

All of it belongs to the acceptance list; in CI test_chaos kills a deterministic controller at one moment, and
test_resume_runs another one. Each run is real and takes 15 to 40 s on two free cores.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from killed_run import POINTS

KILLED_RUN = Path(__file__).with_name("killed_run.py")
DELAYS = Path(__file__).with_name("delays.py")
STEPS = 7
TURNS = {"after an admission": 9, "mid-generation": 22, "after a finish": 21, "after a decision": 40, "mid-batch": 15}
"""Of points that come more often than once a step: well into the run."""


def settings(staleness: int) -> list[str]:
    given = {
        "deterministic": "true",
        "loop.steps": STEPS,
        "loop.groups-per-step": 4,
        "loop.max-staleness": staleness,
        "loop.filter": f"{DELAYS}:every_fifth",
        "evaluation.every": 3,
        "evaluation.prompts": 8,
        "evaluation.target-exact-match": 0,
        "environment.name": f"{DELAYS}:Late",
        "generator.count": 1,
        "checkpoint.every": 2,
        "trainer.kl.coefficient": 0.05,
        "logging.tensorboard": "false",
    }
    if not staleness:
        given |= {"trainer.epochs": 2, "trainer.minibatches": 2, "trainer.critic.coefficient": 0.5}
    return ["--recipe", "copy4_async", *(word for name, value in given.items() for word in (f"--{name}", str(value)))]


class Outcome(NamedTuple):
    """Everything that must be equal, bit for bit."""

    weights: bytes
    state: dict[str, bytes]
    """Master weights, moments, reference."""
    steps: list[dict[str, Any]]


def numbers(run: Path, *kept: str) -> list[dict[str, Any]]:
    """Of every step and evaluation: rewards, tokens, losses, ages; and what else begins so."""
    exactly = ("step", "rollout/tokens")
    kept = ("rollout/reward", "train/loss", "train/grad_norm", "staleness/", "evaluation/", *kept)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # An evaluation goes on beside training, so its line may come before or after those of steps.
    lines.sort(key=lambda line: (line["step"], "evaluation/reward" in line))
    return [{key: value for key, value in line.items() if key in exactly or key.startswith(kept)} for line in lines]


def outcome(run: Path) -> Outcome:
    state = run / "checkpoints" / f"step-{STEPS:08d}" / "trainer"
    return Outcome(
        (run / "checkpoint" / "model.safetensors").read_bytes(),
        {file.name: file.read_bytes() for file in sorted(state.glob("*.distcp"))},
        numbers(run, "train/on_policy"),
    )


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=400)


def goes_on(directory: Path, *more: str) -> str:
    done = run("-m", "titan_rl.train", "--resume", str(directory), *more)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run that nobody kills, by staleness."""
    found: dict[int, Outcome] = {}

    def made(staleness: int) -> Outcome:
        if staleness not in found:
            directory = tmp_path_factory.mktemp("whole")
            done = run("-m", "titan_rl.train", *settings(staleness), "--logging.directory", str(directory))
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
            (found[staleness],) = map(outcome, directory.iterdir())
        return found[staleness]

    return made


def killed(directory: Path, point: str, turn: int, staleness: int, *more: str) -> Path:
    end = run(str(KILLED_RUN), point, str(turn), *settings(staleness), "--logging.directory", str(directory), *more)
    assert end.returncode == -signal.SIGKILL, end.stdout[-3000:] + end.stderr[-3000:]
    (left,) = directory.iterdir()
    return left


CASES = [(point, staleness) for point in POINTS for staleness in (2, 0) if (point, staleness) != ("mid-pull", 0)]


@pytest.mark.acceptance
@pytest.mark.parametrize(("point", "staleness"), CASES)
def test_a_killed_run_goes_on_bit_for_bit(whole: Any, tmp_path: Path, point: str, staleness: int) -> None:
    left = killed(tmp_path, point, TURNS.get(point, 2), staleness)
    goes_on(left)
    assert outcome(left) == whole(staleness)
