"""GSPO-token: GSPO's clip with advantages that may differ from token to token. (arXiv:2507.18071)

When     as GSPO, with credit per turn (`gigpo`, `discounted`).
Is       s_t = sg[s] pi_t / sg[pi_t], eq. 14; min(s_t A_t, clip(s_t, 1 - low, 1 + high) A_t), eq. 13. sg: as a constant.
Is not   another gradient than GSPO's where all tokens of an answer have one advantage.
Differs  an answer is what one sample trains: with an edited history, one branch.
Run      --trainer.loss.name gspo_token
"""

from __future__ import annotations

from titan_rl.bounds import NotNegative, Share
from titan_rl.policy.algorithms.base import Gains, TrainedTokens, bounded_exp, clipped


def loss(tokens: TrainedTokens, *, clip_low: Share = 3e-4, clip_high: NotNegative = 4e-4) -> Gains:
    whole = bounded_exp(tokens.sample_mean(tokens.log_ratio)).detach()
    ratio = whole * (tokens.logprobs - tokens.logprobs.detach()).exp()
    return clipped(ratio, tokens.advantages, clip_low, clip_high)


loss.aggregation = "sample_mean"  # type: ignore[attr-defined]
