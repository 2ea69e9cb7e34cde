"""The files behind shared memory: how they are named, and how those of dead owners are removed.

A file outlives a killed process, so its name carries the process id of its owner. The start of a run removes the
files whose owner is gone. Only names of the exact pattern are ever touched. Standard library only: the
controller calls this without loading torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from titan_rl.errors import ConfigError

DIRECTORY = Path("/dev/shm")
_PATTERN = re.compile(r"titan_rl-(?P<owner>\d+)-(?P<channel>[A-Za-z0-9_.]+)-(?P<slot>\d+)")
_CHANNEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.]*")


def segment_path(directory: Path, owner_pid: int, channel: str, slot: int) -> Path:
    """Where a publication slot of a channel lives. Raises ConfigError for a channel that is no plain word."""
    return directory / f"titan_rl-{owner_pid}-{check_channel(channel)}-{slot}"


def check_channel(channel: str) -> str:
    """The channel, which becomes part of file names. Raises ConfigError if it is no plain word."""
    if not _CHANNEL.fullmatch(channel):
        raise ConfigError(f"channel {channel!r} must consist of letters, digits, '_' and '.', no '.' first")
    return channel


def sweep_dead_segments(directory: Path = DIRECTORY) -> list[Path]:
    """Remove the files whose owner is dead; returns which. Files of other users stay.

    A process id that was given to a new process keeps a dead owner's files until that one ends. Processes that
    share the directory must see each other's process ids (containers that share /dev/shm share the pid namespace).
    """
    return _remove(directory, lambda owner, channel: not _alive(owner))


def remove_segments_of(owner_pid: int, directory: Path = DIRECTORY, *, channel: str = "") -> list[Path]:
    """Remove all files of one owner, whoever wrote them, or those of one channel; returns which. Mappings that exist
    stay valid."""
    return _remove(directory, lambda owner, its: owner == owner_pid and channel in ("", its))


def _remove(directory: Path, doomed: Callable[[int, str], bool]) -> list[Path]:
    removed = []
    for path in sorted(directory.iterdir()):
        match = _PATTERN.fullmatch(path.name)
        if match is None or not doomed(int(match["owner"]), match["channel"]):
            continue
        try:
            path.unlink()
        except (FileNotFoundError, PermissionError):
            continue  # another process swept it first, or it is another user's
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
