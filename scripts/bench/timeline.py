"""What timelines and recorded rollouts cost: seconds of copy4's steps with each ÷ without both.

    python scripts/bench/timeline.py [--rounds 3] [--steps 150]

Whole runs take turns, so that a change of the machine's speed hits all of them, and who begins alternates. A run counts
with the median of its steps, a ratio is the median over the rounds. The CPU seconds are those of a whole run, its start
too. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from parts.table import print_report

VARIANTS = {"neither": (False, 0), "timelines": (True, 0), "rollouts": (False, 1), "both": (True, 1)}
"""`logging.spans` and `logging.rollouts`."""


def measure(directory: Path, steps: int, spans: bool, rollouts: int) -> tuple[float, float]:
    """Median seconds of a step, and CPU seconds of the run."""
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
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "titan_rl.train", "--recipe", "copy4", *options], check=True, stdout=subprocess.DEVNULL
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    (run,) = directory.iterdir()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return median(line["seconds/step"] for line in lines[steps // 10 :] if "seconds/step" in line), cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    arguments = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory() as directory:
        for number in range(arguments.rounds):
            for name in list(VARIANTS)[:: -1 if number % 2 else 1]:
                found[name].append(measure(Path(directory, f"{name}-{number}"), arguments.steps, *VARIANTS[name]))
                print(f"round {number + 1} of {arguments.rounds}: {name}", file=sys.stderr, flush=True)
    rows, figures = [], {"rounds": arguments.rounds, "steps": arguments.steps}
    for name in list(VARIANTS)[1:]:
        step, cpu = (
            median(one[each] / bare[each] for one, bare in zip(found[name], found["neither"], strict=True))
            for each in (0, 1)
        )
        rows.append((name, step, cpu))
        figures |= {f"{name}_step_ratio": step, f"{name}_cpu_ratio": cpu}
    title = f"copy4, {arguments.rounds} rounds of {arguments.steps} steps, with ÷ without"
    print_report(title, ("what", "seconds per step", "CPU seconds of the run"), rows, figures)


if __name__ == "__main__":
    main()
