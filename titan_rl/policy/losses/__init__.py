"""Policy losses and their corrections for samples that older weights drew.

    name              per token (r: current / behaviour probability)      samples that are old
    grpo              min(r A, clip(r) A)                                 stop pushing past the clip
    policy_gradient   A log p                                             are taken for new (for comparison)
    tis               min(r, cap) A log p                                 weigh at most `cap`
    decoupled_ppo     r A log p where r <= weight_cap, else 0             weigh r, or nothing above `weight_cap`

Each of them drops whole samples whose mean ratio leaves a band when `sequence_low` or `sequence_high` is set.

Importing this package does not load torch, so the controller checks a loss and its arguments without it.

A loss of one's own is a subclass of `PolicyLoss` in any file, named in the config as `file.py:Class`:

    class Reinforce(PolicyLoss):
        def __call__(self, tokens):
            return -(tokens.advantages * tokens.logprobs).sum(), {}
"""

from __future__ import annotations

from titan_rl.errors import ConfigError
from titan_rl.importing import import_name
from titan_rl.policy.config import LossConfig
from titan_rl.policy.losses.base import PolicyLoss, TrainedTokens, probability_ratio
from titan_rl.policy.losses.bundled import (
    DecoupledPPOLoss,
    GRPOLoss,
    PolicyGradientLoss,
    TruncatedImportanceLoss,
)

__all__ = [
    "DecoupledPPOLoss",
    "GRPOLoss",
    "PolicyGradientLoss",
    "PolicyLoss",
    "TrainedTokens",
    "TruncatedImportanceLoss",
    "build_loss",
    "probability_ratio",
]

SHORT_NAMES = {
    "grpo": "titan_rl.policy.losses:GRPOLoss",
    "policy_gradient": "titan_rl.policy.losses:PolicyGradientLoss",
    "tis": "titan_rl.policy.losses:TruncatedImportanceLoss",
    "decoupled_ppo": "titan_rl.policy.losses:DecoupledPPOLoss",
}
"""Names that `trainer.loss.name` understands besides `pkg.mod:Class` and `file.py:Class`."""


def build_loss(config: LossConfig) -> PolicyLoss:
    """The loss that `config` names; raises ConfigError where the name or the arguments are wrong."""
    loss_class = import_name(config.name, SHORT_NAMES)
    if not (isinstance(loss_class, type) and issubclass(loss_class, PolicyLoss)):
        raise ConfigError(f"trainer.loss.name: {config.name!r} is no subclass of titan_rl.policy.losses.PolicyLoss")
    try:
        return loss_class(**config.kwargs)
    except TypeError as error:
        raise ConfigError(f"trainer.loss.kwargs does not fit {config.name!r}: {error}") from error
