"""usage: {prog} TASK [--minutes N] [--section.key VALUE ...]

Search learning rate, entropy bonus and samples per group for a task of yours. Shows a table and writes the config of
the best. Successive halving: every candidate trains a little, the better half is trained twice as long, until one is
left. Each trial is an ordinary run from the first step on, in processes of its own, so that its learning rate falls as
it would and a trial that fails costs only itself; they stay in DIRECTORY/tune-NAME, for `titan-rl report`.
"""

import math
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from titan_rl.config import RunConfig
from titan_rl.errors import ConfigError
from titan_rl.overrides import EXIT_USAGE, Command, Verb, flat, to_toml, variant
from titan_rl.playing.policies import number_of
from titan_rl.run.run import make_run_directory
from titan_rl.train import for_task, may_start, problems
from titan_rl.view.learning import LR, times
from titan_rl.view.read import read_run

BONUS, SAMPLES = "trainer.loss.kwargs.entropy_bonus", "rollout.samples_per_group"
TRIED = {
    LR: (1, 3, 1 / 3, 1, 1, 1, 1, 1 / 3),
    BONUS: (1, 1, 1, 1 / 3, 1 / 10, 1, 1, 1 / 3),
    SAMPLES: (1, 1, 1, 1, 1, 2, 1 / 2, 1),
}
"""Factors. As many fewer groups make a step as long as before."""
MINUTES = 10
FEWEST_STEPS = 20
SCORE = "evaluation/reward"


@dataclass(slots=True)
class Candidate:
    settings: dict[str, Any]
    scores: list[float] = field(default_factory=list)
    """Mean held-out reward after each of its trials; a trial without one counts as minus infinity."""


def candidates(config: RunConfig) -> list[Candidate]:
    """The config's own settings first."""
    lr, loss = config.trainer.optimizer.lr, config.trainer.loss.kwargs
    samples, groups = config.rollout.samples_per_group, config.loop.groups_per_step
    found: list[Candidate] = []
    for rate, bonus, size in zip(*TRIED.values(), strict=True):
        settings: dict[str, Any] = {LR: times(lr, rate), SAMPLES: max(2, times(samples, size))}
        settings |= {"loop.groups_per_step": max(1, round(groups / size)), "rollout.most_samples": 0}
        settings["trainer.loss.kwargs"] = {
            name: times(float(value), bonus) if name == "entropy_bonus" else value for name, value in loss.items()
        }
        if all(settings != each.settings for each in found):  # a loss may have no entropy bonus
            found.append(Candidate(settings))
    return found


def rounds(count: int, steps: int) -> Iterator[tuple[int, int]]:
    """(candidates, steps of each) of every round."""
    while count > 1:
        yield count, steps
        count, steps = count // 2, 2 * steps


def first_steps(count: int, seconds: float, start: float, step: float) -> int:
    """Steps of a trial of the first round with which all rounds take so many seconds. A trial takes `start` seconds and
    `step` for each of its steps."""
    runs = sum(each for each, _ in rounds(count, 1))
    steps = sum(each * times for each, times in rounds(count, 1))
    return max(FEWEST_STEPS, int((seconds - runs * start) / (steps * step)))


def better_half(entered: Sequence[Candidate]) -> list[Candidate]:
    """Of equal ones those that were named first."""
    return sorted(entered, key=lambda each: -each.scores[-1])[: max(len(entered) // 2, 1)]


def trial(config: RunConfig, candidate: Candidate, steps: int, directory: Path) -> float:
    """Train so many steps; returns the seconds that a step took, all but the first."""
    number = sum(1 for _ in directory.glob("trial-*.toml"))
    changes = {"loop.steps": steps, "evaluation.every": 0, "evaluation.target_exact_match": 0.0}
    logging = {"logging.directory": str(directory), "logging.name": f"trial-{number}", "logging.save_final": False}
    file = directory / f"trial-{number}.toml"
    file.write_text(to_toml(variant(config, candidate.settings | changes | logging)), encoding="utf-8")
    with file.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "titan_rl.train", "--config", file], stdout=log, stderr=log)
        try:
            failed = process.wait() != 0
        except BaseException:  # Ctrl-C, which the run had, too; or SIGTERM
            process.terminate()
            process.wait()
            raise
    run = read_run(next(directory.glob(f"{file.stem}-*"), file), brief=True)
    rewards, seconds = run.values(SCORE), run.values("seconds/step")
    candidate.scores.append(rewards[-1] if rewards and not failed else -math.inf)
    return sum(seconds[1:]) / max(len(seconds) - 1, 1)


def _act(command: Command, prog: str) -> int:
    minutes = number_of(command, "--minutes", MINUTES)
    config = for_task(command.word("task"), command, prog)
    if not may_start(problems(config), prog):
        return EXIT_USAGE
    console = Console(highlight=False)
    name = config.logging.name or Path(config.environment.name).stem
    directory = make_run_directory(replace(config, logging=replace(config.logging, name=f"tune-{name}")))
    entered = tried = candidates(config)
    began = time.monotonic()
    step = trial(config, Candidate(tried[0].settings), FEWEST_STEPS, directory)
    if not step:
        raise ConfigError(f"the first trial failed: {directory / 'trial-0.log'} says why")
    start = max(time.monotonic() - began - step * FEWEST_STEPS, 1.0)
    steps = first_steps(len(tried), 60 * minutes - (time.monotonic() - began), start, step)
    plan = list(rounds(len(tried), min(steps, max(config.loop.steps // 4, FEWEST_STEPS))))
    seconds = sum(count * (start + length * step) for count, length in plan)
    console.print(f"a step takes {step:.2f} s, a start {start:.0f} s: {len(tried)} trials of {plan[0][1]} steps first")
    console.print(f"all of it takes about {seconds / 60:.0f} minutes; trials are in {directory}")
    for _, length in plan:
        for candidate in entered:
            trial(config, candidate, length, directory)
            values = ", ".join(f"{key} {value}" for key, value in _shown(candidate).items())
            console.print(f"  {length} steps  reward {candidate.scores[-1]:.3f}  {values}")
        entered = better_half(entered)
    best = entered[0]
    if best.scores[-1] == -math.inf:
        raise ConfigError(f"all trials failed: {directory} has what they said")
    console.print(result_table(tried, best))
    kept = directory / "best.toml"
    kept.write_text(to_toml(variant(config, best.settings)), encoding="utf-8")
    console.print(f"titan-rl train --config {kept}", soft_wrap=True)
    return 0


def _shown(candidate: Candidate) -> dict[str, Any]:
    settings = dict(flat(candidate.settings))
    return {key.rpartition(".")[2]: settings[key] for key in (LR, BONUS, SAMPLES) if key in settings}


def result_table(tried: Sequence[Candidate], best: Candidate) -> Table:
    table = Table(title="held-out reward, round by round")
    for column in (*_shown(best), "reward"):
        table.add_column(column, justify="right")
    for each in sorted(tried, key=lambda each: (-len(each.scores), -each.scores[-1])):
        scores = " → ".join(f"{score:.3f}" for score in each.scores)
        table.add_row(*map(str, _shown(each).values()), scores, style="bold" if each is best else "")
    return table


VERB = Verb(
    act=_act,
    config=lambda command: RunConfig(),
    about=__doc__,
    options={
        "--minutes N": f"about how long all of it may take ({MINUTES})",
        "--recipe NAME": "is refused: the task decides",
    },
    takes_words=True,
)
