"""Every algorithm again, from its paper's equations: one token, one rollout at a time, slowly, in float64.

A loss is a function of ONE sample's tokens: what to maximise per token, and whether a gradient was removed or bounded.
Its gradient is autograd's of these scalars; branches are Python's. A ratio is bounded where `LARGEST_LOG_RATIO` is.
Credit is exact: rational numbers up to the one square root.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from titan_rl.policy.algorithms.base import LARGEST_LOG_RATIO, Credit, GradedRollout, GradedTurn


@dataclass
class Token:
    logprob: torch.Tensor  # a float64 scalar
    behaviour: float
    advantage: float
    before: float | None = None  # the batch's first optimizer step

    @property
    def log_ratio(self) -> torch.Tensor:
        return self.logprob - self.behaviour

    @property
    def ratio(self) -> torch.Tensor:
        return exp(self.log_ratio)

    @property
    def weight(self) -> float:
        return self.ratio.item()


Gain = tuple[torch.Tensor | float, bool]
Sample = Sequence[Token]


def exp(log_ratio: torch.Tensor) -> torch.Tensor:
    return torch.exp(log_ratio) if log_ratio.item() <= LARGEST_LOG_RATIO else torch.exp(log_ratio.detach() * 0 + 20)


def mean_log_ratio(sample: Sample) -> torch.Tensor:
    return sum((token.log_ratio for token in sample), torch.zeros((), dtype=torch.float64)) / len(sample)


def product_of_ratios(sample: Sample) -> float:
    return exp(mean_log_ratio(sample).detach() * len(sample)).item()


def ppo(ratio: torch.Tensor, advantage: float, low: float, high: float) -> Gain:
    if advantage > 0 and ratio.item() > 1 + high:
        return (1 + high) * advantage, True
    if advantage < 0 and ratio.item() < 1 - low:
        return (1 - low) * advantage, True
    return ratio * advantage, False


def per_token(gain: Callable[[Token], Gain]) -> Callable[[Sample], list[Gain]]:
    return lambda sample: [gain(token) for token in sample]


def weighted(weight: float, token: Token, lost: bool) -> Gain:
    return weight * token.advantage * token.logprob, lost


def dual_clip(token: Token) -> Gain:
    gain, lost = ppo(token.ratio, token.advantage, 0.2, 0.2)
    if token.advantage < 0 and token.weight > 3.0:
        return 3.0 * token.advantage, True
    return gain, lost


def pushes_away(token: Token) -> bool:
    return token.advantage * token.log_ratio.item() > 0


def dppo(divergence: Callable[[float, float], float], limit: float) -> Callable[[Sample], list[Gain]]:
    def gain(token: Token) -> Gain:
        apart = divergence(math.exp(token.behaviour), math.exp(token.logprob.item()))
        lost = pushes_away(token) and apart > limit
        return 0.0 if lost else token.ratio * token.advantage, lost

    return per_token(gain)


def total_variation(mu: float, pi: float) -> float:
    return abs(mu - pi)


def binary_kl(mu: float, pi: float) -> float:
    return mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))


def covariances(sample: Sample) -> list[float]:
    middle = sum(token.logprob.item() for token in sample) / len(sample)
    return [(token.logprob.item() - middle) * token.advantage for token in sample]


def clip_cov(sample: Sample) -> list[Gain]:
    lost = [1.0 <= value <= 5.0 for value in covariances(sample)]
    return [(0.0 if gone else token.ratio * token.advantage, gone) for token, gone in zip(sample, lost, strict=True)]


def kl_cov(sample: Sample) -> list[Gain]:
    held = [value > 1.0 for value in covariances(sample)]
    return [
        (token.ratio * token.advantage - (token.log_ratio**2 / 2 if hold else 0.0), hold)
        for token, hold in zip(sample, held, strict=True)
    ]


def m2po(sample: Sample) -> list[Gain]:
    counted = [number for number, token in enumerate(sample) if pushes_away(token)]
    squares = {number: sample[number].log_ratio.item() ** 2 for number in counted}
    while squares and sum(squares.values()) / len(squares) > 0.04:
        squares.pop(max(squares, key=squares.__getitem__))
    gone = set(counted) - set(squares)
    return [
        (0.0 if number in gone else token.ratio * token.advantage, number in gone)
        for number, token in enumerate(sample)
    ]


def gspo(sample: Sample) -> list[Gain]:
    ratio = exp(mean_log_ratio(sample))
    return [ppo(ratio, token.advantage, 3e-4, 4e-4) for token in sample]


def gspo_token(sample: Sample) -> list[Gain]:
    weight = exp(mean_log_ratio(sample)).item()
    return [ppo(weight * torch.exp(t.logprob - t.logprob.detach()), t.advantage, 3e-4, 4e-4) for t in sample]


def gmpo(sample: Sample) -> list[Gain]:
    held: list[torch.Tensor | float] = []
    for token in sample:
        x = token.log_ratio
        outside = x.item() > 0.4 if token.advantage > 0 else x.item() < -0.4
        held.append(math.copysign(0.4, token.advantage) if outside and token.advantage else x)
    mean = sum(held, torch.zeros((), dtype=torch.float64)) / len(held)
    return [(exp(mean) * t.advantage, isinstance(h, float)) for t, h in zip(sample, held, strict=True)]


def sapo(token: Token) -> Gain:
    tau = 1.0 if token.advantage > 0 else 1.05
    return 4 / tau / (1 + torch.exp(-tau * (token.ratio - 1))) * token.advantage, False


def mis(sample: Sample) -> list[Gain]:
    weight = product_of_ratios(sample)
    return [weighted(0.0 if weight > 2.0 else weight, token, weight > 2.0) for token in sample]


def topr(sample: Sample) -> list[Gain]:
    weight = product_of_ratios(sample)
    taper = [1.0 if token.advantage >= 0 else min(weight, 1.0) for token in sample]
    return [weighted(w, t, w < 1) for w, t in zip(taper, sample, strict=True)]


def decoupled_ppo(token: Token) -> Gain:
    before = token.logprob.item() if token.before is None else token.before
    weight = exp(torch.tensor(before - token.behaviour, dtype=torch.float64)).item()
    gain, lost = ppo(exp(token.logprob - before), token.advantage, 0.2, 0.2)
    return (0.0, True) if weight > 5.0 else (weight * gain, lost)


def proximal_ppo(token: Token) -> Gain:
    before = token.logprob.item() if token.before is None else token.before
    return ppo(exp(token.logprob - before), token.advantage, 0.2, 0.2)


def grpo(low: float, high: float) -> Callable[[Sample], list[Gain]]:
    return per_token(lambda token: ppo(token.ratio, token.advantage, low, high))


LOSSES: dict[str, tuple[str, Callable[[Sample], list[Gain]]]] = {
    "cispo": ("token_mean", per_token(lambda t: weighted(min(t.weight, 5.0), t, t.weight > 5.0))),
    "clip_cov": ("token_mean", clip_cov),
    "dapo": ("token_mean", grpo(0.2, 0.28)),
    "decoupled_ppo": ("token_mean", per_token(decoupled_ppo)),
    "dppo": ("token_mean", dppo(total_variation, 0.15)),
    "dr_grpo": ("sample_sum", grpo(0.2, 0.2)),
    "dual_clip": ("token_mean", per_token(dual_clip)),
    "gmpo": ("sample_mean", gmpo),
    "grpo": ("token_mean", grpo(0.2, 0.2)),
    "gspo": ("sample_mean", gspo),
    "gspo_token": ("sample_mean", gspo_token),
    "icepop": (
        "token_mean",
        per_token(lambda t: weighted(t.weight * (0.5 <= t.weight <= 5.0), t, not 0.5 <= t.weight <= 5.0)),
    ),
    "kl_cov": ("token_mean", kl_cov),
    "m2po": ("token_mean", m2po),
    "mis": ("token_mean", mis),
    "ppo": ("token_mean", per_token(proximal_ppo)),
    "reinforce": ("token_mean", per_token(lambda t: weighted(1.0, t, False))),
    "reinforce_pp": ("token_mean", grpo(0.2, 0.2)),  # of advantages that are standardized over the step
    "sapo": ("sample_mean", per_token(sapo)),
    "tis": ("token_mean", per_token(lambda t: weighted(min(t.weight, 2.0), t, t.weight > 2.0))),
    "topr": ("token_mean", topr),
}
"""The aggregation that the file states, and the gains of one sample, at the arguments that are the default."""

VARIANTS = {"dppo": ({"divergence": "kl", "limit": 0.05}, dppo(binary_kl, 0.05))}


def naive_objective(
    name: str,
    step: Sequence[Sample],
    *,
    bonus: float = 0.0,
    entropy: float = 0.0,
    low: float = 0.0,
    high: float = math.inf,
) -> tuple[torch.Tensor, int]:
    """The step's loss as one number, and how many tokens lost a gradient. Each token has the same entropy."""
    aggregation, gains_of = LOSSES[name]
    total, count, tokens = torch.zeros((), dtype=torch.float64), 0, sum(map(len, step))
    for sample in step:
        if not low <= math.exp(min(mean_log_ratio(sample).item(), LARGEST_LOG_RATIO)) <= high:
            continue
        gains = gains_of(sample)
        count += sum(lost for _, lost in gains)
        share = {"token_mean": 1 / tokens, "sample_mean": 1 / len(step) / len(sample), "sample_sum": 1 / len(step)}
        for gain, _ in gains:
            total = total - share[aggregation] * (gain + bonus * entropy)
    return total, count


def rollout(reward: float, *turns: tuple[Any, ...], **parts: float) -> GradedRollout:
    """Turns are their tokens, state and, as far as there are any, reward and role."""
    asked = turns or ((3, b""),)
    made = tuple(
        GradedTurn(
            tokens=tokens, prompt=np.frombuffer(state, np.uint8), **dict(zip(("reward", "role"), more, strict=False))
        )
        for tokens, state, *more in asked
    )
    return GradedRollout(reward=reward, parts=parts or {"only": reward}, turns=made)


def mean(values: Sequence[Fraction]) -> Fraction:
    return sum(values, Fraction(0)) / len(values)


def deviations(values: Sequence[Fraction], epsilon: float) -> list[float]:
    """From the mean, in unbiased deviations."""
    if len(values) < 2 or len(set(values)) == 1:
        return [0.0] * len(values)
    variance = sum((value - mean(values)) ** 2 for value in values) / (len(values) - 1)
    return [float(value - mean(values)) / (math.sqrt(variance) + epsilon) for value in values]


def rewards(group: Sequence[GradedRollout]) -> list[Fraction]:
    return [Fraction(each.reward) for each in group]


def above_mean(group: Sequence[GradedRollout]) -> list[float]:
    return [float(r - mean(rewards(group))) for r in rewards(group)]


def shaped_dapo(group: Sequence[GradedRollout], longest: int, cache: int) -> list[float]:
    values = []
    for each in group:
        over = Fraction(longest - cache - each.tokens, cache)
        values.append(Fraction(each.reward) + (max(Fraction(-1), min(Fraction(0), over)) if longest else 0))
    return deviations(values, 1e-4)


def paid(each: GradedRollout) -> list[Fraction]:
    return [Fraction(turn.reward) for turn in each.turns]


def ahead(values: Sequence[Fraction], gamma: float, place: int) -> Fraction:
    return sum((Fraction(gamma) ** (k - place) * values[k] for k in range(place, len(values))), Fraction(0))


def discounted(group: Sequence[GradedRollout], gamma: float) -> list[list[float]]:
    grades = deviations([Fraction(each.reward) - sum(paid(each)) for each in group], 1e-4)
    credit = [
        [gamma ** (len(each.turns) - 1 - turn) * value for turn in range(len(each.turns))]
        for each, value in zip(group, grades, strict=True)
    ]
    for place in range(max(len(each.turns) for each in group)):
        there = [i for i, each in enumerate(group) if len(each.turns) > place]
        for i, value in zip(there, deviations([ahead(paid(group[i]), gamma, place) for i in there], 1e-4), strict=True):
            credit[i][place] += value
    return credit


def gdpo(group: Sequence[GradedRollout], scores: dict[str, float]) -> list[float]:
    columns = [[w * x for x in deviations([Fraction(g.parts[s]) for g in group], 1e-4)] for s, w in scores.items()]
    return [sum(row) for row in zip(*columns, strict=True)]


def gigpo(group: Sequence[GradedRollout]) -> list[list[float]]:
    credit = [[value] * len(g.turns) for g, value in zip(group, deviations(rewards(group), 1e-4), strict=True)]
    for state in {turn.prompt.tobytes() for each in group for turn in each.turns}:
        places = [
            (i, t)
            for i, each in enumerate(group)
            for t, turn in enumerate(each.turns)
            if turn.prompt.tobytes() == state
        ]
        returns = []
        for i, t in places:
            earned = paid(group[i])
            earned[-1] += Fraction(group[i].reward) - sum(earned)
            returns.append(ahead(earned, 0.95, t))
        for (i, t), value in zip(places, deviations(returns, 1e-4), strict=True):
            credit[i][t] += value
    return credit


def length_penalty(group: Sequence[GradedRollout], weight: float) -> list[float]:
    lengths = [each.tokens for each in group]
    values = rewards(group)
    if max(lengths) > min(lengths):
        for number, each in enumerate(group):
            x = Fraction(1, 2) - Fraction(each.tokens - min(lengths), max(lengths) - min(lengths))
            values[number] += Fraction(weight) * (x if each.reward >= 1 else min(Fraction(0), x))
    return deviations(values, 1e-4)


def maxrl(group: Sequence[GradedRollout]) -> list[float]:
    middle = mean(rewards(group))
    return [float(r - middle) / (float(middle) + 1e-6) if middle > 0 else 0.0 for r in rewards(group)]


def opo(group: Sequence[GradedRollout]) -> list[float]:
    weights = sum(each.tokens for each in group)
    baseline = sum(Fraction(g.reward) * g.tokens for g in group) / weights if weights else mean(rewards(group))
    return [float(r - baseline) for r in rewards(group)]


def pass_at_k(group: Sequence[GradedRollout], k: int) -> list[float]:
    n, wrong = len(group), sum(each.reward < 1 for each in group)
    k = min(k, n)
    middle = 1 - Fraction(math.comb(wrong, k), math.comb(n, k))
    spread = math.sqrt(middle * (1 - middle))
    if not spread:
        return [0.0] * n
    of_wrong = 1 - middle - Fraction(math.comb(wrong - 1, k - 1), math.comb(n - 1, k - 1)) if wrong else Fraction(0)
    return [float(of_wrong if each.reward < 1 else 1 - middle) / spread for each in group]


def rae(group: Sequence[GradedRollout]) -> list[list[float]]:
    def plays(each: GradedRollout, role: str) -> bool:
        return any(turn.role == role for turn in each.turns)

    def won(each: GradedRollout, role: str) -> Fraction:
        given = Fraction(each.parts[role]) if role in each.parts else Fraction(each.reward) - sum(paid(each))
        return given + sum(Fraction(turn.reward) for turn in each.turns if turn.role == role)

    def baseline(role: str) -> Fraction:
        known = [each for each in group if role in each.parts]
        return mean([won(each, role) for each in group if not known or each in known or plays(each, role)])

    return [[float(won(each, turn.role) - baseline(turn.role)) for turn in each.turns] for each in group]


def rloo(group: Sequence[GradedRollout]) -> list[float]:
    values = rewards(group)
    others = [values[:number] + values[number + 1 :] for number in range(len(values))]
    return [float(value - mean(rest)) if rest else 0.0 for value, rest in zip(values, others, strict=True)]


CREDIT: dict[str, list[tuple[dict[str, object], Callable[[Sequence[GradedRollout]], Sequence[Credit]]]]] = {
    "dapo": [({}, lambda g: shaped_dapo(g, 0, 64)), ({"longest": 12, "cache": 6}, lambda g: shaped_dapo(g, 12, 6))],
    "discounted": [({}, lambda g: discounted(g, 0.95)), ({"gamma": 0.5}, lambda g: discounted(g, 0.5))],
    "distillation": [({}, lambda g: [0.0] * len(g))],
    "dr_grpo": [({}, above_mean)],
    "gdpo": [
        ({"scores": {"right": 1.0, "style": 1.0}}, lambda g: gdpo(g, {"right": 1.0, "style": 1.0})),
        ({"scores": {"style": 0.25, "right": 2.0}}, lambda g: gdpo(g, {"style": 0.25, "right": 2.0})),
    ],
    "gigpo": [({}, gigpo)],
    "grpo": [({}, lambda g: deviations(rewards(g), 1e-4))],
    "length_penalty": [({}, lambda g: length_penalty(g, 0.2)), ({"weight": 1.5}, lambda g: length_penalty(g, 1.5))],
    "maxrl": [({}, maxrl)],
    "opo": [({}, opo)],
    "pass_at_k": [({}, lambda g: pass_at_k(g, 4)), ({"k": 2}, lambda g: pass_at_k(g, 2))],
    "rae": [({}, rae)],
    "ppo": [({}, lambda g: [float(r) for r in rewards(g)])],
    "reinforce_pp": [({}, lambda g: [float(r) for r in rewards(g)])],
    "reinforce_pp_baseline": [({}, above_mean)],
    "rloo": [({}, rloo)],
}
"""Arguments, and the credit of one group with them."""
