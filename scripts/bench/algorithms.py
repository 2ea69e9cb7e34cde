"""Whether every bundled algorithm learns with the real engine, and what it costs beside GRPO.

    python scripts/bench/algorithms.py [--only NAME …] [--seeds 0] [--steps 60] [--table]

Each copies two digits, of which answers at random get 0.2: the mean reward on held-out prompts before and after, the
first step whose sampled answers got `SAMPLED`, and the seconds of a trainer's call ÷ GRPO's in a run shortly before: of
the fastest tenth, which what else the machine does slows least. Settings are those of the recipe `copy4`, and what an
algorithm cannot do without; the teacher of `distillation` is the first of GRPO's runs. `--table` prints the table of
policy/README.md.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from parts.table import print_report

from titan_rl.policy.algorithms import catalogue, short_names

ENOUGH = 0.3
"""Of the reward: what it rises by if the algorithm learns."""
SAMPLED = 0.4
"""Mean reward of a step's sampled answers, twice what answers at random get."""
LOSS_OF = {"gdpo": "reinforce_pp", "reinforce_pp_baseline": "reinforce_pp"}
"""Where credit alone is no algorithm, what it is for; else GRPO's loss."""
SETTINGS = {
    "distillation": [
        *("--trainer.loss.kwargs.entropy_bonus", "0"),
        *("--trainer.kl.coefficient", "1"),
        *("--trainer.kl.estimator", "k2"),
    ],
    "gdpo": ["--rollout.advantage.kwargs.scores.positions_equal", "1"],
    "pass_at_k": ["--rollout.advantage.kwargs.success", "0.6"],  # two of the three places
    "ppo": ["--trainer.critic.coefficient", "0.5"],
}
BARE_EVERY = 5
"""Algorithms between two runs of GRPO: the machine is not equally fast for half an hour."""


def settings(name: str, teacher: Path) -> list[str]:
    """What a run of this algorithm is started with."""
    options = SETTINGS.get(name, []).copy()
    if name == "distillation":
        options += ["--trainer.kl.teacher", str(*teacher.glob("*/checkpoint"))]
    if name in short_names("advantages"):
        options += ["--rollout.advantage.name", name]
    if name in short_names("loss") or name in LOSS_OF:
        options += ["--trainer.loss.name", LOSS_OF.get(name, name)]
    return options


def run(steps: int, seed: int, runs: Path, *options: str) -> tuple[float, float, float, float]:
    """Held-out reward before and after so many steps, the first step that sampled well, and the seconds of a fast
    trainer's call. Raises RuntimeError where the run fails."""
    command = [sys.executable, "-m", "titan_rl.train", "--recipe", "copy4", "--environment.kwargs.digits", "2"]
    bounds = ["--loop.steps", str(steps), "--evaluation.every", str(steps), "--evaluation.target-exact-match", "0"]
    where = ["--seed", str(seed), "--logging.directory", str(runs)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *bounds, *where, *options], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(options)}: {done.stderr[-2000:]}")
    (file,) = runs.glob("*/metrics.jsonl")
    lines: list[dict[str, Any]] = [json.loads(line) for line in file.open()]
    rewards = [line["evaluation/reward"] for line in lines if "evaluation/reward" in line]
    seconds = [line["seconds/train"] for line in lines if "seconds/train" in line]
    sampled = (line["step"] for line in lines if line.get("rollout/reward_mean", 0) >= SAMPLED)
    return rewards[0], rewards[-1], next(sampled, math.inf), statistics.quantiles(seconds, n=10)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="names of algorithms; default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=60, help="of a run")
    parser.add_argument("--table", action="store_true", help="print the table in Markdown, too")
    options = parser.parse_args()
    names = sorted(options.only or catalogue())
    rows: list[list[Any]] = []
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as kept:
        for number, name in enumerate(names):
            if number % BARE_EVERY == 0:
                bare = run(options.steps, options.seeds[0], Path(kept, str(number)))[-1]
            runs = [
                run(options.steps, seed, Path(kept, f"{name}{seed}"), *settings(name, Path(kept, "0")))
                for seed in options.seeds
            ]
            before, after, sampled, seconds = map(statistics.median, zip(*runs, strict=True))
            rows.append([name, before, after, sampled, seconds / bare])
            figures[f"reached_{name}"], figures[f"cost_{name}"] = round(after, 3), round(seconds / bare, 3)
            print(*rows[-1], flush=True)
    figures["algorithms_learned_share"] = sum(after > before + ENOUGH for _, before, after, *_ in rows) / len(rows)
    if options.table:
        print(
            "\n| algorithm | when | reward before → after | steps | a trainer's call ÷ GRPO's |\n|---|---|---|---|---|"
        )
        for name, before, after, sampled, cost in rows:
            (when,) = re.findall(r"^When +(.+?)\n\w", catalogue()[name], re.MULTILINE | re.DOTALL)
            steps = "–" if math.isinf(sampled) else f"{sampled:.0f}"
            print(f"| `{name}` | {' '.join(when.split())} | {before:.2f} → {after:.2f} | {steps} | {cost:.2f} |")
    header = ["algorithm", "reward before", "after", f"first step at {SAMPLED}", "trainer's call ÷ GRPO's"]
    print_report(f"{len(rows)} algorithms, {options.steps} steps, seeds {options.seeds}", header, rows, figures)


if __name__ == "__main__":
    main()
