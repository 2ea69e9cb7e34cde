"""Jobs of `titan-rl launch slurm` on a real Slurm of two nodes, both on this machine (2 min)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm import Slurm, skip_reason

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "-"),
    pytest.mark.timeout(900),
]

REPOSITORY = Path(__file__).resolve().parents[2]
LAUNCH = (sys.executable, "-m", "titan_rl.cli", "launch", "slurm")
TRAIN = ("--recipe", "cpu_smoke", "--placement.trainer", "host0", "host1")


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with Slurm(2) as cluster:
        yield cluster


def launch(slurm: Slurm, runs: Path, *arguments: str) -> tuple[str, Path]:
    """The number of the job and its directory."""
    options = ("--nodes", "2", "--trusted-network", "--save-seconds", "1")
    command = (*LAUNCH, *options, "--", *TRAIN, *arguments, "--logging.directory", str(runs))
    done = subprocess.run(command, cwd=REPOSITORY, env=slurm.environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (script,) = runs.glob("*/job.sh")
    assert str(script) in done.stdout
    job = re.search(r"Submitted batch job (\d+)", done.stdout)
    assert job is not None, done.stdout
    return job[1], script.parent


def lines(log: Path) -> Iterator[str]:
    """The lines of a file that is still written, until the test ends."""
    with subprocess.Popen(["tail", "-n", "+1", "-F", str(log)], stdout=subprocess.PIPE, text=True) as tail:
        try:
            yield from tail.stdout
        finally:
            tail.kill()


def summary(job: Path) -> dict:
    (file,) = job.glob("*/summary.json")
    return json.loads(file.read_text())


def test_a_job_trains_over_two_nodes(slurm: Slurm, tmp_path: Path) -> None:
    job, directory = launch(slurm, tmp_path)
    slurm.wait(job)
    log = (directory / "job.log").read_text()
    assert "the run is done after step 3" in log, log[-4000:]
    logs = {file.stem for file in directory.glob("*/logs/*.log")}
    assert {"trainer-rank0", "trainer-rank1", "relay1"} <= logs
    assert "JobState=COMPLETED" in slurm("scontrol", "show", "job", job)


def test_a_job_goes_on_when_its_time_is_over_and_when_slurm_takes_it_back(slurm: Slurm, tmp_path: Path) -> None:
    engine = ("--generator.engine", "simulated", "--generator.tensor-parallel", "1", "--generator.count", "1")
    quick = (*engine, "--loop.steps", "300", "--checkpoint.every", "1000", "--evaluation.every", "0")
    job, directory = launch(slurm, tmp_path, *quick)
    events = [("scancel", "--signal=HUP", job), ("scontrol", "requeue", job)]  # the time is nearly over; preempted
    starts, stops = 0, []
    for line in lines(directory / "job.log"):
        starts += line.startswith("run directory:")
        if line.startswith("step") and events and starts + len(events) == 3:
            slurm(*events.pop(0))
        if line.startswith("the run was stopped"):
            stops.append(line)
        assert not re.match(r"srun: error: n1: task 0: (?!Exited with exit code (129|143))", line), line
        if line.startswith("the run is done"):
            break
    assert [signal in stop for signal, stop in zip(("SIGHUP", "SIGTERM"), stops, strict=True)] == [True, True], stops
    saved = [re.search(r"the weights after step (\d+) .* goes on from step-(\d+)", stop).groups() for stop in stops]
    assert all(int(trained) == int(checkpoint) > 0 for trained, checkpoint in saved), stops
    assert len(list(directory.glob("*/config.toml"))) == 1, "one run"
    slurm.wait(job)
    assert "Restarts=2" in slurm("scontrol", "show", "job", job)


def test_what_sbatch_refuses_is_said(slurm: Slurm, tmp_path: Path) -> None:
    command = (*LAUNCH, "--partition", "none", "--", *TRAIN, "--logging.directory", str(tmp_path))
    done = subprocess.run(command, cwd=REPOSITORY, env=slurm.environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert re.search(r"titan-rl launch slurm: sbatch refuses .*job\.sh: .*invalid partition", done.stderr), done.stderr
