"""AdamW, its schedule and gradient clipping, all three torchtitan's; one for RL, and one of its own for the warm-up.

Import this module only after `titan_adaptation.choose_device`.
"""

import math

from torch import Tensor, nn
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.distributed.utils import clip_grad_norm_

from titan_rl.policy.config import OptimizerConfig, WarmupConfig


class PolicyOptimizer:
    """Clips, steps and schedules. Gradients are gone after `step` and `discard_gradients`."""

    def __init__(self, config: OptimizerConfig, module: nn.Module, total_steps: int) -> None:
        self._parameters = list(module.parameters())
        self._max_norm = config.max_grad_norm or math.inf
        self._kl_band = config.kl_band
        self._total_steps = total_steps
        self._tensors: dict[str, Tensor] = {}
        self._optimizers = default_adamw(
            lr=config.lr, betas=tuple(config.betas), eps=config.eps, weight_decay=config.weight_decay
        ).build(model_parts=[module])
        self._schedulers = LRSchedulersContainer.Config(
            warmup_steps=config.warmup_steps, decay_ratio=config.decay_ratio, min_lr_factor=config.min_lr_factor
        ).build(optimizers=self._optimizers, training_steps=total_steps)

    def clip_gradients(self) -> float:
        """Scale the gradients down to the maximal norm; returns the global norm they had, the same on all ranks."""
        return float(clip_grad_norm_(self._parameters, self._max_norm))

    def step(self, kl: float = 0.0, *, last: bool = True) -> float:
        """Apply and drop the gradients; returns the learning rate that was used. `kl`: nats between the policy and
        those that sampled this step (`OptimizerConfig.kl_band`). `last`: of its batch; the schedule counts batches."""
        schedule = self._schedulers.schedulers[0]
        lr = float(schedule.get_last_lr()[0]) * (self._kl_band / kl if 0 < self._kl_band < kl else 1.0)
        for optimizer in self._optimizers.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
        self._optimizers.step()
        self.discard_gradients()
        # torchtitan's schedule is not defined past its end; a longer run keeps the last rate.
        if last and schedule.last_epoch < self._total_steps - 1:
            self._schedulers.step()
        return lr

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The state by the names of the parameters: the live tensors, always in one order, made if there were none."""
        if not self._tensors:
            made = any(optimizer.state for optimizer in self._optimizers.optimizers)
            state = self._optimizers.state_dict()  # makes them by an empty step, which AdamW counts
            self._tensors = {name: each for name, each in state.items() if isinstance(each, Tensor)}
            for name, tensor in self._tensors.items() if not made else ():
                if name.endswith(".step"):
                    tensor.zero_()
        return self._tensors

    def set_step(self, step: int) -> None:
        """Set the schedule to where it is after so many steps."""
        self._schedulers.load_state_dict({"last_epoch": min(step, self._total_steps - 1)})

    def discard_gradients(self) -> None:
        self._optimizers.zero_grad()


def warm_up_optimizer(config: WarmupConfig, module: nn.Module) -> PolicyOptimizer:
    """A second optimizer over the same weights, whose moments and schedule end with the warm-up."""
    rates = OptimizerConfig(
        lr=config.lr,
        warmup_steps=config.lr_warmup_steps,
        decay_ratio=(config.steps - config.lr_warmup_steps) / config.steps,
        min_lr_factor=0.1,
    )
    return PolicyOptimizer(rates, module, config.steps)
