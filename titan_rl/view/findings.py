"""What the numbers of a run say in plain words, and what to do about it.

A metric with a limit makes a finding by itself; limit and advice are in `metric_table`. The rules are for what one
number does not say: those of `learning`, and here those of the run itself.
"""

import dataclasses
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

from titan_rl.metrics.metric_table import metric_of
from titan_rl.types import FailureKind
from titan_rl.view.learning import (
    FEWEST_STEPS,
    LEARNING,
    LOWER,
    LR,
    SCORES,
    Finding,
    Kind,
    change_of,
    late,
    limit,
    percent,
    sentence,
    to_set,
)
from titan_rl.view.read import Run
from titan_rl.view.timelines import COMPUTE, HINTS, MEANINGS, Account

MISMATCH_GROWTH = 3.0
LEAST_MISMATCH = 1e-5
"""Nats. Rounding of float32 alone makes less."""
MOST_NAMED = 5
"""Settings that a comparison names; the page lists all. Causes of failures."""


def findings(run: Run) -> list[Finding]:
    """Of one run, the gravest first."""
    order = list(Kind)
    found = (_advised(run, each) for rule in RULES for each in rule(run))
    return sorted(found, key=lambda each: order.index(each.kind))


def _advised(run: Run, found: Finding) -> Finding:
    """With what the table of metrics says to do, where a rule says nothing, and with the run's directory."""
    do = found.do if found.do or found.kind is Kind.GOOD else _of_table(run, found.see)
    where = shlex.quote(str(run.directory))
    return dataclasses.replace(found, do=do.replace("RUN", where).replace("`logs/`", f"`{where}/logs/`"))


def _of_table(run: Run, name: str, longer: Sequence[str] = ()) -> str:
    """What the table says to do about a metric; `longer`: limits that were too short, too."""
    if (metric := metric_of(name)) is None:
        return ""
    return f"{sentence(metric.do)} {to_set(run, {**metric.change, **dict.fromkeys(longer, 2)})}".strip()


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
        found.append(Finding(Kind.NOTE, title, text, do, metric))
    return found


def _mismatch(run: Run) -> Iterator[Finding]:
    name = "train/logprob_difference_mean"
    if alarms := sum(value > 0 for value in run.values("train/logprob_alarm")):
        text = f"In {alarms} of {run.steps} steps the mismatch was beyond trainer.logprob_alarm."
        yield Finding(Kind.PROBLEM, "Trainer and generator disagree", text, see=name)
    change = change_of(run.values(name))
    if change and change[2] and change[1] > max(LEAST_MISMATCH, MISMATCH_GROWTH * change[0]):
        text = f"The mean difference of logprobs on on-policy tokens grew from {change[0]:.1e} to {change[1]:.1e} nats."
        yield Finding(Kind.WARNING, "Mismatch is rising", text, see=name)


def _idle(run: Run) -> Iterator[Finding]:
    if run.steps < FEWEST_STEPS:
        return
    synchronous = run.config.get("loop.max_staleness") == 0  # then trainer and generators take turns
    alike: dict[tuple[str, str], list[Account]] = defaultdict(list)
    for lane in run.timelines[0].lanes if run.timelines else ():
        if (account := lane.account) and account.idle > limit("idle/<mesh>") and account.kind in COMPUTE:
            alike[account.kind, next(iter(account.waits))].append(account)
    for (meshes, cause), accounts in alike.items():
        one = len(accounts) == 1
        who = f"{accounts[0].mesh} is" if one else f"{len(accounts)} {meshes}s are"
        shares = dict.fromkeys(f"{share(account.idle for account in accounts):.0%}" for share in (min, max))
        text = (
            f"{'It' if one else 'They'} waited {' to '.join(shares)} of the time of the steps, longest for "
            f"{MEANINGS.get(cause, cause)}."
        )
        hint = HINTS[meshes].get(cause, {"do": "", "change": {}})
        do = f"{sentence(hint['do'])} {to_set(run, hint['change'])}".strip()
        kind = Kind.NOTE if synchronous else Kind.WARNING
        yield Finding(kind, f"{who} idle more than half of the time", text, do, "timeline")


def _beyond_limits(run: Run) -> Iterator[Finding]:
    """The metrics whose limit no other rule looks at."""
    for name in run.series:
        metric, value = metric_of(name), late(run, name)
        if metric is None or metric.limit is None or value is None or metric.name in LOOKED_AT:
            continue
        if value > metric.limit if metric.above is not None else value < metric.limit:
            said, limit = (percent(each) if metric.unit == "share" else f"{each:.3g}" for each in (value, metric.limit))
            side = "above" if metric.above is not None else "below"
            text = f"{said} in the last third of the steps, {side} {limit}: {metric.meaning}."
            kind, title = (Kind.WARNING, metric.title) if metric.title else (Kind.NOTE, f"{name} is {side} {limit}")
            yield Finding(kind, title, text, see=name)


def _failed(run: Run) -> Iterator[Finding]:
    name = "rollout/failed"
    steps, samples = len(run.series.get(name, {})), run.config.get("rollout.samples_per_group", 0)
    played = run.config.get("loop.groups_per_step", 0) * sum(run.values("groups/samples") or [samples] * steps)
    played += samples * sum(run.values("groups/failed")[-1:])
    share = sum(run.values(name)) / played if played else 0.0
    if share > limit(name):
        kinds = {f"{name}_{kind}": sum(run.values(f"{name}_{kind}")) for kind in FailureKind}
        often = Counter(rollout.failed for rollout in run.rollouts if rollout.failed).most_common(MOST_NAMED)
        text = f"{share:.0%} of the rollouts failed and were not trained.{' Of the recorded ones:' * bool(often)}"
        counts = tuple((count, f"{kind}: {cause[:200]}") for (kind, cause), count in often)
        see = max(kinds, key=lambda each: kinds[each]) if any(kinds.values()) else name
        named = re.findall(r"\b(?:environment|rollout)\.\w+", often[0][0][1]) if often else ()
        yield Finding(Kind.WARNING, "Rollouts fail", text, _of_table(run, see, named), see, counts)


def _not_finite(run: Run) -> Iterator[Finding]:
    for name, series in run.series.items():
        if missing := [step for step, value in series.items() if value is None]:
            text = f"{name} was NaN or infinite in {len(missing)} steps, first in step {missing[0]}."
            do = f"Look at the step before: gradient norm, importance weights, its rollouts. {to_set(run, {LR: LOWER})}"
            yield Finding(Kind.PROBLEM, "A number is not finite", text, do, name)


def _unfinished(run: Run) -> Iterator[Finding]:
    wanted = run.config.get("loop.steps", 0)
    if not run.summary and run.steps < wanted:
        text = f"It has {run.steps} of {wanted} steps: it was stopped, it failed, or it is still going on."
        yield Finding(Kind.NOTE, "The run is not done", text, "`titan-rl train --resume RUN` goes on.")


RULES: tuple[Callable[[Run], Iterator[Finding]], ...] = (
    *LEARNING,
    _not_finite,
    _mismatch,
    _failed,
    _beyond_limits,
    _idle,
    _unfinished,
)

LOOKED_AT = (
    *("idle/<mesh>", "rollout/failed", "rollout/truncated_share", "groups/equal_rewards"),
    *("train/clip_share", "train/kl_k3"),
)
"""Metrics whose limit a rule of its own looks at."""
