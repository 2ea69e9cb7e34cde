"""What timelines and recorded rollouts cost: copy4's steps with each ÷ without both.

    python scripts/bench/timeline.py [--rounds 3] [--steps 100] [--variants neither both]

Whole runs take turns, so that a change of the machine's speed hits all of them, and who begins alternates. A run counts
with the median seconds of its steps, and with the CPU seconds that all of its processes take per step, which say more
where others use the machine too. The first tenth of the steps is left out. A ratio is the median over the rounds. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from parts.table import print_report

VARIANTS = {"neither": (False, 0), "timelines": (True, 0), "rollouts": (False, 1), "both": (True, 1)}
"""`logging.spans` and `logging.rollouts`."""


def measure(directory: Path, steps: int, spans: bool, rollouts: int) -> tuple[float, float]:
    """Median seconds of a step, and CPU seconds of a step."""
    settings = {
        "loop.steps": steps,
        "evaluation.every": 0,
        "evaluation.prompts": 1,
        "evaluation.target-exact-match": 0,
        "logging.directory": directory,
        "logging.spans": str(spans).lower(),
        "logging.rollouts": rollouts,
    }
    options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "titan_rl.train", "--recipe", "copy4", *options]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    spent: list[tuple[int, float]] = []  # finished steps, CPU seconds so far
    while run.poll() is None:
        done = steps_in(directory)
        if len(done) > (spent[-1][0] if spent else 0):
            spent.append((len(done), cpu_seconds(run.pid)))
        time.sleep(0.1)
    if run.returncode:
        raise SystemExit(f"the run failed: exit code {run.returncode}")
    done = steps_in(directory)
    (first, before), (last, after) = next(each for each in spent if each[0] >= steps // 10), spent[-1]
    return median(done[steps // 10 :]), (after - before) / (last - first)


def steps_in(directory: Path) -> list[float]:
    """Seconds of the finished steps of the only run in a directory."""
    lines = [json.loads(line) for file in directory.glob("*/metrics.jsonl") for line in file.read_text().splitlines()]
    return [line["seconds/step"] for line in lines if "seconds/step" in line]


def cpu_seconds(run: int) -> float:
    """Of a process and all that it has started."""
    ticks: dict[int, int] = {}
    parents: dict[int, int] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents[int(file.parent.name)] = int(fields[1])
        ticks[int(file.parent.name)] = int(fields[11]) + int(fields[12])
    family = {run}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(ticks[each] for each in family if each in ticks) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["neither", "both"])
    arguments = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in arguments.variants}
    with tempfile.TemporaryDirectory() as directory:
        for number in range(arguments.rounds):
            for name in arguments.variants[:: -1 if number % 2 else 1]:
                where = Path(directory, f"{name}-{number}")
                found[name].append(measure(where, arguments.steps, *VARIANTS[name]))
                step, cpu = found[name][-1]
                said = f"round {number + 1} of {arguments.rounds}: {name} {1000 * step:.1f} ms, CPU {1000 * cpu:.1f} ms"
                print(said, file=sys.stderr, flush=True)
    rows, figures = [], {"rounds": arguments.rounds, "steps": arguments.steps}
    for name in arguments.variants[1:]:
        step, cpu = (
            median(one[each] / bare[each] for one, bare in zip(found[name], found[arguments.variants[0]], strict=True))
            for each in (0, 1)
        )
        rows.append((name, step, cpu))
        figures |= {f"{name}_step_ratio": step, f"{name}_cpu_ratio": cpu}
    title = f"copy4, {arguments.rounds} rounds of {arguments.steps} steps, with ÷ without"
    print_report(title, ("what", "seconds per step", "CPU seconds per step"), rows, figures)


if __name__ == "__main__":
    main()
