"""Decoupled PPO: one policy corrects for the age of samples, another one bounds the step. (arXiv:2110.00641)

When     samples are old, and a batch is trained in several optimizer steps.
Is       sg[pi_prox / pi_behav] min(u A, clip(u, 1 - low, 1 + high) A) with u = pi / pi_prox, and 0 where the weight is
         above the cap. pi_behav sampled the token, pi_prox are the weights before the batch's first optimizer step,
         computed once over the whole batch. sg: as a constant. The paper's L^CLIP_decoupled, section 3; the same as
         AReaL's (arXiv:2505.24298, section 5.2).
Is not   a bound on how far old samples push: the cap is, and GRPO's clip. At one optimizer step per batch u is 1: the
         clip never acts, and what is left is importance sampling without the heaviest tokens.
Differs  pi_prox is the last published policy, not a moving average of policies as in the first paper; tokens above the
         cap are dropped, not cut to it, as in AReaL's implementation.
Run      --trainer.loss.name decoupled_ppo --trainer.minibatches 4
"""

from titan_rl.bounds import MoreThanOne, NotNegative, Share
from titan_rl.policy.algorithms.base import Gains, TrainedTokens, clipped, probability_ratio


def loss(
    tokens: TrainedTokens, *, clip_low: Share = 0.2, clip_high: NotNegative = 0.2, weight_cap: MoreThanOne = 5.0
) -> Gains:
    weight = probability_ratio(tokens.proximal, tokens.behaviour_logprobs)
    gains, held = clipped(probability_ratio(tokens.logprobs, tokens.proximal), tokens.advantages, clip_low, clip_high)
    dropped = weight > weight_cap
    return weight.masked_fill(dropped, 0.0) * gains, dropped | held
