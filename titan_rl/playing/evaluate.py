"""usage: {prog} POLICY [POLICY ...] [--task TASK | --recipe NAME] [--samples N] [--temperature T] [--prompts N]

Play a task's held-out prompts and compare policies: exact match and reward of greedy decoding, mean reward and pass@k
of sampling, each with its 95 % interval, and what differs from the first policy.

POLICY is a run (its newest checkpoint), one of its checkpoints, or a Hugging Face directory. Task, renderer, prompts
and sampling are those of the recipe, else of the first run, else the defaults. Every rollout is a line of
results.jsonl.

- Weights are played through a router and generators of their own, as a run's evaluation is: with the config of that run
  the greedy scores are its own. A request's seed is that of a run with this seed, prompt and sample.
- A rollout that user code failed is neither right nor wrong: it is counted, and left out of all scores.
- pass@k is unbiased (arXiv 2107.03374). A share of prompts has Wilson's interval, which holds near 0 and 1 and for few
  prompts. Everything else is a mean over prompts, with a percentile bootstrap that draws whole prompts, because the
  samples of a prompt depend on each other. It says how the number would vary with other prompts of the same kind.
- Two policies are compared on the prompts that both have: what is hard about a prompt drops out of the difference.

exit codes: 0 evaluated; 1 failed; 2 wrong task, policy or settings
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, TextIO

import numpy as np
from rich.console import Console
from rich.table import Table

from titan_rl.errors import ConfigError, TaskError
from titan_rl.metrics.rollout_record import RolloutRecord, to_line
from titan_rl.one_line import counted
from titan_rl.overrides import Command, Verb
from titan_rl.playing.policies import first_run, number_of, read_task, run_until_signal, weights_player
from titan_rl.run.checks import check_environment
from titan_rl.run.players import Player
from titan_rl.supervision.run_end import Options
from titan_rl.types import Purpose

RESULTS = "results.jsonl"
SAMPLES = 4
"""Sampled rollouts of each prompt."""
AT_ONCE = 1024
"""Rollouts that are played at a time: enough to fill the engines."""
WIDEST = 400
"""Columns of the table at most, whatever the terminal has: a row that is folded cannot be read."""
_Z = 1.959963984540054  # of the normal distribution, two-sided
RESAMPLES = 10_000
"""Of the bootstrap: its own error in a bound is then about a fiftieth of the interval."""
INTERVAL = "95 % interval"

Values = dict[int, float]
"""By prompt."""


class Estimate(NamedTuple):
    value: float
    low: float
    high: float


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Chance that one of k samples passes, without bias, where `passed` of `samples` did.

    1 - C(n - c, k) / C(n, k): the share of all subsets of k samples that hold one that passed. Chen et al. 2021 (arXiv
    2107.03374), equation 1. `k`: 1 .. samples.
    """
    if not (0 <= passed <= samples and 1 <= k <= samples):
        raise ValueError(f"pass@{k} of {passed} in {samples}")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def share(passed: int, of: int) -> Estimate:
    """A pass rate with Wilson's score interval (E. B. Wilson 1927)."""
    rate = passed / of
    middle = (rate + _Z**2 / (2 * of)) / (1 + _Z**2 / of)
    half = _Z / (1 + _Z**2 / of) * math.sqrt(rate * (1 - rate) / of + _Z**2 / (4 * of**2))
    low = 0.0 if passed == 0 else middle - half  # exact there, which rounding is not
    return Estimate(rate, low, 1.0 if passed == of else middle + half)


def mean(values: Sequence[float]) -> Estimate:
    """The mean over prompts, with a percentile bootstrap over them."""
    numbers = np.asarray(values, dtype=np.float64)
    draw, count = np.random.default_rng(0), len(numbers)
    means = [numbers[draw.integers(count, size=count)].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [0.025, 0.975])
    return Estimate(float(numbers.mean()), float(low), float(high))


def difference(first: Values, second: Values) -> Estimate | None:
    """How much more the second policy has than the first, on the prompts of both; None: there are none."""
    both = sorted(first.keys() & second.keys())
    return mean([second[prompt] - first[prompt] for prompt in both]) if both else None


@dataclass(slots=True)
class Scores:
    name: str
    greedy: dict[int, RolloutRecord] = field(default_factory=dict)
    """By prompt; only those that were graded."""
    sampled: dict[int, list[RolloutRecord]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    """Of those that failed."""

    def add(self, rollout: RolloutRecord, *, greedy: bool) -> None:
        if rollout.error:
            self.errors.append(rollout.error)
        elif greedy:
            self.greedy[rollout.group] = rollout
        else:
            self.sampled.setdefault(rollout.group, []).append(rollout)

    def measures(self, samples: int) -> dict[str, Values]:
        """Every measure's value by prompt. A prompt has a pass@k where at least k of its rollouts were graded; k is a
        power of two, or `samples`."""
        found = {
            "exact match, greedy": {prompt: rollout.exact_match for prompt, rollout in self.greedy.items()},
            "reward, greedy": {prompt: rollout.reward for prompt, rollout in self.greedy.items()},
            "reward, sampled": {prompt: fmean(each.reward for each in those) for prompt, those in self.sampled.items()},
        }
        for k in sorted({*(1 << power for power in range(samples.bit_length())), samples} - {0}):
            found[f"pass@{k}"] = {
                prompt: pass_at_k(len(rollouts), sum(rollout.exact_match >= 1 for rollout in rollouts), k)
                for prompt, rollouts in self.sampled.items()
                if len(rollouts) >= k
            }
        return {name: values for name, values in found.items() if values}


def estimate(values: Values) -> Estimate:
    """The mean over prompts; of passes and failures with Wilson's interval, else by the bootstrap."""
    numbers = [values[prompt] for prompt in sorted(values)]
    return share(int(sum(numbers)), len(numbers)) if {*numbers} <= {0.0, 1.0} else mean(numbers)


async def play(player: Player, scores: Scores, *, samples: int, temperature: float, results: TextIO) -> None:
    """Play all held-out prompts, greedily and `samples` times. Every rollout is a line of `results`, as a run records
    it, with policy and temperature. Raises TaskError: there are no prompts, or no rollout was graded; TitanError: a
    policy could not answer."""
    if not player.info.held_out:
        raise TaskError(f"the environment {player.config.environment.name} gave no held-out prompts to evaluate on")
    free = asyncio.Semaphore(AT_ONCE)

    async def one(prompt: int, samples: int, temperature: float) -> None:
        async with free:
            rollouts = await player.play(prompt, Purpose.EVALUATE, samples=samples, temperature=temperature)
        for rollout in rollouts:
            scores.add(rollout, greedy=temperature == 0)
            results.write(to_line(rollout, policy=scores.name, temperature=temperature).decode())

    try:
        async with asyncio.TaskGroup() as tasks:
            for prompt in range(player.info.held_out):
                tasks.create_task(one(prompt, 1, 0.0))
                if samples:
                    tasks.create_task(one(prompt, samples, temperature))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    if not (scores.greedy or scores.sampled):
        raise TaskError(f"all {len(scores.errors)} rollouts failed; the first: {scores.errors[0]}")


def table(all_scores: Sequence[Scores], samples: int) -> Table:
    """A row for every measure and policy; what differs from the first policy on the prompts of both."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    several = len(all_scores) > 1
    columns = ["", *(["policy"] if several else []), "", INTERVAL, *(["difference", INTERVAL] if several else [])]
    for number, column in enumerate(columns):
        shown.add_column(column, justify="left" if number < 1 + several else "right", overflow="fold")
    measured = [scores.measures(samples) for scores in all_scores]
    for name in dict.fromkeys(name for each in measured for name in each):
        for number, (scores, measures) in enumerate(zip(all_scores, measured, strict=True)):
            if name not in measures:
                continue
            found = estimate(measures[name])
            row = [name if number == 0 else "", *([scores.name] if several else [])]
            row += [f"{found.value:.3f}", f"{found.low:.3f} – {found.high:.3f}"]
            if number and (more := difference(measured[0].get(name, {}), measures[name])) is not None:
                row += [f"{more.value:+.3f}", f"{more.low:+.3f} – {more.high:+.3f}"]
            shown.add_row(*row)
    return shown


def names_of(policies: Sequence[str]) -> list[str]:
    """What tables call them: the ends of their paths, as long as those differ."""
    short = [Path(policy).expanduser().absolute().name for policy in policies]
    return short if len({*short}) == len(short) else list(policies)


def _act(command: Command, prog: str) -> int:
    policies = command.words
    if not policies:
        raise ConfigError("say what to evaluate: runs, checkpoints, or Hugging Face directories")
    if twice := {policy for policy in policies if policies.count(policy) > 1}:
        raise ConfigError(f"{', '.join(sorted(twice))} twice")
    remedy = "name the task: --task file.py:Class or a bundled one, or --recipe NAME"
    config = read_task(command, first_run(policies), remedy=remedy)
    samples = number_of(command, "--samples", SAMPLES, least=0)
    temperature = config.rollout.sampling.temperature
    check_environment(config)
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    print_line = partial(console.print, style="dim")

    async def work(directory: Path, options: Options) -> tuple[int, str]:
        all_scores = [Scores(name) for name in names_of(policies)]
        with open(directory / RESULTS, "w", encoding="utf-8", buffering=1) as results:
            for policy, scores in zip(policies, all_scores, strict=True):
                async with weights_player(command, config, policy, options) as player:
                    prompts = counted(player.info.held_out, "held-out prompt")
                    print_line(f"{scores.name}: {prompts}, greedy and {samples} times sampled")
                    await play(player, scores, samples=samples, temperature=temperature, results=results)
        console.print(f"\n{config.environment.name}, sampled {samples} times at temperature {temperature:g}\n")
        Console(highlight=False, width=WIDEST).print(table(all_scores, samples))
        for scores in all_scores:
            if errors := scores.errors:
                failed = counted(len(errors), "failed rollout")
                console.print(f"{scores.name}: {failed} not counted; the first: {errors[0]}")
        console.print()
        return 0, f"is done; every rollout is in {directory / RESULTS}"

    return run_until_signal("eval", config, work, print_line)


VERB = Verb(
    act=_act,
    about=__doc__,
    options={
        "--task TASK": ("environment.name", "file.py:Class, pkg.mod:Class or a bundled task, as --environment.name"),
        "--samples N": f"sampled rollouts of each prompt ({SAMPLES}); 0: greedy only",
        "--temperature T": (
            "rollout.sampling.temperature",
            "of sampling, as --rollout.sampling.temperature; greedy ones are always played",
        ),
        "--prompts N": ("evaluation.prompts", "held-out prompts, as --evaluation.prompts"),
        "--recipe NAME": "play with the task and settings of a recipe",
        "--config FILE.toml": "settings; relative file names in it start at its directory",
    },
    takes_words=True,
)
