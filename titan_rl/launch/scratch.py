"""This process's private directory, for files that must not outlive it: sockets, rendezvous files, temporary files.

A directory that a killed process left is removed by the next one that makes its own. The owner holds a lock on it,
which the kernel takes away with the process, so nobody else's directory and no living one is ever touched.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "titan_rl-"
LONGEST_PARENT = 40
"""Bytes of TMPDIR, which is not used if it is longer: the path of a socket has room for 107, and Monarch's and vLLM's
are up to 63 longer."""


@functools.cache
def scratch_directory() -> Path:
    """The directory, made at the first call and removed when this process exits."""
    parent = Path(tempfile.gettempdir())
    if len(os.fsencode(parent)) > LONGEST_PARENT:
        parent = Path("/tmp")
    sweep_dead_scratch(parent)
    # It gets the name by which others look for it only when it is locked.
    made = Path(tempfile.mkdtemp(prefix=".", dir=parent))
    fcntl.flock(os.open(made, os.O_RDONLY), fcntl.LOCK_EX)  # for as long as this process lives
    directory = made.rename(parent / f"{PREFIX}{os.getpid()}{made.name}")
    atexit.register(_remove, directory, os.getpid())
    return directory


def _remove(directory: Path, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # and not a fork of it
        shutil.rmtree(directory, ignore_errors=True)


def sweep_dead_scratch(parent: Path) -> list[Path]:
    """Remove what this user's dead processes left; returns which directories."""
    removed = []
    for directory in parent.glob(f"{PREFIX}*"):
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # another process swept it first, or it is another user's
        try:
            if os.fstat(descriptor).st_uid == os.getuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
                removed.append(directory)
        except BlockingIOError:
            pass  # its owner lives
        finally:
            os.close(descriptor)
    return removed
