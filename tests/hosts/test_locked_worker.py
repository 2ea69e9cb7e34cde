"""A worker serves one run at a time; what a controller has left that was killed makes room for the next run. Its logs
keep nobody waiting."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from titan_rl.hosts.agent import lock_worker
from titan_rl.hosts.host import SHIP_BYTES, AttachedHost
from titan_rl.supervision.fork_server import Stage


def held(file: Path) -> int:
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


async def test_a_free_worker_is_locked_at_once(tmp_path: Path) -> None:
    mine = await lock_worker(tmp_path / "lock", "/runs/mine", 60.0)
    with pytest.raises(BlockingIOError):
        fcntl.flock(os.open(tmp_path / "lock", os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(mine)


async def test_a_run_that_ends_is_waited_for(tmp_path: Path) -> None:
    other = held(tmp_path / "lock")
    locking = asyncio.ensure_future(lock_worker(tmp_path / "lock", "/runs/mine", 60.0))
    await asyncio.sleep(0)  # it has looked once
    os.close(other)
    os.close(await locking)


async def test_a_run_that_does_not_end_is_not_waited_for_longer(tmp_path: Path) -> None:
    held(tmp_path / "lock")
    with pytest.raises(TimeoutError):
        await lock_worker(tmp_path / "lock", "/runs/mine", 0.1)


async def test_an_earlier_agent_of_the_same_run_is_killed(tmp_path: Path) -> None:
    hold = (
        "import asyncio, sys; from pathlib import Path; from titan_rl.hosts.agent import lock_worker; "
        "asyncio.run(lock_worker(Path(sys.argv[1]), '/runs/mine', 60.0)); "
        "print('locked', flush=True); input()"
    )
    earlier = program("-c", hold, str(tmp_path / "lock"))
    until(earlier, "locked")
    left = Path(f"/dev/shm/titan_rl-{earlier.pid}-policy-0")
    left.write_bytes(b"weights")
    os.close(await lock_worker(tmp_path / "lock", "/runs/mine", 60.0))
    assert not left.exists()  # though nobody has reaped the process
    assert earlier.wait() == -signal.SIGKILL


def program(*arguments: str) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, *arguments], bufsize=1, **pipes)


def until(process: subprocess.Popen[str], what: str) -> list[str]:
    """What it says until a line begins so."""
    said = []
    for line in process.stdout:
        said.append(line)
        if line.startswith(what):
            return said
    raise AssertionError("".join(said))


def lend() -> tuple[subprocess.Popen[str], str]:
    """A worker that listens, and where."""
    worker = program("-m", "titan_rl.cli", "worker", "--listen", "127.0.0.1:0")
    listens = next(line for line in worker.stdout if "listens on" in line)
    return worker, listens.partition("listens on ")[2].split()[0]


@pytest.fixture(scope="module")
def worker() -> Iterator[str]:
    lent, address = lend()
    yield address
    lent.terminate()
    lent.wait()


def controller(*arguments: str) -> subprocess.Popen[str]:
    return program(str(Path(__file__).with_name("attaching.py")), *arguments)


def test_what_a_killed_controller_has_left_ends_before_the_next_run_would_be_refused(worker: str) -> None:
    first = controller(worker)
    until(first, "attached")
    refused = controller(worker)
    assert "serves another run" in until(refused, "refused")[-1]
    assert refused.wait(60) == 0
    first.kill()
    first.wait()
    second = controller(worker)
    until(second, "attached")
    second.stdin.write("leave\n")
    assert second.wait(60) == 0


def test_a_host_whose_agent_has_died_can_be_attached_again(worker: str) -> None:
    run = controller(worker)
    agent = int(until(run, "attached")[-1].split()[1])
    left = Path(f"/dev/shm/titan_rl-{agent}-policy-0")
    left.write_bytes(b"weights")
    os.kill(agent, signal.SIGKILL)
    until(run, "lost host1")
    run.stdin.write("attach\n")
    assert int(until(run, "attached")[-1].split()[1]) != agent
    assert not left.exists()
    run.stdin.write("leave\n")
    assert run.wait(60) == 0


def test_an_agent_dies_with_its_worker() -> None:
    """Nothing can be started there any more, so the host must not seem to be alive."""
    lent, address = lend()
    run = controller(address)
    until(run, "attached")
    lent.kill()
    lent.wait()
    until(run, "lost host1")
    run.stdin.write("leave\n")
    assert run.wait(60) == 0


def test_a_disk_that_stalls_does_not_keep_the_controller_from_its_hosts(worker: str, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    os.mkfifo(tmp_path / "logs" / "host1.log")  # nobody reads it: to open it is to wait
    run = controller(worker, str(tmp_path / "logs"))
    until(run, "attached")
    run.stdin.write("leave\n")
    assert run.wait(60) == 0


class LogsOf(AttachedHost):
    """A host whose answers a test gives."""

    def __init__(self, directory: Path) -> None:
        address = ("127.0.0.1", 1)
        about = {"stage": Stage, "controller": address, "silent_seconds": 1.0, "on_end": print, "on_lost": print}
        super().__init__("host1", "127.0.0.1:1", log_directory=str(directory), **about)  # type: ignore[arg-type]
        self.asked: list[tuple[dict[str, int], int]] = []
        self.text = b"first\n"

    async def _call(self, endpoint: Any, *args: Any, seconds: float | None = None) -> Any:
        known, most = args
        self.asked.append((dict(known), most))
        found = {"log": self.text[known.get("log", 0) :][:most]}
        if len(self.asked) == 1:  # it is detached, and says something more, while it answers
            self._detaches.set()
            self.text += b"last\n" * SHIP_BYTES
        return found


async def test_the_last_lines_of_a_host_are_taken_if_it_is_detached_while_it_answers(tmp_path: Path) -> None:
    host = LogsOf(tmp_path)
    await host._ship_logs()
    assert (tmp_path / "log").read_bytes() == host.text
