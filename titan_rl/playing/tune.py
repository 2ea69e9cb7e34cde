"""usage: {prog} TASK [--minutes N] [--section.key VALUE ...]

Search learning rate, entropy bonus and samples per group for a task of yours. Shows a table and writes the config of
the best. Successive halving: every candidate trains a little, the better half is trained twice as long, until one is
left. Each trial trains from the first step on, so that its learning rate falls as it would, and one that fails costs
only itself. All use one fleet, of which the trainer alone is made anew. They stay in DIRECTORY, for `titan-rl report`,
and so does the best config after each round: Ctrl-C costs the round that it ends.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from titan_rl.config import RunConfig
from titan_rl.errors import RollbackNeeded, TaskError
from titan_rl.overrides import EXIT_FAILED, EXIT_OK, EXIT_USAGE, Command, Verb, flat, to_toml, variant
from titan_rl.playing.policies import number_of, run_until_signal
from titan_rl.policy.config import PolicyConfig
from titan_rl.run.start import bring_up
from titan_rl.supervision.run_end import Options
from titan_rl.train import for_task, may_start, problems
from titan_rl.view.learning import LR, times
from titan_rl.view.read import read_run

if TYPE_CHECKING:
    from titan_rl.supervision.supervisor import Supervisor

BONUS, SAMPLES = "trainer.loss.kwargs.entropy_bonus", "rollout.samples_per_group"
TRIED = {
    LR: (1, 3, 1 / 3, 1, 1, 1, 1, 1 / 3),
    BONUS: (1, 1, 1, 1 / 3, 1 / 10, 1, 1, 1 / 3),
    SAMPLES: (1, 1, 1, 1, 1, 2, 1 / 2, 1),
}
"""Factors. As many fewer groups make a step as long as before."""
MINUTES = 10
FEWEST_STEPS = 20
TRIES = 3
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


def plan_of(count: int, seconds: float, start: float, step: float, most: int) -> list[tuple[int, int]]:
    """Rounds of at most so many candidates, two at least, that take about so many seconds: of fewer candidates where
    the first round would have less than `FEWEST_STEPS`, and of at most `most` then. A trial takes `start` seconds and
    `step` for each of its steps."""
    trials = sum(each for each, _ in rounds(count, 1))
    steps = int((seconds - trials * start) / (step * sum(each * times for each, times in rounds(count, 1))))
    if steps < FEWEST_STEPS and count > 2:
        return plan_of(max(count // 2, 2), seconds, start, step, most)
    return list(rounds(count, max(FEWEST_STEPS, min(steps, most))))


def better_half(entered: Sequence[Candidate]) -> list[Candidate]:
    """Of equal ones those that were named first."""
    return sorted(entered, key=lambda each: -each.scores[-1])[: max(len(entered) // 2, 1)]


class Search:
    """Trials, one after the other on one fleet, of which each has a directory of its own as a run has."""

    def __init__(self, config: RunConfig, meshes: Supervisor, directory: Path, console: Console) -> None:
        self._config, self._meshes, self._directory, self._console = config, meshes, directory, console
        self._untaught = config
        self._trials = 0

    async def trial(self, candidate: Candidate, steps: int) -> float:
        """Train so many steps; returns the seconds that a step took, all but the first. Made again where a part of the
        fleet was lost with what the trial had."""
        from titan_rl.run.training import Training

        config, failed = trial_config(self._config, candidate, steps), ""
        for _ in range(TRIES):
            directory = self._directory / f"trial-{self._trials}"
            directory.mkdir()
            self._trials += 1
            training = Training(config, directory, None, Console(quiet=True), incarnation=self._trials)
            try:
                with self._console.status(f"{directory.name}: {steps} steps"):
                    failed = await training.trial(self._meshes)
                break
            except RollbackNeeded as error:
                failed = str(error)
        run = read_run(directory, brief=True)
        rewards, seconds = run.values(SCORE), run.values("seconds/step")
        failed = failed or ("" if rewards else "its numbers were not written")
        candidate.scores.append(-math.inf if failed else rewards[-1])
        if failed:
            self._console.print(f"  {directory.name} failed: {failed}")
        return sum(seconds[1:]) / max(len(seconds) - 1, 1)

    async def teach(self) -> None:
        """Do the warm-up, with which every trial would begin, once for all of them. Raises TaskError."""
        await self.trial(first := Candidate({}), 0)
        if first.scores == [-math.inf]:
            raise TaskError("nothing is tried: the warm-up failed")
        taught = self._directory / "taught"
        await self._meshes.system().trainer.save(taught)
        policy = PolicyConfig(path=str(taught), architecture=self._config.policy.family)
        self._config = replace(variant(self._config, {"trainer.warmup.steps": 0}), policy=policy)

    async def run(self, seconds: float) -> Candidate | None:
        """The best candidate, found within about so many seconds; None: the first trial failed, or all."""
        print_line, asked = self._console.print, time.monotonic()
        best, kept = None, self._directory / "best.toml"
        tried = candidates(self._config)
        trainer = self._config.trainer
        if trainer.warmup.steps and not trainer.lora.r and trainer.dtype == "float32":  # else what is saved is rounded
            await self.teach()
        began = time.monotonic()
        step = await self.trial(Candidate(tried[0].settings), FEWEST_STEPS)
        if not step:
            return None
        start = max(time.monotonic() - began - step * FEWEST_STEPS, 1.0)
        left = seconds - (time.monotonic() - asked)
        plan = plan_of(len(tried), left, start, step, self._config.loop.steps // 4)
        entered = tried = tried[: plan[0][0]]
        planned = sum(count * (start + length * step) for count, length in plan)
        print_line(f"a step takes {step:.2f} s: {len(tried)} trials of {plan[0][1]} steps first")
        print_line(f"all of it takes about {planned / 60:.0f} minutes; trials are in {self._directory}")
        for _, length in plan:
            for candidate in entered:
                await self.trial(candidate, length)
                values = ", ".join(f"{key} {value}" for key, value in _shown(candidate).items())
                print_line(f"  {length} steps  reward {candidate.scores[-1]:.3f}  {values}")
            entered = better_half(entered)
            if entered[0].scores[-1] > -math.inf:
                best = entered[0]  # so far, where the search is stopped
                kept.write_text(to_toml(variant(self._untaught, best.settings)), encoding="utf-8")
        if best is not None:
            print_line(result_table(tried, best))
            print_line(f"titan-rl train --config {kept}")
        return best


def trial_config(config: RunConfig, candidate: Candidate, steps: int) -> RunConfig:
    nothing_kept = {"evaluation.every": 0, "evaluation.target_exact_match": 0.0, "checkpoint.keep": 0}
    return variant(config, candidate.settings | nothing_kept | {"loop.steps": steps})


def _act(command: Command, prog: str) -> int:
    minutes = number_of(command, "--minutes", MINUTES)
    config = for_task(command.word("task"), command, prog)
    if not may_start(problems(config), prog):
        return EXIT_USAGE
    console = Console(highlight=False, soft_wrap=True)

    async def work(directory: Path, options: Options) -> tuple[int, str]:
        began = time.monotonic()
        first = trial_config(config, candidates(config)[0], FEWEST_STEPS)
        options = {**options, "on_mesh": lambda mesh, doing: None, "say": logging.getLogger(__name__).info}
        async with bring_up(first, **options) as meshes:
            search = Search(config, meshes, directory, console)
            best = await search.run(60 * minutes - (time.monotonic() - began))
        return (EXIT_OK, "is done") if best else (EXIT_FAILED, "found nothing: the first trial failed, or all")

    return run_until_signal("tune", config, work, console.print)


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
