"""The files behind shared memory: how they are named, and how those of dead owners are removed.

A file outlives a killed process, so its name carries the process id of its owner (`processes.owner_pid`). The start of
a run removes the files whose owner is gone. Only names of the exact pattern are ever touched. Importing this loads
the standard library only, because the controller does.

A publication is on several hosts, each of which has an owner. So its location leaves the owner out:

    /dev/shm/policy-0     is, where process 4711 owns the files,     /dev/shm/titan_rl-4711-policy-0
"""

from __future__ import annotations

import mmap
import os
import re
import shutil
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from titan_rl.errors import StorageError
from titan_rl.processes import owner_pid

if TYPE_CHECKING:
    from torch import Tensor

DIRECTORY = Path("/dev/shm")
_PATTERN = re.compile(r"titan_rl-(?P<owner>\d+)-(?P<channel>[A-Za-z0-9_.]+)-(?P<slot>\d+)")


def segment_path(directory: Path, owner_pid: int, channel: str, slot: int) -> Path:
    """Where a slot of a channel, which is a plain word, lives."""
    return directory / f"titan_rl-{owner_pid}-{channel}-{slot}"


def segment_location(directory: Path, channel: str, slot: int) -> str:
    """Of a publication: the same on every host."""
    return f"{directory}/{channel}-{slot}"


def segment_at(location: str) -> Path:
    """This host's file of a publication."""
    path = Path(location)
    return path.with_name(f"titan_rl-{owner_pid()}-{path.name}")


def create_segment(path: Path, nbytes: int) -> None:
    """A new file whose memory is really there, so that no write to it can fail later; one of that name is removed.
    Raises StorageError if it does not fit."""
    path.unlink(missing_ok=True)  # of a process with the same owner that did not close
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        path.unlink()
        free = shutil.disk_usage(path.parent).free
        raise StorageError(
            f"a segment of {nbytes / 2**20:.0f} MiB does not fit in {path.parent}, where {free / 2**20:.0f} MiB are "
            f"free ({error.strerror}); make it larger (containers: --shm-size)"
        ) from error
    finally:
        os.close(descriptor)


Identity = tuple[int, int, int]
"""Device, inode and size of a file: they change when its name gets another file, or when it is cut."""


def map_segment(path: Path) -> tuple[mmap.mmap, Identity]:
    """The whole file as memory, and what it was then: reading past the end of a file that was cut kills the process.
    Raises FileNotFoundError, also for an empty file."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        *_, size = identity = identity_of(descriptor)
        if not size:
            raise FileNotFoundError(f"{path} is empty")
        return mmap.mmap(descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE), identity
    finally:
        os.close(descriptor)


def map_tensor(path: Path, *, page_lock: bool = True) -> tuple[Tensor, Identity]:
    """As `map_segment`, in a tensor [N] uint8. Its pages are locked where this process uses CUDA, which takes a second
    for some GB: only then does a copy run at the speed of the link and beside the host. Raises also StorageError: they
    cannot be locked."""
    import numpy as np
    import torch

    memory, identity = map_segment(path)
    array = np.frombuffer(memory, np.uint8)
    if page_lock and torch.cuda.is_initialized():
        address, runtime = array.ctypes.data, torch.cuda.cudart()
        if (error := runtime.cudaHostRegister(address, array.nbytes, 0)).value:
            raise StorageError(f"CUDA cannot lock the {array.nbytes >> 20} MiB of {path} in memory ({error})")
        # The array goes with the last view of it; the mapping, which must outlast the lock, after this call.
        weakref.finalize(array, lambda mapped: runtime.cudaHostUnregister(address), memory).atexit = False
    return torch.from_numpy(array), identity


def identity_of(file: Path | int) -> Identity:
    """Of a path, which raises FileNotFoundError where there is none, or an open descriptor."""
    state = os.stat(file)
    return state.st_dev, state.st_ino, state.st_size


def sweep_dead_segments(directory: Path = DIRECTORY) -> list[Path]:
    """Remove the files whose owner is dead; returns which. Files of other users stay.

    A process id that was given to a new process keeps a dead owner's files until that one ends: rather that than to
    take a living owner for a dead one. The start of a run that has a dead owner's id itself removes them (`run`).
    Processes that share the directory must see each other's process ids (containers that share /dev/shm share the pid
    namespace).
    """
    return _remove(directory, lambda owner, _: not _alive(owner))


def remove_segments_of(owner_pid: int, directory: Path = DIRECTORY, *, channel: str = "") -> list[Path]:
    """Remove all files of one owner, or those of one channel; returns which. Mappings that exist stay valid."""
    return _remove(directory, lambda owner, its: owner == owner_pid and channel in ("", its))


def _remove(directory: Path, unwanted: Callable[[int, str], bool]) -> list[Path]:
    """`unwanted`: of an owner and a channel."""
    removed = []
    for path in sorted(directory.iterdir()):
        if (match := _PATTERN.fullmatch(path.name)) and unwanted(int(match["owner"]), match["channel"]):
            with suppress(FileNotFoundError, PermissionError):  # another process was first, or it is another user's
                path.unlink()
                removed.append(path)
    return removed


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True  # someone else's process; or no process id at all, which nobody here wrote
    return True
