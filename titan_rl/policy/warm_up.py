"""Supervised steps on demonstrations: cross entropy of what the policy is to say, before RL begins.

Same micro-batches, same sharding, same division by the step's global number of trained tokens as an RL step. The
optimizer is a second one over the same weights, so that its moments and its schedule end with the warm-up.

Import this module only after `titan_adaptation.choose_device`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from titan_rl.errors import TrainingError
from titan_rl.policy.config import OptimizerConfig, WarmupConfig
from titan_rl.policy.microbatch import MicroBatch
from titan_rl.policy.models.model import Policy
from titan_rl.policy.optimizer import PolicyOptimizer
from titan_rl.policy.token_scores import token_scores

TEMPERATURE = 1.0
"""Of the cross entropy, whatever RL samples with: the demonstrations are taught to the policy as it is."""


class WarmUp:
    """Optimizer and loss of the warm-up on one rank. Collective in everything it does."""

    def __init__(self, config: WarmupConfig, policy: Policy) -> None:
        """
        Raises:
            TrainingError: the config has no warm-up.
        """
        if not config.steps:
            raise TrainingError("a warm-up step was asked for, but trainer.warmup.steps is 0")
        self._policy = policy
        self.optimizer = PolicyOptimizer(
            OptimizerConfig(
                lr=config.lr,
                betas=config.betas,
                max_grad_norm=config.max_grad_norm,
                warmup_steps=config.lr_warmup_steps,
                decay_ratio=(config.steps - config.lr_warmup_steps) / config.steps,
                min_lr_factor=config.min_lr_factor,
            ),
            policy.module,
            config.steps,
        )
        self.steps = 0

    def accumulate(self, rounds: Iterable[MicroBatch], trained: int) -> Tensor:
        """Gradients of all micro-batches of this rank.

        Args:
            rounds: as many on every rank.
            trained: response tokens of the whole step, over all ranks.

        Returns:
            Scalar float64, this rank's summed cross entropy (nats).
        """
        total = torch.zeros((), dtype=torch.float64, device=self._policy.device)
        for microbatch in rounds:
            logits = self._policy.logits(microbatch)
            logprobs, _ = token_scores(
                logits[microbatch.rows],
                microbatch.targets,
                temperature=TEMPERATURE,
                vocab_start=self._policy.vocab_start,
                group=self._policy.tensor_group,
            )
            loss = -logprobs.sum()
            (loss / trained).backward()
            total += loss.detach()
        return total.cpu()

    def apply(self, total: Tensor, trained: int) -> dict[str, float]:
        """Change the weights by the gradients, or raise on all ranks.

        Args:
            total: what `accumulate` returned.
            trained: what it was given.

        Returns:
            loss (nats per token), grad_norm (before clipping) and lr.

        Raises:
            TrainingError: NaN or inf; the weights are untouched.
        """
        counted = total if self._policy.tensor_rank == 0 else torch.zeros_like(total)
        if dist.get_world_size() > 1:
            dist.all_reduce(counted)
        loss = counted.item() / trained
        grad_norm = self.optimizer.clip_gradients()
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self.optimizer.discard_gradients()
            raise TrainingError(
                f"warm-up step {self.steps}: loss is {loss}, gradient norm is {grad_norm}; the weights were not changed"
            )
        lr = self.optimizer.step()
        self.steps += 1
        return {"loss": loss, "grad_norm": grad_norm, "lr": lr}
