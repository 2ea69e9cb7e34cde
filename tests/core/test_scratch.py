"""A process's private directory goes with it: at its exit, or when the next one starts."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from titan_rl.supervision.process import PREFIX, sweep_dead_scratch

PROGRAM = """
import sys
from titan_rl.supervision.process import scratch_directory
(scratch_directory() / "file").touch()
assert scratch_directory() is scratch_directory()
print(scratch_directory(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def parent() -> Iterator[Path]:
    """A temporary directory with a short name."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory)


def owner(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process with a scratch directory."""
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "TMPDIR": str(parent), "PYTHONPATH": str(root)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str], number: int = 0) -> None:
    process.send_signal(number)
    process.communicate()


def test_a_directory_is_removed_at_the_exit(parent: Path) -> None:
    process, directory = owner(parent)
    assert directory.parent == parent and (directory / "file").exists()
    end(process)
    assert list(parent.iterdir()) == []


def test_the_next_process_removes_what_a_killed_one_left_and_nothing_else(parent: Path) -> None:
    living, kept = owner(parent)
    killed, dead = owner(parent)
    end(killed, signal.SIGKILL)
    assert (dead / "file").exists()
    somebody_elses = [parent / ".tmpAbCdEf", parent / f"{PREFIX}file"]
    somebody_elses[0].mkdir()
    somebody_elses[1].touch()
    third, new = owner(parent)
    assert set(parent.iterdir()) == {kept, new, *somebody_elses}
    assert (kept / "file").exists()
    end(third)
    end(living, signal.SIGKILL)
    sweep_dead_scratch(parent)
    assert set(parent.iterdir()) == set(somebody_elses)


def test_a_long_name_of_the_temporary_directory_is_not_used(tmp_path: Path) -> None:
    long = tmp_path / ("long" * 10)
    long.mkdir()
    process, directory = owner(long)
    assert directory.parent == Path("/tmp")
    end(process)
    assert not directory.exists() and list(long.iterdir()) == []
