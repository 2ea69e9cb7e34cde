"""The learning rate of an optimizer that goes on is the schedule's, also where the run has other steps now."""

import pytest
import torch
from torch import nn

from titan_rl.policy.config import OptimizerConfig
from titan_rl.policy.models.titan_adaptation import choose_device


@pytest.mark.parametrize(("done", "before"), [(4, 4), (2, 4), (2, 20)])
def test_a_longer_schedule_decides_the_rate_of_the_first_step_too(done: int, before: int) -> None:
    choose_device("cpu")
    from titan_rl.policy.optimizer import PolicyOptimizer

    config = OptimizerConfig(lr=1e-2, warmup_steps=0, decay_ratio=1.0, min_lr_factor=0.0, weight_decay=0.0)

    def stepped(optimizer: PolicyOptimizer, module: nn.Module) -> float:
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        return optimizer.step()

    first = nn.Linear(2, 2)
    optimizer = PolicyOptimizer(config, first, before)
    for _ in range(done):
        stepped(optimizer, first)
    second = nn.Linear(2, 2)
    longer = PolicyOptimizer(config, second, 20)
    for name, tensor in longer.tensors.items():
        tensor.copy_(optimizer.tensors[name])
    longer.set_step(done)
    weights = second.weight.detach().clone()
    rate = stepped(longer, second)
    # All gradients were 1, so AdamW moves every weight by the rate.
    torch.testing.assert_close(weights - second.weight.detach(), torch.full((2, 2), rate), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("kl", "share"), [(0.0, 1.0), (0.02, 1.0), (0.08, 0.25)])
def test_a_step_beyond_the_band_is_shortened_and_the_next_one_is_not(kl: float, share: float) -> None:
    choose_device("cpu")
    from titan_rl.policy.optimizer import PolicyOptimizer

    module = nn.Linear(2, 2)
    optimizer = PolicyOptimizer(OptimizerConfig(lr=1e-2, kl_band=0.02), module, 9)
    for rate, each in ((1e-2 * share, kl), (1e-2, 0.01)):
        weights = module.weight.detach().clone()
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        assert optimizer.step(each) == pytest.approx(rate)
        torch.testing.assert_close(weights - module.weight.detach(), torch.full((2, 2), rate), rtol=1e-4, atol=1e-7)
