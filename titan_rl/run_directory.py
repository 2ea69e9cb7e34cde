"""The files of a run directory, and the lock that a living run holds on it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from titan_rl.errors import ConfigError

CONFIG, SUMMARY = "config.toml", "summary.json"
"""Written when the run starts, and when it is done."""
ENDING = "ending.json"
"""Written when the run ends and its process still can: its exit code, and how it ended, in words."""
METRICS = "metrics.jsonl"
"""The numbers of every step."""
CONTROL = "control"
"""There while the run is up: a link to the socket that takes commands, whose own path must be short."""


def lock_run(run: Path) -> int:
    """Lock a run directory for this process; returns the descriptor that holds the lock.

    Raises:
        ConfigError: a living process has it.
    """
    descriptor = os.open(run, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(f"{run} is the directory of a run that is still going on") from None
    return descriptor


def is_going_on(run: Path) -> bool:
    """Whether a living process has the run's directory."""
    descriptor = os.open(run, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
