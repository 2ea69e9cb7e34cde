"""Our run beside what a user would pick instead on a laptop: TRL's `GRPOTrainer` with transformers' `generate`.

    python scripts/bench/trl.py [--rounds 3] [--recipe copy4_async] [--environment DIR] [--only train|tokens]

TRL is installed with pinned versions into an environment of its own, which has torch, transformers and all else as
`scripts/requirements.lock` and `requirements-all.lock` say. The two programs take turns. Ratios are ours ÷ TRL's of the
same round, medians over the rounds.

Both start from the same weights (a tiny policy of the round's seed) and train on the same prompts in the same order,
with the same rewards, batch, optimizer, learning rates, clipping, entropy bonus and number of steps. Both evaluate
greedily on the same held-out prompts before training and after the same steps, and end with the weights on disk.

TRL gets what is best for it: one batch per step for the samples and for the gradient, float32, no gradient
checkpointing, no logs, no checkpoints. It runs with one thread and with one per core, and each figure is that of the
better run. What differs: its samples are others, it evaluates between two steps where our runs may do so beside them,
and it writes neither checkpoints nor a report.

Figures of each run, measured from outside by what it has written: `step`, the median seconds between two of the later
optimizer steps; `first_step` and `learned`, seconds from the launch until the first optimizer step and until a held-out
exact match of 0.95 are done; `wall`; `cpu`, user and system seconds of all its processes; `memory`, the most that they
take together, in GB (PSS).

`tokens`: tokens per second of 64 requests with prompts of 16 tokens, through router and engine loop ÷ `generate` in
TRL's setting, for the recipe's tiny policy (64 tokens each), one of 3M (64) and one of 100M parameters (16). Each side
as it is fastest: one generator or one per core, one thread or one per core.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PARTS = Path(__file__).resolve().parent / "parts"
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from environment import ALL_LOCK, LOCK, uv_settings  # noqa: E402
from parts.policies import POLICY_100M  # noqa: E402
from parts.table import print_report, print_table  # noqa: E402
from parts.watched import LATER, WatchedRun, watch  # noqa: E402

from titan_rl.config import RunConfig  # noqa: E402
from titan_rl.config_registry import load_recipe  # noqa: E402
from titan_rl.directories import check_replaceable  # noqa: E402
from titan_rl.environments.copy import Copy  # noqa: E402
from titan_rl.errors import ConfigError  # noqa: E402
from titan_rl.policy.config import TinyPolicyConfig  # noqa: E402

TRL = ("trl==1.16.0", "accelerate==1.15.0")
"""All else that TRL takes is in the locks."""
QUICKSTART = re.findall(r"--recipe (\w+)", (ROOT / "scripts" / "quickstart.sh").read_text())[-1]
CORES = len(os.sched_getaffinity(0))
TARGET = 0.95
FIGURES = ("step", "first_step", "learned", "wall", "cpu", "memory")
REQUESTS = 64


def make_environment(directory: Path) -> Path:
    """The Python of an environment with TRL; made unless `directory` has it already."""
    python, stamp = directory / "bin" / "python", directory / "trl.stamp"
    wanted = "\n".join((*TRL, sys.version, LOCK.read_text(), ALL_LOCK.read_text()))
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    if not stamp.is_file():  # `uv venv --clear` deletes all that is in it
        try:
            check_replaceable(directory)
        except ConfigError as error:
            sys.exit(f"--environment: {error}")
    config = subprocess.run([sys.executable, "-m", "pip", "config", "list"], text=True, capture_output=True, check=True)
    sources, variables = uv_settings(config.stdout)
    environment = {"UV_SYSTEM_CERTS": "true", **variables, **os.environ}

    def uv(*arguments: str) -> bool:
        return subprocess.run([sys.executable, "-m", "uv", *arguments], env=environment).returncode == 0

    def install(*arguments: str) -> bool:
        return uv("pip", "install", "--quiet", "--python", str(python), *sources, "--compile-bytecode", *arguments)

    made = uv("venv", "--quiet", "--clear", "--python", sys.executable, str(directory))
    if made:
        stamp.touch()
    torch = ("--no-deps", f"torch=={version('torch')}")
    if not (
        made
        and (install(*torch) or install("--torch-backend", "cpu", *torch))
        and install("--no-build", "--constraints", str(LOCK), "--constraints", str(ALL_LOCK), *TRL)
    ):
        sys.exit(f"no environment with {' '.join(TRL)} could be made in {directory}; the reason stands above")
    stamp.write_text(wanted)
    return python


# --- training --------------------------------------------------------------------------------------------------------


def our_config(recipe: str, *, seed: int, every: int) -> RunConfig:
    config = replace(load_recipe(recipe), seed=seed)
    if config.environment.name != "copy" or config.policy.tiny is None or config.trainer.warmup.steps:
        sys.exit(f"--recipe {recipe}: only recipes of the task copy4 can be compared")
    return replace(config, evaluation=replace(config.evaluation, every=every or config.evaluation.every))


def run_ours(recipe: str, config: RunConfig, directory: Path) -> WatchedRun:
    command = [sys.executable, "-m", "titan_rl.train", "--recipe", recipe, "--seed", str(config.seed)]
    command += ["--evaluation.every", str(config.evaluation.every), "--logging.directory", str(directory)]
    command += ["--evaluation.target-exact-match", "0", "--loop.steps", str(config.loop.steps)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return watch(command, directory, environment, steps=config.loop.steps)


def trl_settings(config: RunConfig) -> dict[str, Any]:
    """Of a `GRPOConfig`: what the recipe says, and what makes TRL fast."""
    optimizer, loss, steps = config.trainer.optimizer, config.trainer.loss.kwargs, config.loop.steps
    settings = {
        "per_device_train_batch_size": config.loop.groups_per_step * config.rollout.samples_per_group,
        "num_generations": config.rollout.samples_per_group,
        "max_completion_length": config.rollout.sampling.max_new_tokens,
        "temperature": config.rollout.sampling.temperature,
        "loss_type": "dapo",  # every token weighs alike, as in ours
        "beta": 0.0,
        "epsilon": loss["clip_low"],
        "epsilon_high": loss["clip_high"],
        "entropy_coef": loss["entropy_bonus"],
        "learning_rate": optimizer.lr,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_epsilon": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_grad_norm,
        "lr_scheduler_type": "constant",
        "max_steps": steps,
        "shuffle_dataset": False,
        "seed": config.seed,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    if optimizer.decay_ratio:
        decay = {"num_decay_steps": round(steps * optimizer.decay_ratio), "min_lr_ratio": optimizer.min_lr_factor}
        settings |= {
            "lr_scheduler_type": "warmup_stable_decay",
            "lr_scheduler_kwargs": decay | {"decay_type": "linear"},
        }
        settings |= {"warmup_steps": optimizer.warmup_steps}
    return settings


def trl_job(config: RunConfig, directory: Path) -> dict[str, Any]:
    from titan_rl.policy.models.tiny import EOS_ID, model_directory, token_names

    assert config.policy.tiny is not None
    ids = {token: index for index, token in enumerate(token_names(config.policy.tiny))}
    task = Copy(**config.environment.kwargs, seed=config.seed)

    def columns(examples: Sequence[Any]) -> dict[str, Any]:
        answers = [[*(ids[symbol] for symbol in example.answer), EOS_ID] for example in examples]
        return {"prompts": [example.prompt[0].content for example in examples], "answers": answers}

    (directory / "trl").mkdir()
    return {
        **columns([task.example(index) for index in range(config.loop.steps * config.loop.groups_per_step)]),
        "held_out": columns(task.held_out(config.evaluation.prompts)),
        "every": config.evaluation.every,
        "model": str(model_directory(config)),
        "metrics": str(directory / "trl" / "metrics.jsonl"),
        "settings": {**trl_settings(config), "output_dir": str(directory / "trl")},
    }


def trl_environment(threads: int) -> dict[str, str]:
    """For programs that run where TRL is: they find nothing of ours."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**kept, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def run_trl(python: Path, config: RunConfig, directory: Path, threads: int) -> WatchedRun:
    job = directory / "job.json"
    job.write_text(json.dumps(trl_job(config, directory)))
    command = [str(python), str(PARTS / "trl_train.py"), str(job)]
    return watch(command, directory, trl_environment(threads), steps=config.loop.steps)


def compare_training(
    python: Path, recipe: str, rounds: int, every: int, directory: Path
) -> tuple[dict[str, Any], list[list[str | float]]]:
    """Figures for the JSON, and rows of the table."""
    places = (Path(tempfile.mkdtemp(dir=directory)) for _ in itertools.count())
    runs: list[tuple[dict[str, float], dict[str, float]]] = []

    def shown(name: str, run: WatchedRun) -> dict[str, float]:
        figures = run.figures(TARGET)
        print(f"{name}: " + ", ".join(f"{figure} {value:.3g}" for figure, value in figures.items()), flush=True)
        return figures

    first = our_config(recipe, seed=0, every=every)
    first = replace(first, loop=replace(first.loop, steps=2 * LATER))
    shown("ours, not counted: its files are read into memory", run_ours(recipe, first, next(places)))
    for number in range(rounds):
        config = our_config(recipe, seed=number, every=every)
        ours = shown(f"round {number}, {recipe}", run_ours(recipe, config, next(places)))
        theirs = [
            shown(f"  TRL, threads: {threads}", run_trl(python, config, next(places), threads))
            for threads in sorted({1, CORES})
        ]
        runs.append((ours, {name: min(run[name] for run in theirs) for name in FIGURES}))
    values = {
        "ours": {name: statistics.median(one[name] for one, _ in runs) for name in FIGURES},
        "trl": {name: statistics.median(other[name] for _, other in runs) for name in FIGURES},
        "ratio_to_trl": {name: statistics.median(one[name] / other[name] for one, other in runs) for name in FIGURES},
    }
    found = {f"{name}_{what}": finite(medians[name]) for what, medians in values.items() for name in FIGURES}
    return {"rounds": rounds, **found}, [[what, *medians.values()] for what, medians in values.items()]


def finite(value: float) -> float | None:
    """None for what a run never reached: JSON has no infinity."""
    return round(value, 4) if value < float("inf") else None


# --- tokens per second -----------------------------------------------------------------------------------------------


class Generate:
    """transformers' `generate` in a process of its own."""

    def __init__(self, python: Path, model: Path, threads: int) -> None:
        command = [str(python), str(PARTS / "trl_generate.py"), str(model)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, env=trl_environment(threads), **pipes)

    async def run(self, load: dict[str, Any]) -> float:
        """Seconds."""

        def ask() -> float:
            self._process.stdin.write(json.dumps(load) + "\n")
            self._process.stdin.flush()
            return float(self._process.stdout.readline())

        return await asyncio.to_thread(ask)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


async def measure_tokens(
    python: Path, config: RunConfig, policy: TinyPolicyConfig, new_tokens: int, rounds: int
) -> dict[str, list[float]]:
    """Tokens per second by contender, one entry per round."""
    from parts.fleet import fleet, make_request, through_the_router

    settings = replace(config.generator, count=CORES, max_model_len=128)
    speeds: dict[str, list[float]] = {}
    async with fleet(settings, replace(policy, max_length=128)) as up:
        counts = sorted({1, CORES})
        routers = {f"ours, generators: {n}": up.router(f"router-of-{n}", config.router, n) for n in counts}
        publication = up.checkpoint.publish()
        for router in routers.values():
            await router.pull_model_state_dict(publication)
        generates = {f"TRL, threads: {n}": Generate(python, up.model_path, n) for n in counts}
        for number in range(rounds + 1):  # the first warms everything up
            for name in (*routers, *generates):
                requests = [
                    make_request(f"{name}-{number}-{each}", new_tokens=new_tokens, seed=(number, each, len(name)))
                    for each in range(REQUESTS)
                ]
                if name in routers:
                    seconds, tokens = await through_the_router(routers[name], requests)
                    if tokens != REQUESTS * new_tokens:
                        raise RuntimeError(f"{name} sampled {tokens} tokens")
                else:
                    prompts = [request.prompt_token_ids.tolist() for request in requests]
                    seconds = await generates[name].run({"prompts": prompts, "new_tokens": new_tokens})
                speed = REQUESTS * new_tokens / seconds
                print(f"{number or 'not counted'}: {name}: {speed:,.0f} tokens/s", flush=True)
                if number:
                    speeds.setdefault(name, []).append(speed)
        for each in generates.values():
            each.close()
    return speeds


def compare_tokens(python: Path, recipe: str, rounds: int) -> tuple[dict[str, Any], list[list[str | float]]]:
    from parts.fleet import POLICY as POLICY_3M

    config = load_recipe(recipe)
    assert config.policy.tiny is not None
    loads = (("64", config.policy.tiny, 64), ("3m", POLICY_3M, 64), ("100m", POLICY_100M, 16))
    found: dict[str, Any] = {}
    rows: list[list[str | float]] = []
    for suffix, policy, new_tokens in loads:
        speeds = asyncio.run(measure_tokens(python, config, policy, new_tokens, rounds))
        medians = {name: statistics.median(values) for name, values in speeds.items()}
        best = {
            side: max((n for n in medians if n.startswith(side)), key=lambda n: medians[n]) for side in ("ours", "TRL")
        }
        pairs = zip(speeds[best["ours"]], speeds[best["TRL"]], strict=True)
        found[f"tokens_ratio_to_trl_{suffix}"] = round(statistics.median(one / other for one, other in pairs), 3)
        found |= {f"tokens_{suffix}_{side.lower()}": round(medians[name]) for side, name in best.items()}
        rows += [[f"{suffix}: {name}", value, value / medians[best["TRL"]]] for name, value in medians.items()]
    return found, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--recipe", default=QUICKSTART, help="of ours; default: the quick start's")
    parser.add_argument("--every", type=int, default=0, help="steps between evaluations; default: as the recipe says")
    parser.add_argument(
        "--environment", type=Path, help="where TRL is, or is to be installed; default: a temporary one"
    )
    parser.add_argument("--only", choices=("train", "tokens"))
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        began = time.monotonic()
        python = make_environment((options.environment or Path(temporary) / "environment").absolute())
        print(f"the environment of TRL is there after {time.monotonic() - began:.0f} s", flush=True)
        if options.only != "tokens":
            found, rows = compare_training(python, options.recipe, options.rounds, options.every, Path(temporary))
            print_table("training: seconds, and GB of memory", ["run", *FIGURES], rows)
            figures |= found
        if options.only != "train":
            found, rows = compare_tokens(python, options.recipe, options.rounds)
            print_report("64 requests", ["contender", "tokens/s", "÷ TRL's best"], rows, figures | found)
        else:
            print(json.dumps(figures))


if __name__ == "__main__":
    main()
