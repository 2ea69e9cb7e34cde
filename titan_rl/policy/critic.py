"""A value head beside the policy's, and advantages from its values: generalized advantage estimation (GAE).

Always true:

- Only trained tokens are steps: what a tool wrote between two of them is part of the second one's state.
- The reward of a trained token is its credit (`rollout.advantage`) less that of the next trained token of its sample,
  and that of the last one its credit. So a reward for the whole rollout arrives at the last trained token, wherever
  tokens stand that were not sampled, and none is lost: a sample's rewards add up to its first token's credit. Credit
  that is discounted already is discounted twice, and where two roles share a sample, values reach across them.
- Every rank holds the whole head, adds up the gradients of all, and makes the same step, bit for bit.

    A_t = sum over l of (discount * gae_lambda)^l (r_{t+l} + discount V_{t+l+1} - V_{t+l})   (arXiv:1506.02438, eq. 16)
    R_t = A_t + V_t, what V_t is trained to be; V after the last token is 0
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from titan_rl.policy.config import TrainerConfig
from titan_rl.policy.microbatch import MicroBatch
from titan_rl.weights.ranks import Ranks

MAX_GRAD_NORM = 1.0
"""Of the head's gradient, which the policy's norm does not count."""


def generalized_advantages(credit: np.ndarray, values: np.ndarray, *, discount: float, gae_lambda: float) -> np.ndarray:
    """[n] float64 of one sample's trained tokens in order: the advantages of this credit [n] and these values [n]."""
    later_credit, later_value = (np.append(each[1:], 0.0) for each in (credit, values))
    found = credit - later_credit + discount * later_value - values
    for place in range(len(found) - 2, -1, -1):
        found[place] += discount * gae_lambda * found[place + 1]
    return found


class Critic:
    """The head, its optimizer, and what it makes of a batch. Collective where it says so."""

    def __init__(self, trainer: TrainerConfig, dim: int, device: torch.device) -> None:
        config = self._config = trainer.critic
        self._copies = trainer.tensor_parallel  # ranks that compute the same tokens
        self._head = torch.zeros(dim + 1, device=device, requires_grad=True)  # the last one is the bias
        self._optimizer = torch.optim.AdamW([self._head], lr=config.lr, weight_decay=0.0)
        moments = {name: torch.zeros_like(self._head, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
        state = self._optimizer.state[self._head] = {"step": torch.zeros(()), **moments}
        self.tensors: dict[str, Tensor] = {"head": self._head.detach(), **state}
        """What later steps depend on, by name; live."""
        self.metrics: dict[str, float] = {}
        """Of the last batch: `value_explained`, which share of the returns' variance the values knew before."""

    def values(self, hidden: Tensor) -> Tensor:
        """[N] float32 of the rows [N, D] that predict the trained tokens."""
        return hidden.float() @ self._head[:-1] + self._head[-1]

    def judged(self, held: Sequence[MicroBatch], *, counted: bool) -> list[MicroBatch]:
        """The same micro-batches, which have `values`, with `returns`, and with advantages of the values in place of
        credit: over the batch their mean is 0 and their deviation 1. Collective. `counted`: False on ranks that repeat
        another's tokens."""
        rates: dict[str, Any] = {"discount": self._config.discount, "gae_lambda": self._config.gae_lambda}
        found: list[np.ndarray] = []  # [2, N] advantages and returns
        for each in held:
            assert each.values is not None
            both = torch.stack([each.advantages, each.values]).double().cpu().numpy()  # credit, values
            ends = np.flatnonzero(np.diff(each.samples.cpu().numpy())) + 1
            advantages = [generalized_advantages(*sample, **rates) for sample in np.split(both, ends, axis=1)]
            found.append(np.stack([joined := np.concatenate(advantages), joined + both[1]]))
        every = np.concatenate(found, axis=1)
        sums = torch.tensor([every.shape[1], *every.sum(1), *np.square(every).sum(1)], dtype=torch.float64)
        sums = sums if counted else torch.zeros_like(sums)
        Ranks(dist.group.WORLD).add(sums)
        count, *totals = sums.tolist()
        mean, return_mean, square, return_square = (total / count for total in totals)
        variance, spread = max(0.0, square - mean**2), return_square - return_mean**2
        self.metrics = {"value_explained": 1 - variance / spread if spread > 1e-12 * return_square else 0.0}

        def judged(each: MicroBatch, advantages: np.ndarray, returns: np.ndarray) -> MicroBatch:
            standard = (advantages - mean) / (math.sqrt(variance) + 1e-8)
            tensors = torch.from_numpy(np.stack([standard, returns]).astype(np.float32)).to(each.advantages.device)
            return replace(each, advantages=tensors[0], returns=tensors[1])

        return [judged(each, *both) for each, both in zip(held, found, strict=True)]

    def losses(self, microbatch: MicroBatch, hidden: Tensor) -> Tensor:
        """[N], weighted: half of the squared error, or of that with the value moved by at most `clip`, if it is larger.
        Its gradient reaches the policy's layers too."""
        assert microbatch.values is not None and microbatch.returns is not None
        hidden = hidden.float()
        if self._copies > 1:  # each rank's gradient of these rows is a summand
            hidden = hidden / self._copies + hidden.detach() * (1 - 1 / self._copies)
        values, clip = self.values(hidden), self._config.clip
        errors = (values - microbatch.returns).square()
        if clip:
            near = microbatch.values + (values - microbatch.values).clamp(-clip, clip)
            errors = errors.maximum((near - microbatch.returns).square())
        return self._config.coefficient / 2 * errors

    def reduce_gradient(self) -> bool:
        """Add the gradients of all ranks up, and clip; whether it is finite. Collective."""
        gradient = self._head.grad if self._head.grad is not None else torch.zeros_like(self._head)
        dist.all_reduce(gradient)
        gradient /= self._copies
        self._head.grad = gradient
        return bool(torch.nn.utils.clip_grad_norm_([self._head], MAX_GRAD_NORM).isfinite())

    def step(self) -> None:
        self._optimizer.step()
        self.discard_gradient()

    def discard_gradient(self) -> None:
        self._head.grad = None
