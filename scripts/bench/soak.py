"""How much memory every process of a long run keeps for each group that it has trained.

    python scripts/bench/soak.py [--steps 5000]          about eight minutes on two quiet cores

Starts `copy4_async` with few groups per step, reads the memory of all its processes from outside, a page that several
share as a part of each (PSS), and fits a line to the second half of the run. Prints a table and, as its last line, one
JSON object: bytes per group by process, and of all together, `run`. A flat run has slopes within the noise of its
allocators, some hundred bytes.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict

import numpy as np
from parts.long_run import LongRun, long_run
from parts.table import print_report
from parts.watched import memory_of_children

GROUPS_PER_STEP = 8
LOOK_SECONDS = 2.0


def watch(run: LongRun, steps: int) -> dict[str, list[tuple[int, int]]]:
    """(step, bytes) of every process and of the run, until the last step: then the run closes."""
    seen: dict[str, list[tuple[int, int]]] = defaultdict(list)
    run.wait(lambda: run.step() > 1)
    named = run.processes()
    while (step := run.step()) < steps:
        if run.process.poll() is not None:
            raise RuntimeError(f"the run ended after step {step}:\n{run.output()[-3000:]}")
        memory = memory_of_children()
        seen["run"].append((step, sum(memory.values())))
        for name, pid in named.items():
            if pid in memory:
                seen[name].append((step, memory[pid]))
        time.sleep(LOOK_SECONDS)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    steps = parser.parse_args().steps
    with long_run({"loop.steps": steps, "loop.groups-per-step": GROUPS_PER_STEP}) as run:
        seen = watch(run, steps)
    figures: dict[str, float] = {}
    rows = []
    for name, points in sorted(seen.items()):
        late = np.array([point for point in points if point[0] > steps / 2], float)
        slope = float(np.polyfit(late[:, 0] * GROUPS_PER_STEP, late[:, 1], 1)[0])
        figures |= {f"{name}_bytes_per_group": round(slope, 1), f"{name}_mib": round(late[-1, 1] / 2**20, 1)}
        rows.append((name, f"{late[0, 1] / 2**20:.0f} MiB", f"{late[-1, 1] / 2**20:.0f} MiB", f"{slope:.0f}"))
    header = ("process", "half way", "at the end", "bytes per group")
    print_report(f"memory (PSS), {GROUPS_PER_STEP} groups per step", header, rows, figures)


if __name__ == "__main__":
    main()
