"""How much memory every process of a long run keeps for each group that it has trained.

Starts `copy4_async` with few groups per step, reads the resident memory of its processes from outside once a second,
and fits a line to the second half of the run. Prints a table and, as its last line, one JSON object: bytes per group by
process. A flat run has slopes within the noise of its allocators, some hundred bytes.

    scripts/bench/soak.py [--steps 5000]          about eight minutes on two quiet cores
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from parts.table import print_report

GROUPS_PER_STEP = 8
CONTROLLER = "controller"


def command(directory: Path, steps: int) -> list[str]:
    settings = {
        "loop.steps": steps,
        "loop.groups-per-step": GROUPS_PER_STEP,
        "loop.untrainable-batches": 10**6,  # it goes on after it has learned everything
        "evaluation.every": 0,
        "logging.directory": directory,
    }
    options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "titan_rl.train", "--recipe", "copy4_async", *options]


def processes(logs: Path, controller: int) -> dict[str, int]:
    """Process id by name: the controller, and every process whose standard output is a file in `logs`."""
    found = {CONTROLLER: controller}
    for entry in Path("/proc").iterdir():
        try:
            output = Path(os.readlink(entry / "fd" / "1"))
        except OSError:  # not a process, not ours, or gone
            continue
        if output.parent == logs and output.stem not in found:  # children of a process share its file and come later
            found[output.stem] = int(entry.name)
    return found


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def watch(run: subprocess.Popen[bytes], directory: Path, steps: int) -> dict[str, list[tuple[int, int]]]:
    """(step, resident bytes) of every process, once a second until the last step: then the run closes."""
    seen: dict[str, list[tuple[int, int]]] = defaultdict(list)
    named: dict[str, int] = {}
    while run.poll() is None:
        time.sleep(1)
        metrics = next(directory.glob("*/metrics.jsonl"), None)
        lines = metrics.read_text().splitlines() if metrics is not None else []
        if metrics is None or len(lines) < 2:
            continue
        named = named or processes(metrics.parent / "logs", run.pid)
        step = json.loads(lines[-1])["step"]
        if step == steps:
            break
        for name, pid in named.items():
            try:
                seen[name].append((step, resident_bytes(pid)))
            except (OSError, IndexError):  # it has ended
                return seen
    run.wait()
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        with (directory / "output.log").open("wb") as output:
            run = subprocess.Popen(command(directory, steps), stdout=output, stderr=subprocess.STDOUT)
            try:
                seen = watch(run, directory, steps)
            finally:
                run.terminate()
                run.wait()
        if run.returncode not in (0, 1):  # 1: its last evaluation missed the recipe's target
            print((directory / "output.log").read_text(), file=sys.stderr)
            return 1
    figures: dict[str, float] = {}
    rows = []
    for name, points in sorted(seen.items()):
        late = np.array([point for point in points if point[0] > steps / 2], float)
        slope = float(np.polyfit(late[:, 0] * GROUPS_PER_STEP, late[:, 1], 1)[0])
        figures[f"{name}_bytes_per_group"] = round(slope, 1)
        rows.append((name, f"{late[0, 1] / 2**20:.0f} MiB", f"{late[-1, 1] / 2**20:.0f} MiB", f"{slope:.0f}"))
    header = ("process", "half way", "at the end", "bytes per group")
    print_report(f"resident memory, {GROUPS_PER_STEP} groups per step", header, rows, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
