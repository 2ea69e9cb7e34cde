"""On-policy distillation: the policy's own answers, corrected token by token by a frozen teacher. (arXiv:2306.13649)

When     a better policy over the same tokens exists, and the reward says too little or nothing.
Is       KL(pi || teacher) at the tokens that pi sampled, which is the term of `trainer.kl` with estimator "k2": its
         gradient is x grad log pi with x = log pi - log teacher. Rewards get no credit: every advantage is 0.
Is not   distillation on the teacher's answers, which `trainer.warmup` does with demonstrations.
Differs  the paper's eq. 5 sums the divergence over the vocabulary, here it is estimated at the sampled token; only
         reverse KL (its beta is 1), only the policy's own answers (its lambda is 1). With another advantage function
         the term is added to its gradient.
Run      --rollout.advantage.name distillation
         --trainer.kl.teacher DIR --trainer.kl.coefficient 1 --trainer.kl.estimator k2
"""

from collections.abc import Sequence

from titan_rl.policy.algorithms.base import Credit, GradedRollout


def advantages(group: Sequence[GradedRollout]) -> Sequence[Credit]:
    return [0.0] * len(group)
