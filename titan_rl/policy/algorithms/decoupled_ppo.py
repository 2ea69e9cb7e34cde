"""Decoupled PPO at one optimizer step per batch: importance sampling without the heaviest tokens. (arXiv:2505.24298)

When     samples are old, and a few heavy tokens must not decide a step.
Is       sg[r] A log pi where r <= cap, else 0. sg: as a constant. The decoupled objective (arXiv:2110.00641, section
         3; AReaL's section 5.2) clips around the weights before the batch's first step and weighs tokens by their ratio
         to the behaviour policy: at one step per batch the clip can never act, and has no arguments.
Is not   a bound on how far old samples push; GRPO's clip is.
Differs  tokens above the cap are dropped, not cut to it, as in AReaL's implementation.
Run      --trainer.loss.name decoupled_ppo
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from titan_rl.policy.algorithms.base import Gains, TrainedTokens


def loss(tokens: TrainedTokens, *, weight_cap: Annotated[float, Meta(gt=1)] = 5.0) -> Gains:
    weight = tokens.weight
    dropped = weight > weight_cap
    return weight.masked_fill(dropped, 0.0) * tokens.advantages * tokens.logprobs, dropped
