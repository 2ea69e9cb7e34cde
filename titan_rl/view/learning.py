"""What keeps a policy from learning, or lets it, in the numbers and rollouts of its run; and the setting to change.

Every finding is a pure function of the numbers; nothing is said of fewer than `FEWEST_STEPS` steps. A finding that is
not sure enough to act on is not made.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import correlation, fmean, pstdev, stdev
from typing import Any

from titan_rl.metrics.metric_table import metric_of
from titan_rl.metrics.rollout_record import GROUP
from titan_rl.one_line import one_line
from titan_rl.types import Purpose
from titan_rl.view.conversation import LONGEST_TEXT
from titan_rl.view.read import ListedRollout, Run

FEWEST_STEPS = 9
"""Below, the thirds of a run that are compared hold fewer than three steps each."""
SURE = 2.0
"""Standard errors; a smaller change of a mean counts as none."""
TOP_SHARE = 0.98
"""Of the largest reward seen; a mean above it has nothing left to gain."""
MOST_BONUS = 0.5  # of the entropy, that is still made larger
COLLAPSED_ENTROPY, STILL_WRONG, MOSTLY_CUT = 0.1, 0.1, 0.5
"""Of the entropy that the run began with; share of the answers that get less than half of the largest reward. A policy
that has both answers nearly always the same, and too often wrongly; but not where so many answers are cut off."""
LEAST_GAIN, LEAST_FALL = 0.02, 0.05
"""Of held-out exact match; a smaller change counts as none: of 30 prompts, one that is missed is chance."""
MOSTLY_RIGHT = 0.5
"""Held-out exact match of a policy that has learned what its reward is for."""
APART = 0.15
"""Of a reward; a smaller difference of training and evaluation counts as none."""
FEWEST_CORRELATED, CORRELATED = 30, 0.8
"""Recorded rollouts, and their correlation of reward and length from which the length is what pays."""
NO_KL, SMALL_KL = 1e-6, 5e-4
"""Nats that a step moves a policy that stands still; of one that could move further."""
LR = "trainer.optimizer.lr"
LOWER, MUCH_LOWER = 1 / 3, 1 / 5
READ_REWARDS = "Correct the reward function: `titan-rl watch RUN` shows what it pays for, the report whole groups."
"""No setting does that."""
LITTLE = 0.1
"""Of the largest reward: a mean below it is no signal to speak of."""
FEW_SAMPLES = 4
FEWEST_RIGHT = 5
"""Recorded answers that are right, or better than all that were cut, before their lengths tell how much room one needs;
of more, the best twice as many count."""
SCORES = ("evaluation/exact_match", "evaluation/reward", "rollout/reward_mean")
"""By which runs are compared: the first that all of them have."""


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


def change_of(values: Sequence[float]) -> tuple[float, float, bool] | None:
    """Mean of the first and the last third, and whether they differ by more than chance; None of too few steps."""
    if len(values) < FEWEST_STEPS:
        return None
    first, last = values[: len(values) // 3], values[-(len(values) // 3) :]
    error = math.hypot(*(stdev(each) / math.sqrt(len(each)) for each in (first, last)))
    before, after = fmean(first), fmean(last)
    return before, after, abs(after - before) > SURE * error


def still_rises(values: Sequence[float]) -> bool:
    """In the second half."""
    end = change_of(values[len(values) // 2 :])
    return end is not None and end[2] and end[1] > end[0]


def late(run: Run, name: str) -> float | None:
    """Mean over the last third of the steps."""
    change = change_of(run.values(name))
    return None if change is None else change[1]


def _largest_reward(run: Run, default: float = 1.0) -> float:
    return max((rollout.reward for rollout in run.rollouts if not rollout.error), default=default)


def limit(name: str) -> float:
    metric = metric_of(name)
    assert metric is not None and metric.limit is not None
    return metric.limit


def times(value: Any, factor: float) -> Any:
    """So many times a setting: a whole number where it is one, else two digits."""
    new = math.ceil(value * factor) if isinstance(value, int) else float(f"{value * factor:.2g}")
    return value if factor == 1 else new


def to_set(run: Run, settings: Mapping[str, float | str]) -> str:
    """What to set: so many times what a setting is, or a text. What is off, or so already, is left out."""
    there = {name: value for name in settings if (value := run.config.get(name))}
    new = {name: to if isinstance(to := settings[name], str) else times(value, to) for name, value in there.items()}
    said = [f"--{name.replace('_', '-')} {new[name]}; it is {there[name]}" for name in new if new[name] != there[name]]
    return f"Set {', and '.join(said)}." if said else ""


def sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}." if words else ""


def percent(share: float) -> str:
    """As the page writes it: three digits that matter."""
    return f"{100 * share:.3g}%"


def _learned(run: Run) -> Iterator[Finding]:
    name = "evaluation/exact_match"
    scores = run.values(name)
    if len(scores) < 2:
        return
    first, last, best = scores[0], scores[-1], max(scores)
    said = f"Held-out exact match went from {percent(first)} to {percent(last)}"
    learned = last - first > LEAST_GAIN
    back = f"Take an earlier checkpoint. {to_set(run, {LR: LOWER})}"
    if run.summary and last < (target := run.config.get("evaluation.target_exact_match", 0.0)):
        text = f"{said}, below evaluation.target_exact_match = {target:g}."
        do = f"It still rose: `titan-rl train --resume RUN --loop.steps {2 * run.steps}` goes on."
        if last - scores[-1 - max(len(scores) // 4, 1)] <= LEAST_GAIN:
            do = f"It rose no more. {_more_entropy(run)} If `titan-rl eval RUN` finds pass@k no higher: a finer reward."
        title = "The policy learned, and missed its target" if learned else "The run missed its target"
        yield Finding(Kind.WARNING, title, text, do, name)
    elif learned:
        yield Finding(Kind.GOOD, "The policy learned", f"{said}.", see=name)
    if first - last > LEAST_FALL:
        do = f"The reward may pay for something else than the score. {READ_REWARDS}"
        rewards = run.values("evaluation/reward")
        if rewards and rewards[0] - rewards[-1] > LEAST_GAIN:  # it pays for the same, and fell too
            do = back
        yield Finding(Kind.PROBLEM, "The held-out score fell", f"{said}.", do, name)
    if best - last > 0.1:
        text = f"It reached {percent(best)} and ended at {percent(last)}."
        yield Finding(Kind.WARNING, "The best score was earlier", text, back, name)


def _reward(run: Run) -> Iterator[Finding]:
    name = "rollout/reward_mean"
    rewards = run.values(name)
    if (change := change_of(rewards)) is None:
        return
    before, after, sure = change
    said = f"Mean reward was {before:.3f} in the first third of the steps and {after:.3f} in the last."
    if after >= TOP_SHARE * _largest_reward(run, max(rewards)) > 0:
        return
    if not sure:
        text = f"{said} The difference is within chance."
        others = (each.do for rule in (_learning_rate, _entropy, _no_signal) for each in rule(run))
        small = (late(run, "train/kl_k3") or math.inf) < SMALL_KL
        do = next(others, to_set(run, {LR: 1 / LOWER} if small else {"rollout.samples_per_group": 2}))
        yield Finding(Kind.PROBLEM, "Reward is flat", text, do, name)
    elif after < before:
        yield Finding(Kind.PROBLEM, "Reward falls", said, to_set(run, {LR: LOWER}), name)
    elif run.summary and not (_solved(run) or _settled(run)) and still_rises(rewards):
        do = f"Set --loop.steps {2 * len(rewards)}; `titan-rl train --resume RUN` takes it, too."
        yield Finding(Kind.WARNING, "It was still learning when the run ended", said, do, name)


def _goes_too_far(run: Run) -> str:
    """How far steps went from the policies that had sampled, where that is too far."""
    for name, unit in (("train/clip_share", "of the tokens clipped"), ("train/kl_k3", "")):
        values = run.values(name)
        if len(values) >= FEWEST_STEPS and (worst := sorted(values)[-len(values) // 10]) > limit(name):
            return f"{percent(worst)} {unit}" if unit else f"{worst:.2g} nats"
    return ""


def _learning_rate(run: Run) -> Iterator[Finding]:
    reward = late(run, "rollout/reward_mean")
    if not run.config.get(LR) or reward is None or reward >= TOP_SHARE * _largest_reward(run) > 0:
        return
    if far := _goes_too_far(run):
        text = f"In a tenth of the steps {far} and more lay between the policy and the one that had sampled."
        do = to_set(run, {LR: MUCH_LOWER})
        yield Finding(Kind.PROBLEM, "The learning rate is too high", text, do, "train/clip_share")
        return
    kl, entropy, rewards = (change_of(run.values(name)) for name in ("train/kl_k3", "train/entropy", SCORES[-1]))
    moved = [change for change in (entropy, rewards) if change and change[2]]
    if run.config.get("loop.max_staleness") and kl and kl[1] < NO_KL and entropy and rewards and not moved:
        text = f"Neither entropy nor reward moved, and steps change the policy by {kl[1]:.1e} nats."
        yield Finding(Kind.PROBLEM, "The learning rate is too low", text, to_set(run, {LR: 10}), "train/kl_k3")


def _late_rollouts(run: Run) -> list[ListedRollout]:
    """Those of training in the last third that did not fail, and were not chosen for their group, whose prompt would
    count much."""
    last = run.steps - max(run.steps // 3, 1)
    chosen = (each for each in run.rollouts if each.step > last and each.kept != (GROUP,))
    return [each for each in chosen if not each.error and not each.evaluated]


def _no_signal(run: Run) -> Iterator[Finding]:
    """Groups of equal rewards, with what was answered."""
    name = "groups/equal_rewards"
    equal, reward = late(run, name), late(run, "rollout/reward_mean")
    grown, top = late(run, "groups/samples"), _largest_reward(run)
    samples = run.config.get("rollout.samples_per_group", 0) if grown is None else round(grown)
    if equal is None or reward is None or reward >= TOP_SHARE * top > 0:
        return
    answers = Counter(each.answer for each in _late_rollouts(run))
    often = ", ".join(f"{answer!r} {percent(count / answers.total())}" for answer, count in answers.most_common(3))
    said = f" Of the recorded answers {often}." if often else ""
    if equal > limit(name):
        text = f"{percent(equal)} of the groups of the last third had equal rewards, {reward:.3f} on average.{said}"
        do = "Give part of the reward for part of the answer, or teach right answers first: --trainer.warmup.steps 200."
        if reward > LITTLE * top:
            if _settled(run):
                return  # more samples of a policy that always says the same are equal, too
            do = f"Set --rollout.samples-per-group {2 * samples}; it is {samples}."
        yield Finding(Kind.PROBLEM, "Groups teach nothing", text, do, name)
    elif samples and samples <= FEW_SAMPLES:
        text = f"Rewards are compared within {samples} samples, so {percent(equal)} of the groups teach nothing."
        do = f"Set --rollout.samples-per-group {4 * samples}."
        yield Finding(Kind.WARNING, "Groups are small", text, do, name)


def _solved(run: Run) -> bool:
    """Whether the policy's best answers are right, where samples are still drawn from others."""
    return run.values(SCORES[0])[-1:] >= [TOP_SHARE]


def _settled(run: Run) -> str:
    """How far entropy fell while many answers are still wrong, where it did."""
    entropies, rewards, top = run.values("train/entropy"), run.values(SCORES[-1]), _largest_reward(run)
    change = change_of(entropies)
    if change is None or not rewards or _goes_too_far(run) or _solved(run):
        return ""
    graded = [each.reward for each in _late_rollouts(run)]
    reward, end = (fmean(each[-max(len(each) // 10, FEWEST_STEPS // 3) :]) for each in (rewards, entropies))
    wrong = fmean(each < top / 2 for each in graded) if len(graded) >= FEWEST_CORRELATED else float(reward < top / 2)
    wrong = min(wrong, 2 - 2 * reward / top if top > 0 else 1.0)  # no more can be: recorded ones are not all
    cut = late(run, "rollout/truncated_share") or 0.0
    if end >= COLLAPSED_ENTROPY * change[0] or wrong < STILL_WRONG or cut > MOSTLY_CUT:
        return ""
    return (
        f"Entropy fell from {change[0]:.2g} to {end:.2g} nats while the mean reward is {reward:.2f}"
        f" and {percent(wrong)} of the answers get less than half of the best one."
    )


def _more_entropy(run: Run) -> str:
    bonus = run.config.get("trainer.loss.kwargs.entropy_bonus", 0.0)
    least = 0.003 if run.config.get("policy.path") else 0.3  # weights that were trained before know where to search
    if bonus > MOST_BONUS:  # more of it would drown the reward
        return to_set(run, {"rollout.samples_per_group": 2})
    do = f"Set --trainer.loss.kwargs.entropy-bonus {max(3 * bonus, least):g}; it is {bonus:g}."
    if not run.config.get("trainer.loss.kwargs.entropy_decay"):
        do += " With --trainer.loss.kwargs.entropy-decay 0.8 it is gone when the policy has found what pays."
    return do


def _entropy(run: Run) -> Iterator[Finding]:
    if text := _settled(run):
        yield Finding(Kind.PROBLEM, "The policy settled too soon", text, _more_entropy(run), "train/entropy")


def _what_pays(run: Run) -> str:
    """The best of what is not right."""
    wrong = [each for each in run.rollouts if not each.error and each.wanted and each.exact_match < 1]
    if not wrong:
        return ""
    best = max(wrong, key=lambda each: each.reward)
    answer, wanted = one_line(best.answer, LONGEST_TEXT), one_line(best.wanted, LONGEST_TEXT)
    return f" '{answer}' got {best.reward:.2f} where '{wanted}' was wanted."


def _pays_for_something_else(run: Run) -> Iterator[Finding]:
    graded = [one for one in run.rollouts if one.purpose is Purpose.TRAIN and not one.error and one.kept != (GROUP,)]
    rewards, lengths = [each.reward for each in graded], [float(each.sampled_tokens) for each in graded]
    scores = run.values(SCORES[0])
    learned = bool(scores) and (scores[-1] >= MOSTLY_RIGHT or scores[-1] - scores[0] > LEAST_GAIN)
    change = change_of(run.values(SCORES[-1]))
    if learned or not change or len(scores) < 2:  # the first evaluation is of a policy that learned nothing yet
        return
    varied = len(graded) >= FEWEST_CORRELATED and len(set(rewards)) > 1 and len(set(lengths)) > 1
    if varied and abs(pays := correlation(lengths, rewards)) > CORRELATED:
        which = "Longer" if pays > 0 else "Shorter"
        text = f"{which} answers get more reward (correlation {pays:.2f}), and held-out answers are not right for it."
    elif still_rises(run.values(SCORES[-1])):  # parts of a right answer may pay before the whole of it is found
        return
    elif change[2] and change[1] > change[0] + APART and (late(run, "rollout/truncated_share") or 0.0) <= MOSTLY_CUT:
        text = f"Mean reward rose from {change[0]:.2f} to {change[1]:.2f}, held-out exact match not."
    else:
        return
    title = "The reward pays for something else"
    yield Finding(Kind.PROBLEM, title, f"{text}{_what_pays(run)}", READ_REWARDS, SCORES[-1])


def _evaluation_differs(run: Run) -> Iterator[Finding]:
    trained, held_out = late(run, SCORES[-1]), run.values(SCORES[1])
    if trained is not None and len(held_out) > 1 and trained - held_out[-1] > APART * abs(_largest_reward(run)):
        text = f"Mean reward is {trained:.2f} in training and {held_out[-1]:.2f} on held-out prompts."
        more = to_set(run, {"loop.prompts": 4}) or "Give the task more different prompts to train on."
        do = f"{more} Compare `titan-rl try RUN --policy RUN` with and without `--held-out`: are they of one kind?"
        kind = Kind.PROBLEM if held_out[-1] < trained / 2 else Kind.WARNING
        yield Finding(kind, "Evaluation differs from training", text, do, SCORES[1])


def _cut(run: Run) -> Iterator[Finding]:
    """Answers that are cut off, and by which limit. Better answers that ended well within the room show that the room
    is not too small."""
    name = "rollout/truncated_share"
    if (cut := late(run, name)) is None or cut <= limit(name):
        return
    new = run.config.get("rollout.sampling.max_new_tokens", 0)
    text = f"{percent(cut)} of the answers of the last third were cut off"
    shown = [each for each in _late_rollouts(run) if each.last_turn]
    ended, off = ([each for each in shown if each.truncated is truncated] for truncated in (False, True))
    # Only beside answers to the same prompt that are cut: elsewhere short ones may be right.
    beside, most = {each.group for each in off}, max((each.reward for each in off), default=math.inf)
    most = max(most, MOSTLY_RIGHT * _largest_reward(run))
    better = [each for each in ended if each.group in beside and (each.exact_match >= 1 or each.reward > most)]
    best = [each.last_turn for each in sorted(better, key=lambda each: -each.reward)[: 2 * FEWEST_RIGHT]]
    symbols = run.config.get("policy.tiny.symbols") and run.config.get("policy.tiny.tokenizer") != "chat"
    wanted = max((len(each.wanted) for each in shown), default=0)
    need, why = math.inf, ""
    if len(best) >= FEWEST_RIGHT:
        need, why = fmean(best) + SURE * pstdev(best), f"The best that ended had {fmean(best):.3g} on average"
    elif better and symbols and wanted:  # one token each, and what ended did best
        need, why = wanted, f"Right ones have at most {wanted}, and one that ends them"
    if off and sum(each.last_turn < new for each in off) > len(off) / 2:
        text += f", of the recorded ones most before they had {new} tokens."
        others = dict.fromkeys(("generator.max_model_len", "policy.tiny.max_length", "rollout.max_sampled_tokens"), 2)
        do = f"Another limit than rollout.sampling.max_new_tokens cuts them. {to_set(run, others)}"
        do += " A program may ask for fewer itself (max_tokens)."
        yield Finding(Kind.WARNING, "Answers are cut by length", text, do, name)
    elif need < new:
        text += f" after {new} tokens. {why}, so there is room."
        paid, other = (fmean(each.reward for each in some) if some else 0.0 for some in (off, ended))
        do = "Let the reward pay for answers that end."
        if off and paid < other:
            do = f"The reward pays for it ({other:.2f}, {paid:.2f} where it cuts): see other findings, or train longer."
            do = f"{do} {to_set(run, {'loop.steps': 2})}"
        yield Finding(Kind.WARNING, "The policy does not end its answers", text, do, name)
    else:
        do = f"Set --rollout.sampling.max-new-tokens {2 * new}, or let the reward pay for answers that end."
        yield Finding(Kind.WARNING, "Answers are cut by length", f"{text} after {new} tokens.", do, name)


LEARNING = (
    _learned,
    _reward,
    _learning_rate,
    _no_signal,
    _pays_for_something_else,
    _evaluation_differs,
    _entropy,
    _cut,
)
