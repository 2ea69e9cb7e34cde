"""Whether every bundled algorithm learns with the real engine, and what it costs beside GRPO.

    python scripts/bench/algorithms.py [--only NAME …] [--seeds 0] [--steps 60] [--table]
    python scripts/bench/algorithms.py --slower [--only TASK …] [--seeds 0 1 2]

Each copies two digits, of which answers at random get 0.2: the mean reward on held-out prompts before and after, and
the first step whose sampled answers got `SAMPLED`. Settings are those of the recipe `copy4`, and what an algorithm
cannot do without; the teacher of `distillation` is a run of GRPO. The cost is the CPU time of a trainer's step ÷ GRPO's
on the same batches, one after the other in this process, so that it hardly matters what else the machine does.
`--table` prints the table of policy/README.md. The last line is one JSON object.

`--slower` trains what GRPO learns slower than an algorithm that is made for it, with both, and prints that table:
held-out score after the last step, and the first step whose sampled answers got `LEVEL`, of each seed. The last line
has the share of those algorithms whose mean score is better than GRPO's.
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
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parts.table import print_report

from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.policy.algorithms import catalogue, short_names
from titan_rl.policy.models.architecture import read_shape
from titan_rl.policy.models.tiny import model_directory
from titan_rl.policy.updater import PolicyUpdater
from titan_rl.train import VERB, resolve
from titan_rl.types import NO_VERSION, TrainingSample

TASKS = Path(__file__).with_name("parts") / "credit_tasks.py"
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
RECIPE = ["--recipe", "copy4", "--environment.kwargs.digits", "2"]
LEVEL = 0.2
"""Of the score of a step's sampled answers."""
NOW = "--rollout.advantage.kwargs.gamma 0"  # a turn earns its own reward alone
BOTH = "--rollout.advantage.kwargs.scores.first 1 --rollout.advantage.kwargs.scores.rest 1"
SLOWER = {
    "Questions": (
        "eight questions, each answer has a reward of its own",
        "reward",
        60,
        "--environment.kwargs.digits 8 --rollout.sampling.max-new-tokens 2 --loop.groups-per-step 8",
        {"discounted": NOW, "gigpo": NOW},
    ),
    "TwoScales": (
        "two digits, the first earns twenty times the second",
        "exact_match",
        80,
        "",
        {"gdpo": f"{BOTH} --trainer.loss.name reinforce_pp"},
    ),
}
"""What GRPO learns slower than an algorithm: what it is, the score, steps, options, and such algorithms with theirs."""
GROUPS, MEMBERS = 32, 8
TURNS, FIRST = 40, 4
"""Steps of each that are compared, and those before that are not."""
ALONE = ["--trainer.logprob-alarm.mean", "0", "--trainer.logprob-alarm.outside-share", "0"]
"""No engine has sampled what the cost is measured on."""


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


def run(
    steps: int, seed: int, runs: Path, *options: str, score: str = "reward", level: float = SAMPLED
) -> tuple[float, float, float]:
    """Held-out score before and after so many steps, and the first step that sampled well. Raises RuntimeError where
    the run fails."""
    bounds = ["--loop.steps", str(steps), "--evaluation.every", str(steps), "--evaluation.target-exact-match", "0"]
    where = ["--seed", str(seed), "--logging.directory", str(runs)]
    command = [sys.executable, "-m", "titan_rl.train", *RECIPE, *bounds, *where, *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(options)}: {done.stderr[-2000:]}")
    (file,) = runs.glob("*/metrics.jsonl")
    lines: list[dict[str, Any]] = [json.loads(line) for line in file.open()]
    held_out = [line[f"evaluation/{score}"] for line in lines if f"evaluation/{score}" in line]
    mean = "rollout/reward_mean" if score == "reward" else f"reward/{score}"
    sampled = (line["step"] for line in lines if line.get(mean, 0) >= level)
    return held_out[0], held_out[-1], next(sampled, math.inf)


def slower(names: Sequence[str], seeds: Sequence[int]) -> None:
    """Prints a row for every algorithm on the tasks of these names, GRPO's first; and the share that beat it."""
    beaten = []
    print("| task | algorithm | held-out score, by seed | first step, by seed |\n|---|---|---|---|", flush=True)
    for name in names:
        what, score, steps, options, others = SLOWER[name]
        means = []
        for algorithm, own in {"grpo": "", **others}.items():
            named = f"--environment.name {TASKS}:{name} {options} --rollout.advantage.name {algorithm} {own}".split()
            with tempfile.TemporaryDirectory() as kept:
                ends = [run(steps, seed, Path(kept, f"{seed}"), *named, score=score, level=LEVEL) for seed in seeds]
            firsts = ("–" if math.isinf(first) else f"{first:.0f}" for *_, first in ends)
            after = ", ".join(f"{held_out:.2f}" for _, held_out, _ in ends)
            print(f"| {what} | `{algorithm}` | {after} | {', '.join(firsts)} |", flush=True)
            means.append(statistics.mean(held_out for _, held_out, _ in ends))
        beaten += [each > means[0] for each in means[1:]]
    print(json.dumps({"beat_grpo_share": statistics.mean(beaten)}))


def trainer(*options: str) -> tuple[PolicyUpdater, int]:
    """The only rank of such a run's trainer, and its vocabulary."""
    config = resolve(VERB.read([*RECIPE, *ALONE, *options]))
    updater = PolicyUpdater(
        config.trainer_settings(),
        model_path=model_directory(config),
        temperature=1.0,
        total_steps=FIRST + TURNS,
        device="cpu",
        seed=0,
    )
    if config.trainer.kl.coefficient:
        updater.freeze_reference()
    return updater, read_shape(model_directory(config)).vocab


def batch(step: int, vocab: int) -> SampleBatch:
    """Groups as a run of so short answers has them, by a policy that knows nothing yet."""
    draw = np.random.default_rng(step)

    def sample(group: int, member: int, prompt: np.ndarray) -> TrainingSample:
        ids = np.concatenate([prompt, draw.integers(2, vocab, draw.integers(2, 7))]).astype(np.int32)
        mask = np.arange(len(ids)) >= len(prompt)
        logprobs = np.where(mask, draw.normal(-math.log(vocab), 0.05, len(ids)), 0).astype(np.float32)
        return TrainingSample(
            group_id=group,
            sample=member,
            token_ids=ids,
            loss_mask=mask,
            logprobs=logprobs,
            versions=np.where(mask, step, NO_VERSION),
            advantages=np.where(mask, draw.normal(), 0).astype(np.float32),
            reward=0.0,
        )

    prompts = [draw.integers(2, vocab, 3) for _ in range(GROUPS)]
    return SampleBatch.of(sample(group, member, prompts[group]) for group in range(GROUPS) for member in range(MEMBERS))


def cost(options: Sequence[str]) -> float:
    """Of a step with these options ÷ without."""
    (bare, vocab), (own, _) = trainer(), trainer(*options)
    seconds: dict[PolicyUpdater, list[float]] = {bare: [], own: []}
    for step in range(FIRST + TURNS):
        samples = batch(step, vocab)
        for each in (bare, own) if step % 2 else (own, bare):
            plan, began = each.plan(samples), time.process_time()
            each.train_step(samples, plan)
            seconds[each].append(time.process_time() - began)
    return statistics.median(seconds[own][FIRST:]) / statistics.median(seconds[bare][FIRST:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="names of algorithms; default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=60, help="of a run")
    parser.add_argument("--table", action="store_true", help="print the table in Markdown, too")
    parser.add_argument("--slower", action="store_true", help=f"train {', '.join(SLOWER)}, which GRPO learns slower")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": "1"}
    if options.slower:
        return slower(options.only or list(SLOWER), options.seeds)
    torch.set_num_threads(1)
    names = sorted(options.only or catalogue())
    rows: list[list[Any]] = []
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as kept:
        teacher = Path(kept, "teacher")
        if "distillation" in names:
            run(options.steps, options.seeds[0], teacher)
        for name in names:
            own = settings(name, teacher)
            runs = [run(options.steps, seed, Path(kept, f"{name}{seed}"), *own) for seed in options.seeds]
            rows.append([name, *map(statistics.median, zip(*runs, strict=True)), cost(own)])
            figures[f"reached_{name}"], figures[f"cost_{name}"] = round(rows[-1][2], 3), round(rows[-1][4], 3)
            print(*rows[-1], flush=True)
    figures["algorithms_learned_share"] = sum(after > before + ENOUGH for _, before, after, *_ in rows) / len(rows)
    if options.table:
        print("\n| algorithm | when | reward before → after | steps | a step ÷ GRPO's |\n|---|---|---|---|---|")
        for name, before, after, sampled, spent in rows:
            (when,) = re.findall(r"^When +(.+?)\n\w", catalogue()[name], re.MULTILINE | re.DOTALL)
            steps = "–" if math.isinf(sampled) else f"{sampled:.0f}"
            print(f"| `{name}` | {' '.join(when.split())} | {before:.2f} → {after:.2f} | {steps} | {spent:.2f} |")
    header = ["algorithm", "reward before", "after", f"first step at {SAMPLED}", "step ÷ GRPO's"]
    print_report(f"{len(rows)} algorithms, {options.steps} steps, seeds {options.seeds}", header, rows, figures)


if __name__ == "__main__":
    main()
