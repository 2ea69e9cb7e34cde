"""A run of `copy4_async` that goes on after it has learned everything, seen and disturbed from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

CONTROLLER = "controller"
STALL_SECONDS = 180.0
"""What takes longer has failed."""


class LongRun:
    def __init__(self, process: subprocess.Popen[bytes], directory: Path) -> None:
        self.process = process
        self._directory = directory

    def step(self) -> int:
        """The last one that is written; 0: none."""
        for metrics in self._directory.glob("*/metrics.jsonl"):
            with metrics.open("rb") as file:
                file.seek(max(0, metrics.stat().st_size - 65_536))
                lines = file.read().splitlines(keepends=True)
            return next((json.loads(line)["step"] for line in lines[:0:-1] if line.endswith(b"\n")), 0)
        return 0

    def output(self) -> str:
        return (self._directory / "output.log").read_text(errors="replace")

    def processes(self) -> dict[str, int]:
        """Process id by name: the controller, and every process whose standard output is a log of the run."""
        found = {CONTROLLER: self.process.pid}
        for entry in Path("/proc").iterdir():
            try:
                output = Path(os.readlink(entry / "fd" / "1"))
            except OSError:  # not a process, not ours, or gone
                continue
            # children of a process share its file and come later
            if output.parent.parent.parent == self._directory and output.stem not in found:
                found[output.stem] = int(entry.name)
        return found

    def wait(self, until: Callable[[], bool]) -> float:
        """Seconds until this is so. Raises RuntimeError if the run ends before, or it takes too long."""
        began = time.monotonic()
        while not until():
            if self.process.poll() is not None or time.monotonic() - began > STALL_SECONDS:
                raise RuntimeError(f"the run did not go on:\n{self.output()[-3000:]}")
            time.sleep(0.02)
        return time.monotonic() - began


@contextmanager
def long_run(settings: Mapping[str, object]) -> Iterator[LongRun]:
    """It runs; it is stopped at the end of the block."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        fixed = {"loop.untrainable-batches": 10**6, "evaluation.every": 0, "logging.directory": directory}
        options = [word for name, value in {**fixed, **settings}.items() for word in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "titan_rl.train", "--recipe", "copy4_async", *options]
        with (directory / "output.log").open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield LongRun(process, directory)
        finally:
            process.terminate()
            process.wait()
