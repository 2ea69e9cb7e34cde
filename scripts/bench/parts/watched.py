"""A training run as whoever launches it sees it: when it got how far, and what all its processes took."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import resource
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import psutil

POLL_SECONDS = 0.01
MEMORY_SECONDS = 4.0
"""Between two looks, each of which takes a core about 0.1 s where processes are many and large."""
LATER = 10
"""Steps before this one are not counted among the later ones."""
PR_SET_CHILD_SUBREAPER = 36


@dataclass(slots=True)
class WatchedRun:
    """All times are seconds since the launch."""

    steps: list[float] = field(default_factory=list)
    """When each optimizer step was known to be done."""
    scores: list[tuple[float, float]] = field(default_factory=list)
    """When an evaluation was known to be done, and its exact match."""
    wall: float = 0.0
    cpu: float = 0.0
    """User and system seconds of all processes."""
    memory: float = 0.0
    """Most memory of all processes together, in GB: pages that several share count once (PSS)."""

    def figures(self, target: float) -> dict[str, float]:
        """`step`: the median of later ones. `learned`: when exact match reached `target`; inf if it never did."""
        return {
            "step": statistics.median(after - before for before, after in pairwise(self.steps[LATER - 1 :])),
            "first_step": self.steps[0],
            "learned": next((seconds for seconds, score in self.scores if score >= target), math.inf),
            "wall": self.wall,
            "cpu": self.cpu,
            "memory": self.memory,
        }


def watch(
    command: Sequence[str], directory: Path, environment: Mapping[str, str], *, steps: int | None = None
) -> WatchedRun:
    """Run a program to its end that writes `metrics.jsonl` into a directory of its own below `directory`. This process
    must have no other children: those that are left when the program has ended are waited for and counted.

    Args:
        steps: that it must make.

    Raises:
        RuntimeError: it failed, or made another number of steps.
    """
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):  # orphans of the run are to become our children
        raise RuntimeError("the orphans of a run cannot be waited for")
    run, log = WatchedRun(), directory / "output.log"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    launched = time.monotonic()
    with log.open("wb") as output:
        program = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        memory_at, read, ended = 0.0, 0, False
        while not ended:
            time.sleep(POLL_SECONDS)
            ended = program.poll() is not None  # asked first: what it wrote before it ended is read below
            now = time.monotonic() - launched
            read += _take_lines(run, directory, read, now)
            if now >= memory_at:
                run.memory, memory_at = max(run.memory, sum(memory_of_children().values()) / 1e9), now + MEMORY_SECONDS
        run.wall = now
    finally:
        program.kill()
        _wait_for_children()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    run.cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if program.returncode or len(run.steps) != (steps or len(run.steps)):
        raise RuntimeError(
            f"{' '.join(command)}\nended with {program.returncode} after {len(run.steps)} of {steps or 'all'} steps:\n"
            f"{log.read_text(errors='replace')[-3000:]}"
        )
    return run


def _take_lines(run: WatchedRun, directory: Path, read: int, now: float) -> int:
    """Add what was written since so many bytes were read; returns the bytes of these lines."""
    for path in directory.glob("*/metrics.jsonl"):
        with path.open("rb") as file:
            file.seek(read)
            lines = file.read()
        lines = lines[: lines.rfind(b"\n") + 1]
        for numbers in map(json.loads, lines.splitlines()):
            if (score := numbers.get("evaluation/exact_match")) is None:
                run.steps.append(now)
            else:
                run.scores.append((now, score))
        return len(lines)
    return 0


def memory_of_children() -> dict[int, int]:
    """Bytes of every process below this one, by its id. A page that several share is a part of each (PSS)."""
    memory = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            memory[process.pid] = process.memory_full_info().pss
    return memory


def _wait_for_children(seconds: float = 30.0) -> None:
    """Until all have ended, orphans included; those that do not are killed."""
    children = psutil.Process().children(recursive=True)
    _, alive = psutil.wait_procs(children, timeout=seconds)
    for process in alive:
        process.kill()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
