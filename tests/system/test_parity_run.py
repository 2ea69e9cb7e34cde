"""A whole asynchronous run with `trainer.parity bitwise`, its processes and all: about 25 s on two free cores.

Nothing else shows that a trainer's process, which has none of a generator's environment, comes to the generators' bits.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

STEPS = 5


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param("--generator.tensor-parallel 1", id="one rank each"),
        pytest.param(
            "--generator.tensor-parallel 2 --trainer.data-parallel 2 --trainer.dtype bfloat16 "
            "--generator.dtype bfloat16 --rollout.sampling.top-p 0.9",
            marks=pytest.mark.acceptance,
            id="two ranks each, bfloat16, truncated",
        ),
        pytest.param(
            "--generator.tensor-parallel 2 --trainer.data-parallel 2 --trainer.lora.r 8 --trainer.optimizer.lr 1e-2",
            marks=pytest.mark.acceptance,
            id="two ranks each, LoRA",
        ),
    ],
)
def test_an_asynchronous_run_ends_and_says_that_nothing_differs(tmp_path: Path, settings: str) -> None:
    given = "--recipe copy4_async --trainer.parity bitwise --evaluation.every 0 --evaluation.target-exact-match 0"
    options = f"{given} --loop.steps {STEPS} {settings}"
    command = [sys.executable, "-m", "titan_rl.train", *options.split(), "--logging.directory", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (run,) = tmp_path.iterdir()
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    steps = [line for line in lines if "train/logprob_difference_max" in line]
    assert len(steps) == STEPS
    assert {line["train/logprob_difference_max"] for line in steps} == {0.0}
    assert sum(line["train/on_policy_tokens"] for line in steps) > 200
