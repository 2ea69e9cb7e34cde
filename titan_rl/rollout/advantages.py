"""Advantages within a group of rollouts of one prompt. Pure.

The caller leaves out rollouts with an error: only graded rollouts take part.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def group_advantages(rewards: Sequence[float], epsilon: float = 1e-4) -> np.ndarray:
    """Outcome advantages of GRPO: how much better a rollout did than its siblings, in deviations.

    `A_i = (r_i - mean(r)) / (std(r) + epsilon)`, DeepSeekMath (arXiv 2402.03300), section 4.1.2, with the unbiased
    deviation (n - 1). A group of equal rewards, or of one rollout, gets zeros.

    Args:
        rewards: [n] up to `rubric.LARGEST_REWARD`, so that their squares are finite.
        epsilon: keeps groups of nearly equal rewards from exploding.

    Returns:
        [n] float64.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if len(values) < 2 or bool((values == values[0]).all()):
        # a special case, because the formula would divide the rounding error of the mean by epsilon
        return np.zeros(len(values))
    spread = values.std(ddof=1) + epsilon
    if not spread:  # epsilon is 0 and the squared differences underflow
        return np.zeros(len(values))
    return (values - values.mean()) / spread
