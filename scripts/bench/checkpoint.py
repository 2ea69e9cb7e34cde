"""What a checkpoint costs at 100M parameters, and how soon a run goes on from one.

    python scripts/bench/checkpoint.py [--repetitions 5] [--layers 12] [--directory DIR] [--only state|resume]

The state is that of one trainer rank on the CPU: float32 weights and AdamW's two moments, 1.2 GB. Every repetition
times a warm memory copy and a plain file write with fsync of as many bytes, then the checkpoint, then training with and
without one being written, so that a change of the machine's speed hits all of them; figures are medians over the
repetitions. The first repetition is not counted: it is the first checkpoint of a run.

`begin_to_memcpy`: how long training stands still, ÷ the copy. `committed_to_write`: from the end of that until the
checkpoint has its name, with checksums and everything on disk, while nothing else runs, ÷ the plain write.
`speed_while_written`: optimizer steps per second while one is being written ÷ without; `steps_lost` is what one
checkpoint costs training, standing still included. The writing shares the cores of training.

`copy_to_memcpy`: the copy in shared memory that follows every step, with its checksum, ÷ the warm memory copy.
`copy_to_step`: the same ÷ a step of 64 tokens, which is little more than the optimizer. `read_to_memcpy`: until a rank
has checked and read a copy.

`resume_to_cold`: seconds from `--resume` to the end of the first optimizer step ÷ those of a new run of the same
config, of real runs of a tiny policy, imports included.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from parts.policies import POLICY_100M
from parts.table import print_report
from parts.watched import watch

from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.loop.checkpoint_files import commit, new_draft, prune
from titan_rl.policy.config import TrainerConfig
from titan_rl.types import NO_VERSION, TrainingSample

SAMPLES, TOKENS = 4, 16
"""Of a step: it takes about as long as its optimizer."""

STEPS = 8
"""Of each repetition, with and without checkpoints being written."""

STATE = "trainer"


def seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


# --- the state of a trainer rank -------------------------------------------------------------------------------------


def measure_state(layers: int, repetitions: int, directory: Path) -> dict[str, float]:
    import dataclasses

    import torch

    from titan_rl.policy.models.tiny import make_tiny_policy
    from titan_rl.policy.state_copies import StateCopies
    from titan_rl.policy.updater import PolicyUpdater
    from titan_rl.types import PolicyVersion
    from titan_rl.weights.segment_files import remove_segments_of

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    model = make_tiny_policy(dataclasses.replace(POLICY_100M, layers=layers), directory / "policy")
    policy = PolicyUpdater(TrainerConfig(), model_path=model, temperature=1.0, total_steps=10_000, device="cpu", seed=0)
    batch = make_batch()
    plan = policy.plan(batch)
    for _ in range(2):
        policy.train_step(batch, plan)
    parameters = sum(shard.data.numel() for shard in policy.local_shards())
    source, target = torch.randn(3 * parameters), torch.randn(3 * parameters)
    copies = StateCopies(owner_pid=os.getpid(), rank=0, ranks=1)
    policy.copy_state(copies)
    run = directory / "run"
    run.mkdir()
    timed: dict[str, list[float]] = {}

    def write_plainly() -> None:
        with open(directory / "plain", "wb", buffering=0) as file:
            rest = memoryview(source.numpy()).cast("B")
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())

    drafts: list[Path] = []

    def begin() -> float:
        drafts.append(new_draft(run, policy.step))
        return seconds(lambda: policy.begin_save(drafts[-1] / STATE))

    def finish() -> None:
        policy.finish_save()
        commit(drafts.pop())

    def train_beside_writing() -> tuple[float, float, float]:
        """One checkpoint after the other: what a step lacks is not rounded to whole steps.

        Returns:
            Seconds of all steps; seconds of writing, and checkpoints, that lay beside them.
        """
        written: list[float] = []
        writing: threading.Thread | None = None
        waited, began = 0.0, time.perf_counter()
        for _ in range(STEPS):
            if writing is None or not writing.is_alive():
                waited += begin()
                writing = threading.Thread(target=lambda: written.append(seconds(finish)))
                writing.start()
            policy.train_step(batch, plan)
        trained = time.perf_counter()
        assert writing is not None
        writing.join()
        beside = max(0.0, written[-1] - (time.perf_counter() - trained))  # of the last one
        return trained - began - waited, sum(written[:-1]) + beside, len(written) - 1 + beside / written[-1]

    for _ in range(1 + repetitions):
        now = {"memcpy": seconds(lambda: target.copy_(source))}
        os.sync()
        now["write"] = seconds(write_plainly)
        (directory / "plain").unlink()
        os.sync()
        now["begin"] = begin()
        now["committed"] = seconds(finish)
        prune(run, keep=0, newest=policy.step)
        now["step"] = seconds(lambda: [policy.train_step(batch, plan) for _ in range(STEPS)]) / STEPS
        policy.copy_state(copies)
        now["copy"] = seconds(lambda: policy.copy_state(copies))
        now["read"] = seconds(lambda: policy.restore_from_copies(copies, PolicyVersion(0, policy.step)))
        now["meanwhile"], now["written"], now["checkpoints"] = train_beside_writing()
        prune(run, keep=0, newest=policy.step)
        for name, value in now.items():
            timed.setdefault(name, []).append(value)

    remove_segments_of(os.getpid())

    def median(value: Callable[[dict[str, float]], float]) -> float:
        rows = [dict(zip(timed, values, strict=True)) for values in zip(*timed.values(), strict=True)]
        return statistics.median(value(row) for row in rows[1:])

    def lost(row: dict[str, float]) -> float:
        """Seconds of training that the writing took away."""
        return row["meanwhile"] - STEPS * row["step"]

    return {
        "parameters": parameters,
        "bytes": 12 * parameters,
        **{
            f"seconds_{name}": median(lambda row, name=name: row[name])
            for name in ("memcpy", "begin", "write", "committed", "step", "copy", "read")
        },
        "seconds_step_meanwhile": median(lambda row: row["meanwhile"] / STEPS),
        "begin_to_memcpy": median(lambda row: row["begin"] / row["memcpy"]),
        "committed_to_write": median(lambda row: row["committed"] / row["write"]),
        "copy_to_memcpy": median(lambda row: row["copy"] / row["memcpy"]),
        "copy_to_step": median(lambda row: row["copy"] / row["step"]),
        "read_to_memcpy": median(lambda row: row["read"] / row["memcpy"]),
        "speed_while_written": median(lambda row: 1 - lost(row) / row["written"]),
        "steps_lost": median(lambda row: (row["begin"] + lost(row) / row["checkpoints"]) / row["step"]),
    }


def make_batch() -> SampleBatch:
    random = np.random.default_rng(0)
    mask = np.arange(TOKENS) >= TOKENS // 2
    return SampleBatch.of(
        TrainingSample(
            group_id=0,
            sample=sample,
            token_ids=random.integers(2, 1000, TOKENS).astype(np.int32),
            loss_mask=mask,
            logprobs=np.where(mask, -np.log(20_482), 0).astype(np.float32),
            versions=np.where(mask, 0, NO_VERSION).astype(np.int64),
            advantages=1.0 - 2 * (sample % 2),
            reward=0.0,
        )
        for sample in range(SAMPLES)
    )


# --- real runs -------------------------------------------------------------------------------------------------------


def measure_resume(rounds: int, directory: Path) -> dict[str, float]:
    """Cold starts and resumes take turns; each trains two steps more."""
    cold: list[float] = []
    resumed: list[float] = []
    for number in range(rounds):
        runs = directory / f"runs{number}"
        runs.mkdir()
        settings = {
            "loop.groups-per-step": 4,
            "generator.count": 1,
            "evaluation.every": 0,
            "evaluation.prompts": 8,
            "evaluation.target-exact-match": 0,
            "logging.directory": runs,
        }
        options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        train = [sys.executable, "-m", "titan_rl.train"]
        cold.append(watch([*train, "--recipe", "copy4", *options, "--loop.steps", "2"], runs, os.environ).steps[0])
        (run,) = runs.glob("*/")
        # the steps of the first run are there at once
        resumed.append(watch([*train, "--resume", str(run), "--loop.steps", "4"], runs, os.environ, steps=4).steps[2])
        print(f"run {number + 1} of {rounds}: {cold[-1]:.1f} s, resumed {resumed[-1]:.1f} s", flush=True)
    return {
        "seconds_cold_to_first_step": statistics.median(cold),
        "seconds_resume_to_first_step": statistics.median(resumed),
        "resume_to_cold": statistics.median(one / other for one, other in zip(resumed, cold, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3, help="pairs of real runs")
    parser.add_argument("--layers", type=int, default=12, help="12: 100M parameters")
    parser.add_argument("--directory", type=Path, help="on the disk to measure; default: the temporary directory")
    parser.add_argument("--only", choices=("state", "resume"))
    options = parser.parse_args()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=options.directory) as temporary:
        if options.only != "resume":
            figures |= measure_state(options.layers, options.repetitions, Path(temporary))
        if options.only != "state":
            figures |= measure_resume(options.rounds, Path(temporary))
    rounded = {name: value if isinstance(value, int) else round(value, 4) for name, value in figures.items()}
    print_report("a checkpoint of one trainer rank, float32", ["", "measured"], list(rounded.items()), rounded)


if __name__ == "__main__":
    main()
