"""What a run must not leave behind, and how tests look for it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import uuid
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
RUN_SECONDS = 240
"""Bound on one small run on a busy machine."""

SMALL = ("--recipe", "copy4", "--generator.count", "1", "--loop.groups-per-step", "4", "--evaluation.prompts", "20")
ENDLESS = (*SMALL, "--loop.steps", "100000", "--evaluation.every", "0")
SIMULATED = ("--generator.engine", "simulated")
"""Where it makes no difference, and starts sooner."""

GONE_SECONDS = 30.0
"""Bound on the end of what is told by the kernel to end."""

_marks: dict[int, bytes] = {}
"""Variable by process id of a run. Whatever it starts inherits that, user code's processes too, in whatever session."""


def start_run(
    *arguments: str, runs: Path, program: tuple[str, ...] = ("-m", "titan_rl.train")
) -> subprocess.Popen[str]:
    """A real run as a user starts it, marked so that everything it leaves can be found."""
    mark = uuid.uuid4().hex
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TITAN_RL_MARK": mark}
    run = subprocess.Popen(
        [sys.executable, *program, *arguments, "--logging.directory", str(runs)],
        cwd=REPOSITORY,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    _marks[run.pid] = mark.encode()
    return run


def finish(run: subprocess.Popen[str]) -> str:
    """Wait for the run's end and return what it printed."""
    try:
        output, _ = run.communicate(timeout=RUN_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        output, _ = run.communicate()
        raise AssertionError(f"the run did not end within {RUN_SECONDS} s; it printed:\n{output}") from None
    return output


def stop(run: subprocess.Popen[str], number: signal.Signals = signal.SIGINT) -> str:
    """Stop the run by a signal, which leaves nothing; returns what it printed."""
    run.send_signal(number)
    output = finish(run)
    assert run.returncode == 128 + number, output
    assert_nothing_is_left(run)
    return output


def wait_for_line(run: subprocess.Popen[str], beginning: str) -> str:
    """Read the run's output up to a line, which is returned; the rest stays to be read."""
    assert run.stdout is not None
    for line in run.stdout:
        if line.startswith(beginning):
            return line
    raise AssertionError(f"the run ended before it printed a line that begins with {beginning!r}")


def descendants(run: int) -> list[int]:
    """Living processes of a run, by its process id (the environment of a zombie is empty)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if _marks[run] in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def wait_until_gone(run: int) -> None:
    """Until no process of a run that was killed lives; who hears of that from the kernel needs a moment to end."""
    while pids := descendants(run):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                descriptor = os.pidfd_open(pid)
                poll = select.poll()
                poll.register(descriptor, select.POLLIN)
                ended = poll.poll(1000 * GONE_SECONDS)
                os.close(descriptor)
                assert ended, Path(f"/proc/{pid}/cmdline").read_bytes()


def process_of(run: int, mesh: str, rank: int = 0) -> int:
    """Its id, by its title."""
    for pid in descendants(run):
        with contextlib.suppress(OSError):  # it has just ended
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(f"titan_rl {mesh} rank {rank} ".encode()):
                return pid
    raise AssertionError(f"no process of {mesh} rank {rank}")


def shared_memory_of(pid: int) -> list[str]:
    """Our files in shared memory that carry this process id."""
    return [path.name for path in Path("/dev/shm").glob(f"titan_rl-{pid}-*")]


def listening_addresses_of(run: int) -> list[IPv4Address | IPv6Address]:
    """Where a living process of the run listens on a TCP port."""
    inodes: set[str] = set()
    for pid in descendants(run):
        try:
            links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        inodes.update(link[len("socket:[") : -1] for link in links if link.startswith("socket:["))
    addresses: list[IPv4Address | IPv6Address] = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                words = bytes.fromhex(fields[1].partition(":")[0])  # of 4 bytes, each in the order of this machine
                packed = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                addresses.append(IPv4Address(packed) if len(packed) == 4 else IPv6Address(packed))
    return addresses


def assert_nothing_is_left(run: subprocess.Popen[str]) -> None:
    assert descendants(run.pid) == []  # and so no port
    assert shared_memory_of(run.pid) == []
    assert list(Path(tempfile.gettempdir()).glob(f"titan_rl-{run.pid}*")) == []  # the scratch directory


def ending(output: str) -> str:
    """The line that says what ended the run. Only the path of the report follows."""
    lines = output.rstrip("\n").split("\n")
    return lines[-2] if lines[-1].startswith("report: ") else lines[-1]
