"""An asynchronous run is a function of its config and seed: not of generators, ranks, delays or routing.

Each run is real and takes 20 to 40 s on two free cores.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file
from test_resume import DELAYS, numbers

from titan_rl.metrics.rollout_record import ROLLOUTS, read_record, read_records
from titan_rl.playing.replay import difference, difference_of_numbers, facts

STEPS, STALENESS = 4, 2


class Outcome(NamedTuple):
    """Everything that must be equal, bit for bit."""

    weights: dict[str, bytes]
    steps: list[dict[str, float]]
    rollouts: list[tuple[object, ...]]
    """The recorded ones: their tokens, logprobs of generator and trainer, loss weights, …"""


def train(directory: Path, **settings: Any) -> Outcome:
    given = {
        "deterministic": "true",
        "loop.steps": STEPS,
        "loop.groups-per-step": 4,
        "loop.max-staleness": STALENESS,
        "loop.filter": f"{DELAYS}:every_fifth",
        "evaluation.every": 2,
        "evaluation.prompts": 16,
        "evaluation.target-exact-match": 0,
        "environment.name": f"{DELAYS}:Late",
        "router.strategy": f"{DELAYS}:Anywhere",
        "logging.directory": directory,
        **{name.replace("__", "."): value for name, value in settings.items()},
    }
    options = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "titan_rl.train", "--recipe", "copy4_async", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (run,) = directory.iterdir()
    weights = load_file(run / "checkpoint" / "model.safetensors")
    records = sorted(read_records(run / ROLLOUTS), key=lambda record: (record.purpose, record.step))
    rollouts = [(record.group, record.sample, *record.kept, *facts(record)) for record in records]
    return Outcome({name: tensor.tobytes() for name, tensor in weights.items()}, numbers(run), rollouts)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("one")


@pytest.fixture(scope="module")
def one(directory: Path) -> Outcome:
    return train(directory, generator__count=1)


def test_the_run_was_asynchronous_and_learned_something(one: Outcome) -> None:
    ages = [line["staleness/age_max"] for line in one.steps if "staleness/age_max" in line]
    assert len(ages) == STEPS and max(ages) == STALENESS
    assert len({line["rollout/reward_mean"] for line in one.steps if "rollout/reward_mean" in line}) > 1


def test_every_step_is_recorded(one: Outcome) -> None:
    kept = [why for rollout in one.rollouts for why in rollout[2:5] if why in ("best", "worst", "random")]
    assert len(kept) == 3 * STEPS


def test_a_tampered_recording_is_found_where_the_true_one_is_replayed_bit_for_bit(
    one: Outcome, directory: Path, tmp_path: Path
) -> None:
    (run,) = directory.iterdir()
    lines = map(json.loads, (run / ROLLOUTS).read_text().splitlines())
    true = [line for line in lines if line["purpose"] == "train" and line["step"] == 2]
    tampered = json.loads(json.dumps(true))
    weights = tampered[-1]["branches"][0]["weights"]
    weights[-1] = float(np.nextafter(np.float32(weights[-1]), np.float32(1)))  # one bit of one token
    copy = shutil.copytree(run, tmp_path / "copy")
    (copy / ROLLOUTS).write_text("".join(json.dumps(record) + "\n" for record in tampered))
    command = [sys.executable, "-m", "titan_rl.cli", "replay", str(copy), "--step", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]
    what = f"group {true[-1]['group']}, sample {true[-1]['sample']}, loss weight of token {len(weights) - 1} "
    said, _, named = done.stdout.splitlines()[-1].rpartition("; the replay is in ")
    assert said.startswith(f"not the same: step 2, {what}"), done.stdout[-500:]
    kept = Path(named)
    replayed = [*read_records(kept / ROLLOUTS)]
    assert difference([*map(read_record, true)], replayed) == "" and {record.step for record in replayed} == {2}
    lines_of = [[*map(json.loads, (each / "metrics.jsonl").read_text().splitlines())] for each in (run, kept)]
    before, again = ([line for line in lines if line["step"] == 2 and "train/loss" in line] for lines in lines_of)
    assert difference_of_numbers(before[0], again[0]) == ""
    shutil.rmtree(kept)
    assert (copy / "summary.json").read_bytes() == (run / "summary.json").read_bytes()


@pytest.mark.acceptance  # in CI: simulated engines (test_chaos, test_runs_over_hosts), and test_vllm_deterministic
def test_two_generators_train_bitwise_what_one_trains(one: Outcome, tmp_path: Path) -> None:
    assert train(tmp_path, generator__count=2, generator__engine=f"{DELAYS}:slow_pulls") == one


@pytest.mark.acceptance
@pytest.mark.parametrize("count", [1, 2])
def test_generators_of_two_ranks_train_bitwise_what_one_rank_trains(one: Outcome, tmp_path: Path, count: int) -> None:
    engine = f"{DELAYS}:slow_pulls"
    assert train(tmp_path, generator__count=count, generator__tensor_parallel=2, generator__engine=engine) == one


@pytest.mark.acceptance
def test_another_seed_is_another_run(one: Outcome, tmp_path: Path) -> None:
    assert train(tmp_path, generator__count=1, seed=1) != one
