"""A checkpoint of format 3, stored here as it was written, goes on as the version that wrote it went on with it.

`checkpoint_format_3.tar.xz` holds `run/`, a deterministic run of the recipe copy4_async with a policy of 3,136 weights
that was killed after its checkpoint of step 2 of 6 (finished groups with samples, groups being played, two older
versions), and `expected/`, the numbers and weights that the version of that day came to. About 10 s on two free cores.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

STORED = Path(__file__).with_name("checkpoint_format_3.tar.xz")


def computed(metrics: Path) -> list[dict[str, Any]]:
    """What follows from the checkpoint alone, by step; neither times nor loads."""
    exact = ("groups", "rollout/tokens", "rollout/truncated_share", "rollout/reward_mean", "evaluation/reward")
    close = ("train/loss", "train/grad_norm", "train/entropy", "train/reference_kl_k3", "staleness/age_mean")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines.sort(key=lambda line: (line["step"], "evaluation/reward" in line))
    return [
        {"step": line["step"]}
        | {key: line[key] for key in exact if key in line}
        | {key: float(f"{line[key]:.3g}") for key in close if key in line}
        for line in lines
    ]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive's content; the run has gone on to its end."""
    directory = tmp_path_factory.mktemp("stored")
    with tarfile.open(STORED) as archive:
        archive.extractall(directory, filter="data")
    titan_rl("train", "--resume", str(directory / "run"))
    return directory


def titan_rl(*arguments: str) -> None:
    command = [sys.executable, "-m", "titan_rl.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_a_stored_checkpoint_of_format_3_goes_on_as_on_the_day_it_was_written(stored: Path) -> None:
    run, expected = stored / "run", stored / "expected"
    assert computed(run / "metrics.jsonl") == computed(expected / "metrics.jsonl")
    weights = load_file(run / "checkpoint" / "model.safetensors")
    wanted = load_file(expected / "model.safetensors")
    assert weights.keys() == wanted.keys()
    for name, tensor in wanted.items():  # a step moves a weight by 1e-3; another processor's rounding by far less
        np.testing.assert_allclose(weights[name], tensor, rtol=0, atol=1e-5, err_msg=name)


def test_a_resumed_run_is_a_new_incarnation(stored: Path) -> None:
    played = [json.loads(line) for line in (stored / "run" / "rollouts.jsonl").read_text().splitlines()]
    versions = {each["step"]: each["branches"][0]["versions"][-1] for each in played if each["purpose"] == "evaluate"}
    assert versions == {0: "v0", 2: "v1.2", 4: "v1.4", 6: "v1.6"}


def test_the_checkpoint_of_a_run_is_exported_as_the_weights_that_it_ended_with(stored: Path, tmp_path: Path) -> None:
    titan_rl("export", "--run", str(stored / "run"), "--directory", str(tmp_path / "exported"))
    ended = stored / "run" / "checkpoint"
    for file in sorted(ended.iterdir()):
        assert (tmp_path / "exported" / file.name).read_bytes() == file.read_bytes(), file.name
