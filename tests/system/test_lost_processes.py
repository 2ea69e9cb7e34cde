"""Runs that lose a process, as a user starts them: what is said, and that nothing stays behind. About 15 s each.

And runs beside others: a start removes what dead runs left, and nothing of a living one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from leftovers import (
    ENDLESS,
    SIMULATED,
    assert_nothing_is_left,
    descendants,
    ending,
    finish,
    listening_addresses_of,
    process_of,
    shared_memory_of,
    start_run,
    stop,
    wait_for_line,
    wait_until_gone,
)

from titan_rl.supervision.process import PREFIX, sweep_dead_scratch
from titan_rl.weights.segment_files import sweep_dead_segments

FULL = pytest.mark.acceptance
LONGER_THAN_MONARCH_WAITS = 70.0
"""Seconds. By itself it takes a process that says nothing for 30 s for dead, and one ends that was not asked for 60."""


def named_semaphores_of(run: int) -> list[str]:
    """Those in shared memory that a living process of the run uses."""
    maps = [Path(f"/proc/{pid}/maps").read_text().splitlines() for pid in descendants(run)]
    return [line for lines in maps for line in lines if "/dev/shm/sem." in line]


FOLLOWER = ("generator0", 1)
OTHERS = (("rollout0", 0), ("router", 0), ("trainer", 0))


@pytest.mark.parametrize("victims", [(FOLLOWER,), pytest.param(OTHERS, marks=FULL)])
def test_whatever_dies_is_named_and_replaced_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victims: tuple[tuple[str, int], ...]
) -> None:
    """Each once. In CI test_chaos kills the others."""
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        monkeypatch.setenv("TMPDIR", temporary)
        run = start_run(*ENDLESS, "--generator.tensor-parallel", "2", runs=tmp_path)
        wait_for_line(run, "step ")
        addresses = listening_addresses_of(run.pid)
        assert addresses and all(address.is_loopback for address in addresses), "two ranks of an engine meet"
        assert named_semaphores_of(run.pid) == []
        steps = []
        for mesh, rank in victims:
            victim = process_of(run.pid, mesh, rank=rank)
            os.kill(victim, signal.SIGKILL)
            cause = f"lost {mesh}: {mesh} rank {rank} (pid {victim}) was killed by signal 9 (SIGKILL); done again: "
            wait_for_line(run, cause)
            wait_for_line(run, f"{mesh} is back after ")
            steps.append(int(wait_for_line(run, "step ").split()[1].partition("/")[0]))
        assert steps == sorted(set(steps)), "none is done again, and each goes further"
        output = stop(run)
        assert "the weights after step" in output and "Traceback" not in output
        # torch makes this directory for what it compiles, and finds it again
        assert [left for left in os.listdir(temporary) if not left.startswith("torchinductor_")] == []


def test_a_run_that_waits_for_generators_outlives_hangs_and_deaths_beyond_its_restarts(tmp_path: Path) -> None:
    waits = ("--placement.restarts", "0", "--placement.too-few-generators", "wait", "--placement.hang-seconds", "10")
    run = start_run(*ENDLESS, *SIMULATED, *waits, runs=tmp_path)
    for number, said in ((signal.SIGSTOP, "no progress for 10 s"), (signal.SIGKILL, "killed by signal 9")):
        wait_for_line(run, "step ")
        os.kill(process_of(run.pid, "generator0"), number)
        assert said in wait_for_line(run, "lost generator0: ")
        wait_for_line(run, "generator0 is back after ")
    wait_for_line(run, "step ")
    stop(run)


@pytest.mark.parametrize("victim", ["generator0", pytest.param("rollout0", marks=FULL)])
def test_what_is_not_to_be_replaced_ends_the_run_by_its_name_and_the_weights_are_saved(
    tmp_path: Path, victim: str
) -> None:
    run = start_run(*ENDLESS, *SIMULATED, "--placement.restarts", "0", runs=tmp_path)
    wait_for_line(run, "step ")
    os.kill(process_of(run.pid, victim), signal.SIGKILL)
    output = finish(run)
    assert run.returncode == 1, output
    lines = [line for line in output.splitlines() if line.startswith(("failed: ", "the weights"))]
    assert any(f"{victim} failed 1 time" in line for line in lines[:-1]), output
    assert "the weights after step" in output and "Traceback" not in output
    assert_nothing_is_left(run)


@pytest.mark.parametrize("born", [pytest.param(1, marks=FULL), 3, pytest.param(5, marks=FULL)])
def test_a_controller_that_is_killed_while_it_starts_leaves_no_process(tmp_path: Path, born: int) -> None:
    """At its first process, in the middle, and when the last, an environment's own, is there."""
    run = start_run(*ENDLESS, runs=tmp_path)
    while len(descendants(run.pid)) <= born:
        assert run.poll() is None, finish(run)
    os.kill(run.pid, signal.SIGKILL)
    wait_until_gone(run.pid)
    finish(run)
    sweep_dead_scratch(Path(tempfile.gettempdir()))
    sweep_dead_segments()
    assert list(Path(tempfile.gettempdir()).glob(f"titan_rl-{run.pid}*")) == []
    assert_nothing_is_left(run)


@pytest.mark.acceptance
def test_a_run_waits_for_a_stopped_generator(tmp_path: Path) -> None:
    run = start_run(*ENDLESS, runs=tmp_path)
    wait_for_line(run, "step ")
    pid = process_of(run.pid, "generator0")
    os.kill(pid, signal.SIGSTOP)
    time.sleep(LONGER_THAN_MONARCH_WAITS)
    os.kill(pid, signal.SIGCONT)
    for _ in range(2):
        wait_for_line(run, "step ")
    stop(run)


@pytest.mark.acceptance
def test_a_process_that_is_stopped_at_birth_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stops = tmp_path / "sitecustomize.py"
    stops.write_text(
        "import os, signal, sys\nfrom pathlib import Path\nborn = Path(__file__).with_name('born')\n"
        "set_cores = os.sched_setaffinity\n"
        "def stop(*words):\n"
        "    if 'generator0' in os.environ.get('TITAN_RL_RENDEZVOUS', '') and not born.exists():\n"
        "        born.touch()\n        os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    set_cores(*words)\n"
        "os.sched_setaffinity = stop\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    run = start_run(*ENDLESS, *SIMULATED, runs=tmp_path / "runs")
    wait_for_line(run, "the processes of generator0 were slow to start: they are started again")
    wait_for_line(run, "step ")
    stop(run)


SAME_ID = """
import os, sys
from titan_rl.weights.segment_files import DIRECTORY, segment_path
for channel in ("policy", "samples.worker0", "samples.rollout0"):
    segment_path(DIRECTORY, os.getpid(), channel, 0).write_bytes(b"of a dead run with this process id")
os.execv(sys.executable, [sys.executable, "-m", "titan_rl.train", *sys.argv[1:]])
"""
"""As in a container that is started again and keeps its /dev/shm."""


def remains_of_a_dead_run() -> list[Path]:
    """What a killed controller leaves."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    segment = Path(f"/dev/shm/titan_rl-{dead.pid}-policy-0")
    segment.write_bytes(b"weights")
    scratch = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{dead.pid}."))
    return [segment, scratch]


@pytest.mark.acceptance
def test_a_start_removes_what_a_dead_run_left_and_nothing_of_a_living_one(tmp_path: Path) -> None:
    first = start_run(*ENDLESS, runs=tmp_path / "first")
    wait_for_line(first, "step ")
    remains = remains_of_a_dead_run()
    owned = shared_memory_of(first.pid)
    second = start_run(*ENDLESS, runs=tmp_path / "second", program=("-c", SAME_ID))
    wait_for_line(second, "step ")
    assert [each for each in remains if each.exists()] == []
    assert owned and set(owned) & set(shared_memory_of(first.pid)), "its publications live on"
    stop(second, signal.SIGTERM)
    for _ in range(2):
        wait_for_line(first, "step ")
    assert ending(stop(first, signal.SIGTERM)).startswith("the run was stopped by SIGTERM")
    assert not any(os.path.exists(each) for each in remains)
