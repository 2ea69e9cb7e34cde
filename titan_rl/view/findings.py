"""What the numbers of a run say in plain words, and what to do about it.

- A metric with a limit makes a finding by itself; limit and advice are in `metric_table`. The rules here are for what
  one number does not say: trends, several numbers together, rollouts.
- Every finding is a pure function of the numbers; nothing is said of fewer than `FEWEST_STEPS` steps. A finding that is
  not sure enough to act on is not made.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import correlation, fmean, stdev

from titan_rl.metrics.metric_table import metric_of
from titan_rl.types import Purpose
from titan_rl.view.read import ListedRollout, Run
from titan_rl.view.timelines import COMPUTE, HINTS, MEANINGS, Account

FEWEST_STEPS = 9
"""Below, the thirds of a run that are compared hold fewer than three steps each."""
SURE = 2.0
"""Standard errors; a smaller change of a mean counts as none."""
TOP_SHARE = 0.98
"""Of the largest reward seen; a mean above it has nothing left to gain."""
MOST_CLIPPED_STEPS = 0.5
MISMATCH_GROWTH = 3.0
LEAST_MISMATCH = 1e-5
"""Nats. Rounding of float32 alone makes less."""
COLLAPSED_ENTROPY = 0.1
"""Of the entropy that the run began with."""
MOST_SYMBOLS = 100
"""Characters in the wanted answers; a task with more has no alphabet to speak of."""
LEAST_GAIN = 0.02
"""Of held-out exact match; a smaller change counts as none."""
APART = 0.15
"""Of a reward; a smaller difference of training and evaluation counts as none."""
FEWEST_CORRELATED, CORRELATED = 30, 0.8
"""Recorded rollouts, and their correlation of reward and length from which the length is what pays."""
MOST_CLIPPED, MOST_KL = 0.2, 0.05
"""Clipped share and nats in a step between two versions; beyond them a step goes further than its samples carry."""
NO_KL = 1e-6
LITTLE = 0.1
"""Of the largest reward: a mean below it is no signal to speak of."""
FEW_SAMPLES = 4
FEWEST_WANTED = 5
"""Rollouts that want a symbol before it is called dead."""


SCORES = ("evaluation/exact_match", "evaluation/reward", "rollout/reward_mean")
"""By which runs are compared: the first that all of them have."""
MOST_NAMED = 5
"""Settings that a comparison names; the page lists all."""


class Kind(StrEnum):
    PROBLEM = "problem"  # the run does not do what it is for, or will not for long
    WARNING = "warning"  # something is lost: speed, samples, trust in the numbers
    NOTE = "note"  # good to know
    GOOD = "good"


@dataclass(frozen=True, slots=True)
class Finding:
    kind: Kind
    title: str
    text: str
    do: str = ""
    see: str = ""
    """A metric, or "timeline" or "rollouts": where the page shows it."""
    counts: tuple[tuple[int, str], ...] = ()
    """How often what was seen, the most frequent first."""

    def __str__(self) -> str:
        seen = "; ".join(f"{count} × {what}" for count, what in self.counts)
        return " ".join(filter(None, (f"{self.title}.", self.text, f"{seen}." * bool(seen), self.do)))


def findings(run: Run) -> list[Finding]:
    """Of one run, the gravest first."""
    order = list(Kind)
    return sorted((each for rule in RULES for each in rule(run)), key=lambda each: order.index(each.kind))


def compare(runs: Sequence[Run]) -> list[Finding]:
    """Of several runs, which of them did best, and by which settings it differs from the others."""
    metric = next((name for name in SCORES if all(run.values(name) for run in runs)), None)
    if len(runs) < 2 or metric is None:
        return []
    scores = [run.values(metric)[-1] for run in runs]
    best = max(range(len(runs)), key=lambda number: scores[number])
    found = []
    for run, score in zip(runs, scores, strict=True):
        if run is runs[best]:
            continue
        mine, theirs = runs[best].config, run.config
        names = [name for name in {**mine, **theirs} if not name.startswith("logging.")]
        apart = [name for name in names if mine.get(name) != theirs.get(name)]
        said = [f"`{name}` ({mine.get(name)} and {theirs.get(name)})" for name in apart[:MOST_NAMED]]
        more = f" and {len(apart) - MOST_NAMED} more" if len(apart) > MOST_NAMED else ""
        title = f"{runs[best].name} did better than {run.name}" if score < scores[best] else "The runs ended equal"
        text = f"`{metric}` ended at {scores[best]:.3f} and {score:.3f}."
        do = f"They differ in {', '.join(said)}{more}." if apart else "They have the same settings."
        found.append(_finding(Kind.NOTE, metric, title, text, do))
    return found


def _thirds(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]] | None:
    """The first and the last third; None where they say nothing."""
    if len(values) < FEWEST_STEPS:
        return None
    size = len(values) // 3
    return values[:size], values[-size:]


def _change(values: Sequence[float]) -> tuple[float, float, bool] | None:
    """Mean of the first and the last third, and whether they differ by more than chance."""
    if (thirds := _thirds(values)) is None:
        return None
    first, last = thirds
    error = math.hypot(*(stdev(each) / math.sqrt(len(each)) for each in thirds))
    before, after = fmean(first), fmean(last)
    return before, after, abs(after - before) > SURE * error


def _late(run: Run, name: str) -> float | None:
    """Mean over the last third of the steps."""
    thirds = _thirds(run.values(name))
    return None if thirds is None else fmean(thirds[1])


def _largest_reward(run: Run, default: float = 1.0) -> float:
    """Of the recorded rollouts."""
    return max((rollout.reward for rollout in run.rollouts), default=default)


def _limit(name: str) -> float:
    metric = metric_of(name)
    assert metric is not None and metric.limit is not None
    return metric.limit


def _finding(kind: Kind, name: str, title: str, text: str, do: str = "") -> Finding:
    """Of a metric. `do` is what the table of metrics says, where a rule says nothing else."""
    metric = metric_of(name)
    return Finding(kind, title, text, do or _sentence(metric.do if metric else ""), name)


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}." if words else ""


def _percent(share: float) -> str:
    """As the page writes it: three digits that matter."""
    return f"{100 * share:.3g}%"


def _learned(run: Run) -> Iterator[Finding]:
    name = "evaluation/exact_match"
    scores = run.values(name)
    if len(scores) < 2:
        return
    first, last, best = scores[0], scores[-1], max(scores)
    said = f"Held-out exact match went from {_percent(first)} to {_percent(last)}"
    learned = last - first > LEAST_GAIN
    if run.summary and last < (target := run.config.get("evaluation.target_exact_match", 0.0)):
        text = f"{said}, below evaluation.target_exact_match = {target:g}."
        do = f"It still rose: `titan-rl train --resume {run.directory} --loop.steps N` goes on."
        if last - scores[-1 - max(len(scores) // 4, 1)] <= LEAST_GAIN:
            do = (
                "It rose no more. Read the wrong held-out answers in the rollouts below, and look at pass@k of"
                f" `titan-rl eval {run.directory}`: if more samples find no right answers either, raise"
                " entropy_bonus in trainer.loss.kwargs or make the reward finer."
            )
        title = "The policy learned, and missed its target" if learned else "The run missed its target"
        yield _finding(Kind.WARNING, name, title, text, do)
    elif learned:
        yield Finding(Kind.GOOD, "The policy learned", f"{said}.", see=name)
    if first - last > LEAST_GAIN:
        do = "Read held-out answers in the rollouts below: the reward may pay for something else than the score."
        yield _finding(Kind.PROBLEM, name, "The held-out score fell", f"{said}.", do)
    if best - last > 0.1:
        do = "Take an earlier checkpoint, or lower trainer.optimizer.lr."
        text = f"It reached {_percent(best)} and ended at {_percent(last)}."
        yield _finding(Kind.WARNING, name, "The best score was earlier", text, do)


def _reward(run: Run) -> Iterator[Finding]:
    name = "rollout/reward_mean"
    rewards = run.values(name)
    if (change := _change(rewards)) is None:
        return
    before, after, sure = change
    said = f"Mean reward was {before:.3f} in the first third of the steps and {after:.3f} in the last."
    if after >= TOP_SHARE * _largest_reward(run, max(rewards)) > 0:
        return
    if not sure:
        yield _finding(Kind.PROBLEM, name, "Reward is flat", f"{said} The difference is within chance.")
    elif after < before:
        do = "Lower trainer.optimizer.lr; look at the gradient norm and the importance weights where it turns."
        yield _finding(Kind.PROBLEM, name, "Reward falls", said, do)


def _mismatch(run: Run) -> Iterator[Finding]:
    name = "train/logprob_difference_mean"
    if alarms := sum(value > 0 for value in run.values("train/logprob_alarm")):
        text = f"In {alarms} of {run.steps} steps the mismatch was beyond trainer.logprob_alarm."
        yield _finding(Kind.PROBLEM, name, "Trainer and generator disagree", text)
    change = _change(run.values(name))
    if change and change[2] and change[1] > max(LEAST_MISMATCH, MISMATCH_GROWTH * change[0]):
        text = f"The mean difference of logprobs on on-policy tokens grew from {change[0]:.1e} to {change[1]:.1e} nats."
        yield _finding(Kind.WARNING, name, "Mismatch is rising", text)


def _idle(run: Run) -> Iterator[Finding]:
    if run.steps < FEWEST_STEPS:
        return
    synchronous = run.config.get("loop.max_staleness") == 0  # then trainer and generators take turns
    alike: dict[tuple[str, str], list[Account]] = defaultdict(list)
    for lane in run.timelines[0].lanes if run.timelines else ():
        if (account := lane.account) and account.idle > _limit("idle/<mesh>") and account.kind in COMPUTE:
            alike[account.kind, next(iter(account.waits))].append(account)
    for (meshes, cause), accounts in alike.items():
        one = len(accounts) == 1
        who = f"{accounts[0].mesh} is" if one else f"{len(accounts)} {meshes}s are"
        shares = dict.fromkeys(f"{share(account.idle for account in accounts):.0%}" for share in (min, max))
        text = (
            f"{'It' if one else 'They'} waited {' to '.join(shares)} of the time of the steps, longest for "
            f"{MEANINGS.get(cause, cause)}."
        )
        do = _sentence(HINTS.get((meshes, cause), ""))
        kind = Kind.NOTE if synchronous else Kind.WARNING
        yield Finding(kind, f"{who} idle more than half of the time", text, do, "timeline")


def _beyond_limits(run: Run) -> Iterator[Finding]:
    """The metrics whose limit no other rule looks at."""
    for name in run.series:
        metric, value = metric_of(name), _late(run, name)
        if metric is None or metric.limit is None or value is None or metric.name in LOOKED_AT:
            continue
        if value > metric.limit if metric.above is not None else value < metric.limit:
            said, limit = (
                _percent(each) if metric.unit == "share" else f"{each:.3g}" for each in (value, metric.limit)
            )
            side = "above" if metric.above is not None else "below"
            text = f"{said} in the last third of the steps, {side} {limit}: {metric.meaning}."
            kind, title = (Kind.WARNING, metric.title) if metric.title else (Kind.NOTE, f"{name} is {side} {limit}")
            yield _finding(kind, name, title, text)


def _failed(run: Run) -> Iterator[Finding]:
    name = "rollout/failed"
    steps, samples = len(run.series.get(name, {})), run.config.get("rollout.samples_per_group", 0)
    groups = run.config.get("loop.groups_per_step", 0) * steps + sum(run.values("groups/failed")[-1:])
    share = sum(run.values(name)) / (samples * groups) if steps and samples * groups else 0.0
    if share > _limit(name):
        causes = Counter(rollout.error.partition("\n")[0][:200] for rollout in run.rollouts if rollout.error)
        often = causes.most_common(MOST_NAMED)
        text = f"{share:.0%} of the rollouts failed and were not trained.{' Of the recorded ones:' * bool(often)}"
        counts = tuple((count, cause) for cause, count in often)
        yield dataclasses.replace(_finding(Kind.WARNING, name, "Rollouts fail", text), counts=counts)


def _entropy(run: Run) -> Iterator[Finding]:
    name = "train/entropy"
    change, reward = _change(run.values(name)), _late(run, "rollout/reward_mean")
    low = reward is not None and reward < _largest_reward(run) / 2
    if change and low and change[1] < COLLAPSED_ENTROPY * change[0] and not _goes_too_far(run):
        text = f"Entropy fell from {change[0]:.2f} to {change[1]:.2f} nats while the mean reward is {reward:.2f}."
        bonus = run.config.get("trainer.loss.kwargs.entropy_bonus", 0.0)
        do = f"Set --trainer.loss.kwargs.entropy-bonus {max(3 * bonus, 0.03):g}; it is {bonus:g}."
        yield _finding(Kind.PROBLEM, name, "The policy settled too soon", text, do)


def _goes_too_far(run: Run) -> str:
    """How far steps went from the policies that had sampled, where that is too far."""
    for name, limit, unit in (
        ("train/clip_share", MOST_CLIPPED, "of the tokens clipped"),
        ("train/kl_k3", MOST_KL, ""),
    ):
        values = run.values(name)
        if len(values) >= FEWEST_STEPS and (worst := sorted(values)[-len(values) // 10]) > limit:
            return f"{_percent(worst)} {unit}" if unit else f"{worst:.2g} nats"
    return ""


def _learning_rate(run: Run) -> Iterator[Finding]:
    lr = run.config.get("trainer.optimizer.lr", 0.0)
    reward = _late(run, "rollout/reward_mean")
    if not lr or reward is None or reward >= TOP_SHARE * _largest_reward(run) > 0:
        return
    if far := _goes_too_far(run):
        text = f"In a tenth of the steps {far} and more lay between the policy and the one that had sampled."
        do = f"Set --trainer.optimizer.lr {lr / 5:.1g}; it is {lr:g}."
        yield _finding(Kind.PROBLEM, "train/clip_share", "The learning rate is too high", text, do)
        return
    kl, entropy, rewards = (_change(run.values(name)) for name in ("train/kl_k3", "train/entropy", SCORES[-1]))
    moved = [change for change in (entropy, rewards) if change and change[2]]
    if run.config.get("loop.max_staleness") and kl and kl[1] < NO_KL and entropy and rewards and not moved:
        text = f"Neither entropy nor reward moved, and steps change the policy by {kl[1]:.1e} nats."
        yield _finding(
            Kind.PROBLEM,
            "train/kl_k3",
            "The learning rate is too low",
            text,
            f"Set --trainer.optimizer.lr {lr * 10:g}.",
        )


def _no_signal(run: Run) -> Iterator[Finding]:
    """Groups of equal rewards, with what was answered."""
    name = "groups/equal_rewards"
    equal, reward = _late(run, name), _late(run, "rollout/reward_mean")
    samples, top = run.config.get("rollout.samples_per_group", 0), _largest_reward(run)
    if equal is None or reward is None or reward >= TOP_SHARE * top > 0:
        return
    answers = Counter(each.answer for each in _late_rollouts(run) if not each.error)
    often = ", ".join(f"{answer!r} {_percent(count / answers.total())}" for answer, count in answers.most_common(3))
    said = f" Of the recorded answers {often}." if often else ""
    if equal > _limit(name):
        text = f"{_percent(equal)} of the groups of the last third had equal rewards, {reward:.3f} on average.{said}"
        do = "Give part of the reward for part of the answer, or write demonstrations: --trainer.warmup.steps 200."
        if reward > LITTLE * top:
            do = f"Set --rollout.samples-per-group {2 * samples}; it is {samples}."
        yield _finding(Kind.PROBLEM, name, "Groups teach nothing", text, do)
    elif samples and samples <= FEW_SAMPLES:
        text = f"Rewards are compared within {samples} samples, so {_percent(equal)} of the groups teach nothing."
        do = f"Set --rollout.samples-per-group {4 * samples}."
        yield _finding(Kind.WARNING, name, "Groups are small", text, do)


def _cut(run: Run) -> Iterator[Finding]:
    name = "rollout/truncated_share"
    if (cut := _late(run, name)) is not None and cut > _limit(name):
        new = run.config.get("rollout.sampling.max_new_tokens", 0)
        text = f"{_percent(cut)} of the answers of the last third were cut off after {new} tokens."
        do = f"Set --rollout.sampling.max-new-tokens {2 * new}, or let the reward pay for answers that end."
        yield _finding(Kind.WARNING, name, "Answers are cut by length", text, do)


def _late_rollouts(run: Run) -> list[ListedRollout]:
    last = run.steps - max(run.steps // 3, 1)
    return [each for each in run.rollouts if each.step > last and each.purpose is Purpose.TRAIN]


def _pays_for_something_else(run: Run) -> Iterator[Finding]:
    graded = [each for each in run.rollouts if each.purpose is Purpose.TRAIN and not each.error]
    rewards, lengths = [each.reward for each in graded], [float(each.sampled_tokens) for each in graded]
    scores = run.values(SCORES[0])
    learned = len(scores) > 1 and scores[-1] - scores[0] > LEAST_GAIN
    change = _change(run.values(SCORES[-1]))
    if learned or not change:
        return
    varied = len(graded) >= FEWEST_CORRELATED and len(set(rewards)) > 1 and len(set(lengths)) > 1
    if varied and abs(pays := correlation(lengths, rewards)) > CORRELATED:
        which = "Longer" if pays > 0 else "Shorter"
        text = f"{which} answers get more reward (correlation {pays:.2f}), and no held-out answer is right for it."
    elif change[2] and change[1] > change[0] + APART and len(scores) > 1:
        text = f"Mean reward rose from {change[0]:.2f} to {change[1]:.2f}, held-out exact match not."
    else:
        return
    do = "Correct the reward function: `titan-rl watch RUN` shows what it pays for."
    yield _finding(Kind.PROBLEM, SCORES[-1], "The reward pays for something else", text, do)


def _evaluation_differs(run: Run) -> Iterator[Finding]:
    trained, held_out = _late(run, SCORES[-1]), run.values(SCORES[1])
    if trained is not None and len(held_out) > 1 and trained - held_out[-1] > APART * abs(_largest_reward(run)):
        text = f"Mean reward is {trained:.2f} in training and {held_out[-1]:.2f} on held-out prompts."
        do = "Train on more different prompts, or hold out prompts of the same kind (`held_out` of the task)."
        yield _finding(Kind.WARNING, SCORES[1], "Evaluation differs from training", text, do)


def _gradient(run: Run) -> Iterator[Finding]:
    name = "train/grad_norm"
    norms, most = run.values(name), run.config.get("trainer.optimizer.max_grad_norm", 0)
    clipped = sum(norm > most for norm in norms) / len(norms) if norms and most else 0.0
    if len(norms) >= FEWEST_STEPS and clipped > MOST_CLIPPED_STEPS:
        text = f"In {clipped:.0%} of the steps the gradient was longer than max_grad_norm = {most:g}."
        do = "Raise trainer.optimizer.max_grad_norm, or count on a smaller step than trainer.optimizer.lr says."
        yield _finding(Kind.NOTE, name, "Most gradients are clipped", text, do)


def _not_finite(run: Run) -> Iterator[Finding]:
    for name, series in run.series.items():
        if missing := [step for step, value in series.items() if value is None]:
            text = f"{name} was NaN or infinite in {len(missing)} steps, first in step {missing[0]}."
            do = "Look at the step before: gradient norm, importance weights, its rollouts."
            yield _finding(Kind.PROBLEM, name, "A number is not finite", text, do)


def _dead_symbols(run: Run) -> Iterator[Finding]:
    """Characters of the wanted answers that the policy does not write, or never writes to any profit, at the end."""
    last = run.steps - max(run.steps // 3, 1)
    late = [rollout for rollout in run.rollouts if rollout.step > last and rollout.wanted and not rollout.error]
    wanting: dict[str, list[ListedRollout]] = defaultdict(list)
    for rollout in late:
        for symbol in {*rollout.wanted}:
            wanting[symbol].append(rollout)
    if not late or len(wanting) > MOST_SYMBOLS:
        return
    written = {symbol for rollout in late for symbol in rollout.answer}
    best = max(rollout.reward for rollout in late)
    for symbol, rollouts in sorted(wanting.items()):
        if len(rollouts) < FEWEST_WANTED or symbol.isspace():
            continue
        count = f"{len(rollouts)} recorded rollouts of the last third want {symbol!r}"
        do = "Set entropy_bonus in trainer.loss.kwargs, so that no symbol dies out before it is found to be right."
        if symbol not in written:
            text = f"{count}; no answer has it."
            yield Finding(Kind.PROBLEM, f"{symbol!r} is a dead symbol", text, do, "rollouts")
        elif all(rollout.reward <= 0 < best for rollout in rollouts):
            text = f"{count}; none of them got any reward."
            yield Finding(Kind.WARNING, f"{symbol!r} never gets reward", text, do, "rollouts")


def _lost(run: Run) -> Iterator[Finding]:
    if lost := max(run.values("fleet/lost"), default=0.0):
        text = f"Up to {lost:.0f} generators were dead at once; their requests went on elsewhere."
        yield _finding(Kind.NOTE, "fleet/lost", "Generators were lost", text, "Their logs say why.")


def _unfinished(run: Run) -> Iterator[Finding]:
    wanted = run.config.get("loop.steps", 0)
    if not run.summary and run.steps < wanted:
        text = f"It has {run.steps} of {wanted} steps: it was stopped, it failed, or it is still going on."
        do = f"titan-rl train --resume {shlex.quote(str(run.directory))} goes on."
        yield Finding(Kind.NOTE, "The run is not done", text, do)


RULES: tuple[Callable[[Run], Iterator[Finding]], ...] = (
    _learned,
    _reward,
    _learning_rate,
    _no_signal,
    _pays_for_something_else,
    _evaluation_differs,
    _entropy,
    _cut,
    _not_finite,
    _mismatch,
    _dead_symbols,
    _failed,
    _beyond_limits,
    _idle,
    _lost,
    _gradient,
    _unfinished,
)

LOOKED_AT = (
    *("idle/<mesh>", "rollout/failed", "rollout/truncated_share", "groups/equal_rewards"),
    *("train/clip_share", "train/kl_k3"),
)
"""Metrics whose limit a rule of its own looks at."""
