"""What an algorithm is: a function that gives credit, a function that turns credit into a gradient, or both.

    def advantages(group: Sequence[GradedRollout], *, …) -> Sequence[Credit]     in the rollout worker, numpy
    def loss(tokens: TrainedTokens, *, …) -> Gains                               in the trainer, torch

- Each file beside this one is an algorithm, by the name of the file. A file of yours is one too:
  `--trainer.loss.name mine.py:loss`, `--rollout.advantage.name mine.py:advantages`. Keyword arguments come from
  `trainer.loss.kwargs` and `rollout.advantage.kwargs`.
- Credit is given to each role by itself (`credit_by_role`): in a game a function sees one player's turns and reward at
  a time. A task without roles has one.
- A loss returns what to maximise [N] per trained token, and where it removed or bounded a gradient [N] bool. It must
  not divide by a number of tokens or samples: the step's sum is divided once, by a number that is known before the
  first micro-batch (`AGGREGATIONS`). So a gradient does not depend on how samples are packed, or spread over ranks. All
  trained tokens of a sample are in one micro-batch, so a loss may look at whole samples.
- No log ratio is exponentiated unbounded: float32 overflows at 88 nats, and where a clip then discards an infinite
  ratio, its gradient is 0 times infinity, so a finite loss would have a gradient of NaN.

Importing this module, or a file beside it, does not load torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    Gains = tuple[Tensor, Tensor]
    """What to maximise [N], and where a gradient was removed or bounded [N] bool."""
else:
    Gains = tuple

LARGEST_LOG_RATIO = 20.0
"""Nats. A ratio of e^20 = 4.9e8 is beyond every clip and cap that anybody sets, and its square, which a gradient's norm
contains, is far from float32's end. A token beyond it counts as one at it, and no longer pushes where the ratio carries
the gradient."""

AGGREGATIONS = {
    "token_mean": "sum over all trained tokens / their number: all tokens weigh alike",
    "sample_mean": "mean over samples of the mean over a sample's tokens: all samples weigh alike",
    "sample_sum": "mean over samples of the sum over a sample's tokens: nothing is divided by a length",
}
"""How a step's sum over tokens becomes one number. A function's attribute `aggregation` says which is its own, else it
is the first; `trainer.loss.kwargs.aggregation` overrides it."""


def probability_ratio(logprobs: Tensor, before: Tensor) -> Tensor:
    """exp(logprobs - before), never above exp(`LARGEST_LOG_RATIO`); what is not a number stays so."""
    return bounded_exp(logprobs - before)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()


def later_sums(values: Tensor, samples: Tensor) -> Tensor:
    """[N] -> [N]: each token's value and those of the later ones of its sample."""
    samples, sums = samples.cpu(), values.double().cpu().cumsum(0)  # on CUDA no sum is the same each time
    return values + (sums[samples.bincount().cumsum(0)[samples] - 1] - sums).to(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTokens:
    """The N trained tokens of one micro-batch, N >= 0, those of one sample next to each other and in order. A sampled
    token that was the only possible one is not trained."""

    logprobs: Tensor  # [N] float32, under the current weights, at the sampling temperature; carries gradient
    entropies: Tensor  # [N] float32, in nats, of the distribution each token was drawn from; carries gradient
    behaviour_logprobs: Tensor  # [N] float32, under the weights that sampled the token
    advantages: Tensor  # [N] float32
    samples: Tensor  # [N] int64, which sample of the micro-batch a token belongs to
    proximal_logprobs: Tensor | None = None
    """[N] float32, under the weights before the batch's first optimizer step; None: these are the current ones."""
    advantage_mean: float = 0.0
    """Over the trained tokens of the whole step, each with its sample's mean advantage."""
    advantage_std: float = 1.0
    progress: float = 0.0
    """Share of the run's steps that were done before this one."""

    @property
    def ratio(self) -> Tensor:
        """[N] of the current to the behaviour policy's probability; carries gradient."""
        return probability_ratio(self.logprobs, self.behaviour_logprobs)

    @property
    def weight(self) -> Tensor:
        """[N] the same, as a constant."""
        return self.ratio.detach()

    @property
    def proximal(self) -> Tensor:
        """[N] `proximal_logprobs`, without gradient."""
        return self.logprobs.detach() if self.proximal_logprobs is None else self.proximal_logprobs

    @property
    def log_ratio(self) -> Tensor:
        return self.logprobs - self.behaviour_logprobs

    @property
    def lengths(self) -> Tensor:
        """[N] trained tokens of each token's sample."""
        return self.sample_sum(self.behaviour_logprobs.new_ones(len(self.samples)))

    def sample_sum(self, values: Tensor) -> Tensor:
        """[N] -> [N]: the sum over each token's sample."""
        count = int(self.samples[-1]) + 1 if len(self.samples) else 0
        return values.new_zeros(count).index_add(0, self.samples, values)[self.samples]

    def sample_mean(self, values: Tensor) -> Tensor:
        return self.sample_sum(values) / self.lengths

    def none(self) -> Tensor:
        """[N] False: no gradient was removed or bounded."""
        return self.samples < 0

    def select(self, mask: Tensor) -> TrainedTokens:
        """The tokens where `mask` ([N] bool) is True, possibly none; the step's numbers stay."""
        names = ("logprobs", "entropies", "behaviour_logprobs", "advantages", "samples", "proximal_logprobs")
        tensors = {name: tensor for name in names if (tensor := getattr(self, name)) is not None}
        return replace(self, **{name: tensor[mask] for name, tensor in tensors.items()})


def covariance(tokens: TrainedTokens) -> Tensor:
    """[N] of each token: its advantage times how far its logprob is from the mean of its sample, as a constant."""
    logprobs = tokens.logprobs.detach()
    return tokens.advantages * (logprobs - tokens.sample_mean(logprobs))


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Gains:
    """PPO's pessimistic bound min(r A, clip(r, 1 - low, 1 + high) A), and where it bites (arXiv:1707.06347, eq. 7)."""
    free, held = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
    return free.minimum(held), held < free


@dataclass(frozen=True, slots=True, kw_only=True)
class GradedTurn:
    """One answer of the policy within a rollout."""

    tokens: int
    """Sampled ones."""
    prompt: np.ndarray  # [T] int32, the tokens that it answered
    reward: float = 0.0
    """That the task gave for this turn."""
    role: str = ""
    """Whose turn it is, in a game or a team."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradedRollout:
    """A rollout that was played to its end and graded; those that failed are not in a group that credit is given to."""

    reward: float
    """Of the whole rollout, the rewards of its turns included."""
    parts: Mapping[str, float]
    """Every score by name, unweighted, those of weight 0 too."""
    turns: tuple[GradedTurn, ...]

    @property
    def tokens(self) -> int:
        return sum(turn.tokens for turn in self.turns)

    @property
    def grade(self) -> float:
        """The reward without those of the turns; to twelve digits, so that the grades of equal answers are equal."""
        return float(f"{self.reward - sum(turn.reward for turn in self.turns):.12g}")

    def of(self, role: str) -> GradedRollout:
        """What one role played and got: the score of its name, or else the grade, and the rewards of its turns."""
        turns = tuple(turn for turn in self.turns if turn.role == role)
        reward = self.parts.get(role, self.grade) + sum(turn.reward for turn in turns)
        return replace(self, reward=reward, turns=turns)


Credit = float | Sequence[float | np.ndarray]
"""The advantage of a whole rollout, or one for each of its turns: a number, or one for each token [n]."""


def credit_per_turn(group: Sequence[GradedRollout], credit: Sequence[Credit]) -> list[list[float | np.ndarray]]:
    """What `advantages` returned, as one number for each turn of each rollout, or one for each token of it [n] float32.
    Raises ValueError: too few or too many, or one that is not finite."""
    if len(credit) != len(group):
        raise ValueError(f"{len(credit)} advantages for {len(group)} rollouts")
    found = []
    for number, (rollout, given) in enumerate(zip(group, credit, strict=True)):
        several = isinstance(given, Sequence) or np.ndim(given) > 0
        turns: list[Any] = list(given) if several else [given] * len(rollout.turns)  # type: ignore[arg-type]
        if len(turns) != len(rollout.turns):
            raise ValueError(f"rollout {number}: {len(turns)} advantages for {len(rollout.turns)} turns")
        for place, turn in enumerate(rollout.turns):
            with np.errstate(over="ignore"):  # it is then infinite
                values = np.asarray(turns[place], np.float32)
            if values.ndim and values.shape != (turn.tokens,):
                raise ValueError(f"rollout {number}, turn {place}: {values.size} advantages for {turn.tokens} tokens")
            if not np.isfinite(values).all():
                raise ValueError(f"rollout {number}, turn {place}: an advantage is {turns[place]}")
            turns[place] = values if values.ndim else float(turns[place])
        found.append(turns)
    return found


def credit_by_role(
    group: Sequence[GradedRollout], advantages: Callable[..., Sequence[Credit]], **kwargs: Any
) -> list[list[float | np.ndarray]]:
    """The credit of every turn, for which `advantages` sees one role at a time: its turns, with its reward. Where some
    rollouts have a score of the role, those in which it neither has one nor had a turn are left out."""
    roles = dict.fromkeys(turn.role for rollout in group for turn in rollout.turns)
    if not any(roles):
        return credit_per_turn(group, advantages(group, **kwargs))
    found: list[list[float | np.ndarray]] = [[0.0] * len(rollout.turns) for rollout in group]
    for role in roles:
        places = [[place for place, turn in enumerate(rollout.turns) if turn.role == role] for rollout in group]
        scored = any(role in rollout.parts for rollout in group)
        members = [n for n, rollout in enumerate(group) if places[n] or role in rollout.parts or not scored]
        parts = [group[n].of(role) for n in members]
        for n, credit in zip(members, credit_per_turn(parts, advantages(parts, **kwargs)), strict=True):
            for place, each in zip(places[n], credit, strict=True):
                found[n][place] = each
    return found


def rewards_of(group: Sequence[GradedRollout]) -> np.ndarray:
    """[n] float64."""
    return np.array([rollout.reward for rollout in group], dtype=np.float64)


def discounted_sums(rewards: Sequence[float], gamma: float) -> list[float]:
    """Of each turn: its reward and those of later ones, each less by a factor gamma per turn in between."""
    found: list[float] = []
    for reward in reversed(rewards):
        found.append(reward + gamma * found[-1] if found else reward)
    return found[::-1]


def above_mean(values: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """x - mean; exactly 0 where all are equal, which their mean's rounding would not be. All weights 0: as without."""
    values = values - values[0]
    return values - np.average(values, weights=weights if weights is not None and weights.any() else None)


def standardized(values: np.ndarray, epsilon: float) -> np.ndarray:
    """(x - mean) / (deviation + epsilon) with the unbiased deviation (n - 1); zeros where all are equal, or n < 2.

    Equal values are a special case, because the formula would divide the rounding error of their mean by epsilon.
    """
    if len(values) < 2 or bool((values == values[0]).all()):
        return np.zeros(len(values))
    spread = values.std(ddof=1) + epsilon
    return (values - values.mean()) / spread if spread else np.zeros(len(values))  # squared differences may underflow
