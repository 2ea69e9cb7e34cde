"""Whether a stranger's task learns with `titan-rl train task.py` and nothing else.

    python scripts/bench/first_try.py [--set frozen] [--only NAME …] [--seeds 0 1 2] [--longest 300]

`tasks/frozen` are ten small tasks as users would write them, of ten kinds; nobody looks at them when defaults are
chosen. `tasks/dev` are ten others of the same kinds, for that. A task is learned if the mean reward on its held-out
prompts comes to 0.9 of the best that a perfect policy gets (`tasks.json`) within so many seconds. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from parts.table import print_report

from titan_rl.view.findings import findings
from titan_rl.view.read import read_run

TASKS = Path(__file__).with_name("tasks")
ENOUGH = 0.9
"""Of what can be reached."""


def train(task: Path, seed: int, longest: float) -> tuple[float, float, float, list[str]]:
    """Mean held-out reward before and after training, seconds, and what the run's findings say to do; after so many
    seconds training is stopped, and the newest evaluation counts."""
    with tempfile.TemporaryDirectory() as runs:
        began = time.monotonic()
        command = [sys.executable, "-m", "titan_rl.train", str(task), "--seed", str(seed), "--logging.directory", runs]
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
        try:
            run.wait(longest)
        except subprocess.TimeoutExpired:
            run.send_signal(signal.SIGINT)
            run.wait()
        seconds = time.monotonic() - began
        lines = [json.loads(line) for file in Path(runs).glob("*/metrics.jsonl") for line in file.open()]
        rewards = [line["evaluation/reward"] for line in lines if "evaluation/reward" in line] or [0.0]
        found = [finding for run in Path(runs).iterdir() for finding in findings(read_run(run))]
        return rewards[0], rewards[-1], seconds, [f"{each.title}. {each.do}" for each in found if each.do]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=("frozen", "dev"), default="frozen")
    parser.add_argument("--only", nargs="+", help="names of tasks; default: all of the set")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--longest", type=float, default=300.0, help="seconds of a run")
    options = parser.parse_args()
    known: dict[str, Any] = json.loads((TASKS / options.set / "tasks.json").read_text())
    rows, figures = [], {}
    for file, about in known.items():
        name = Path(file).stem
        if options.only and name not in options.only:
            continue
        runs = [train(TASKS / options.set / file, seed, options.longest) for seed in options.seeds]
        for seed, (_, reached, _, said) in zip(options.seeds, runs, strict=True):
            print(f"  {name} seed {seed}: {reached:.3f}", *said, sep="\n    ", flush=True)
        before, after, seconds = (statistics.median(run[place] for run in runs) for place in range(3))
        figures[f"reached_{name}"] = round(after / about["reachable"], 3)
        rows.append([f"{name} ({about['kind']})", before, after, figures[f"reached_{name}"], seconds])
        print(*rows[-1], flush=True)
    learned = sum(share >= ENOUGH for share in figures.values())
    figures["first_try_learned_share"] = round(learned / len(figures), 3)
    header = ["task", "reward before", "after", "÷ reachable", "seconds"]
    print_report(f"{learned} of {len(rows)} learned, seeds {options.seeds}", header, rows, figures)


if __name__ == "__main__":
    main()
