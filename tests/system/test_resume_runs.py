"""What `--resume` makes of damaged checkpoints, full disks, other shapes and other settings; and `titan-rl export`.

Each run is real and takes 15 to 40 s on two free cores.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from delays import PLAYED
from safetensors.numpy import load_file
from test_resume import DELAYS, STEPS, Outcome, goes_on, killed, outcome, run, settings

from titan_rl.directories import CONFIG, SUMMARY, lock_run
from titan_rl.loop.checkpoint_files import FORMAT, MANIFEST, check, checkpoints
from titan_rl.loop.ledger import Ledger, read_ledger

GROUPS, STALENESS = 4, 2


def lines_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def trained_steps(directory: Path) -> list[int]:
    return [line["step"] for line in lines_of(directory) if "train/loss" in line]


def evaluated_steps(directory: Path) -> list[int]:
    return sorted(line["step"] for line in lines_of(directory) if "evaluation/reward" in line)


def shown_steps(directory: Path) -> list[int]:
    """What TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    return [event.step for event in events.Tensors("train/loss")]


def last_ledger(directory: Path) -> Ledger:
    return read_ledger(checkpoints(directory)[-1])


def flip(checkpoint: Path) -> None:
    (file,) = (checkpoint / "trainer").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(checkpoint: Path) -> None:
    os.truncate(checkpoint / "ledger.msgpack", 100)


def old_format(checkpoint: Path) -> None:
    manifest = checkpoint / MANIFEST
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 0}))


DAMAGES = {
    "one byte": (flip, "is not as it was written (checksum)"),
    "truncated": (truncate, "ledger.msgpack has 100 bytes"),
    "one file is missing": (lambda checkpoint: (checkpoint / "samples").unlink(), "samples is missing"),
    "old format": (old_format, f"has format 0; this version of titan_rl reads format {FORMAT}"),
    "no manifest": (lambda checkpoint: (checkpoint / MANIFEST).unlink(), "it has no manifest.json"),
}


# --- not deterministic -----------------------------------------------------------------------------------------------


def test_after_a_kill_and_damage_every_prompt_is_trained_once_and_every_step_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = tmp_path / "played"
    monkeypatch.setenv(PLAYED, str(played))
    plain = ("--deterministic", "false", "--logging.tensorboard", "true", "--loop.filter", f"{DELAYS}:noted")
    plain += ("--generator.engine", "simulated")  # of which no checkpoint holds anything
    left = killed(tmp_path / "runs", "after a checkpoint", 2, STALENESS, *plain)
    *_, cut, newest = checkpoints(left)
    flip(newest)
    ledger, step = read_ledger(cut), check(cut).step
    active = ledger.buffer.groups.keys()
    ended = {*range(ledger.buffer.counts["admitted"])} - active
    played.unlink()

    said = goes_on(left)
    assert f"{newest} is damaged: trainer/rank-0.safetensors {DAMAGES['one byte'][1]}; it is passed over" in said
    assert f"going on after step {step} from {cut}" in said
    assert trained_steps(left) == shown_steps(left) == list(range(1, STEPS + 1))
    assert evaluated_steps(left) == [0, 3, 6, STEPS]
    ages = [line["staleness/age_max"] for line in lines_of(left) if "train/loss" in line]
    assert max(ages) <= STALENESS

    end = last_ledger(left).buffer
    assert end.counts["trained"] == STEPS * GROUPS and end.counts["active"] == 0
    again = sorted(map(int, played.read_text().split()))
    assert again == sorted(set(range(end.counts["admitted"])) - ended - ledger.reports.keys())


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A deterministic run that was killed after its second checkpoint."""
    return killed(tmp_path_factory.mktemp("left"), "after a checkpoint", 2, STALENESS)


@pytest.fixture(scope="module")
def ended(left: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of it that went on as it was."""
    directory = shutil.copytree(left, tmp_path_factory.mktemp("ended") / "copy")
    goes_on(directory)
    return directory


@pytest.fixture
def copy(left: Path, tmp_path: Path) -> Path:
    """A copy of it, elsewhere and under another name."""
    return shutil.copytree(left, tmp_path / "another name")


@pytest.mark.acceptance
@pytest.mark.parametrize("damage", DAMAGES)
def test_the_checkpoint_before_a_damaged_one_gives_the_same_bits(ended: Path, copy: Path, damage: str) -> None:
    do, what = DAMAGES[damage]
    before, newest = checkpoints(copy)
    do(newest)
    said = goes_on(copy)
    assert what in said and f"from {before}" in said
    assert outcome(copy) == outcome(ended)


# --- disks -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """With room for half a checkpoint."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def begun(directory: Path) -> Path:
    """A run that was killed before its first checkpoint."""
    directory.mkdir()
    shown = run("-m", "titan_rl.train", *settings(STALENESS), "--logging.directory", str(directory.parent), "--dry-run")
    (directory / CONFIG).write_text(shown.stdout)
    return directory


@pytest.mark.acceptance
@pytest.mark.parametrize("where", ["a file is in the way", "the disk is full"])
def test_checkpoints_that_cannot_be_written_cost_sentences_and_not_the_run(
    tmp_path: Path, tiny_disk: Path, where: str
) -> None:
    directory = begun(tmp_path / "run")
    if where == "the disk is full":
        (directory / "checkpoints").symlink_to(tiny_disk)
    else:
        (directory / "checkpoints").write_text("")
    said = goes_on(directory)
    assert "the run starts over" in said
    for step in (2, STEPS):
        assert f"no checkpoint of step {step}, the run goes on: " in said
    assert ("No space left on device" if where == "the disk is full" else "File exists") in said
    assert trained_steps(directory) == list(range(1, STEPS + 1))
    assert load_file(directory / "checkpoint" / "model.safetensors")
    assert list(tiny_disk.iterdir()) == []


# --- other shapes and settings ---------------------------------------------------------------------------------------


@pytest.mark.acceptance
@pytest.mark.parametrize("change", [("--generator.count", "2"), ("--generator.tensor_parallel", "2")])
def test_with_other_generators_a_run_goes_on_bit_for_bit(ended: Path, copy: Path, change: tuple[str, str]) -> None:
    goes_on(copy, *change)
    assert outcome(copy) == outcome(ended)


@pytest.mark.acceptance
def test_with_other_trainer_ranks_a_run_goes_on_closely(left: Path, ended: Path, copy: Path) -> None:
    goes_on(copy, "--trainer.data_parallel", "2")
    same, other = outcome(ended), outcome(copy)
    assert [line["step"] for line in same.steps] == [line["step"] for line in other.steps]
    until = next(index for index, line in enumerate(same.steps) if line["step"] > check(checkpoints(left)[-1]).step)
    assert same.steps[:until] == other.steps[:until]
    assert closely(same, ended) == pytest.approx(closely(other, copy), rel=1e-2)


def closely(found: Outcome, directory: Path) -> float:
    weights = load_file(directory / "checkpoint" / "model.safetensors")
    return float(sum(np.square(tensor, dtype=np.float64).sum() for tensor in weights.values()))


@pytest.mark.acceptance
def test_a_run_that_is_done_is_trained_further_and_exported(ended: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(ended, tmp_path / "run")
    refused = run("-m", "titan_rl.train", "--resume", str(directory))
    assert refused.returncode == 2 and "is done" in refused.stderr
    goes_on(directory, "--loop.steps", str(STEPS + 2))
    assert trained_steps(directory) == list(range(1, STEPS + 3))
    assert evaluated_steps(directory) == [0, 3, 6, STEPS, STEPS + 2]
    assert json.loads((directory / SUMMARY).read_text())["steps"] == STEPS + 2

    exported = tmp_path / "exported"
    done = run("-m", "titan_rl.cli", "export", "--run", str(directory), "--directory", str(exported))
    assert done.returncode == 0 and f"after step {STEPS + 2}" in done.stdout, done.stderr
    for file in sorted((directory / "checkpoint").iterdir()):
        assert (exported / file.name).read_bytes() == file.read_bytes(), file.name


# --- refusals: no process of a run starts ----------------------------------------------------------------------------


def test_settings_that_may_not_change_are_refused_with_the_difference(tmp_path: Path) -> None:
    directory = begun(tmp_path / "run")
    done = run("-m", "titan_rl.train", "--resume", str(directory), "--seed", "4", "--loop.steps", "9")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "seed 0 → 4; leave" in done.stderr, done.stderr


def test_auto_takes_the_unfinished_run_and_refuses_one_that_is_alive(tmp_path: Path) -> None:
    directory = begun(tmp_path / "run")
    lock = lock_run(directory)
    auto = (*settings(STALENESS), "--logging.directory", str(tmp_path), "--resume", "auto")
    done = run("-m", "titan_rl.train", *auto)
    os.close(lock)
    assert done.returncode == 2
    assert f"going on with {directory}" in done.stderr and "still going on" in done.stderr
    assert list(tmp_path.iterdir()) == [directory]
