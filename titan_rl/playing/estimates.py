"""What a finite number of rollouts says about a policy: pass@k, means and differences, each with its interval.

- A pass rate of independent prompts (`share`) has Wilson's interval, which holds near 0 and 1 and for few prompts.
- Everything else is a mean over prompts, with a percentile bootstrap that draws whole prompts: the samples of a prompt
  are not independent of each other. It says how the number would vary with other prompts of the same kind.
- Two policies are compared on the prompts that both have: the difference is paired, so that what is hard about a prompt
  drops out.
- Nothing depends on chance but the bootstrap, and that is seeded.

Pure: numpy only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95
_Z = 1.959963984540054  # of the normal distribution, two-sided
RESAMPLES = 10_000
"""Of the bootstrap: its own error in a bound is then about a fiftieth of the interval."""
_AT_ONCE = 1 << 22
"""Numbers that the bootstrap holds at a time."""


class Estimate(NamedTuple):
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Chance that one of k samples passes, without bias, where `passed` of `samples` did.

    1 - C(n - c, k) / C(n, k): the share of all subsets of k samples that hold one that passed. Chen et al. 2021
    (arXiv 2107.03374), equation 1.

    Args:
        k: 1 .. samples.
    """
    if not (0 <= passed <= samples and 1 <= k <= samples):
        raise ValueError(f"pass@{k} of {passed} in {samples}")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def share(passed: int, of: int) -> Estimate:
    """A pass rate with Wilson's score interval (E. B. Wilson 1927)."""
    if not 0 <= passed <= of or not of:
        raise ValueError(f"{passed} of {of}")
    rate = passed / of
    middle = (rate + _Z**2 / (2 * of)) / (1 + _Z**2 / of)
    half = _Z / (1 + _Z**2 / of) * math.sqrt(rate * (1 - rate) / of + _Z**2 / (4 * of**2))
    low = 0.0 if passed == 0 else middle - half  # exact there, which rounding is not
    return Estimate(rate, low, 1.0 if passed == of else middle + half)


def mean(values: Sequence[float], seed: int = 0) -> Estimate:
    """The mean over prompts, with a percentile bootstrap over them."""
    if not values:
        raise ValueError("no values")
    numbers = np.asarray(values, dtype=np.float64)
    draw = np.random.default_rng(seed)
    rows = max(1, _AT_ONCE // len(numbers))
    means: list[np.ndarray] = []
    for first in range(0, RESAMPLES, rows):
        drawn = draw.integers(len(numbers), size=(min(rows, RESAMPLES - first), len(numbers)))
        means.append(numbers[drawn].mean(axis=1))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return Estimate(float(numbers.mean()), float(low), float(high))


def difference(first: Mapping[int, float], second: Mapping[int, float], seed: int = 0) -> Estimate | None:
    """How much more the second policy has than the first, on the prompts of both; None: there are none.

    Args:
        first, second: value by prompt.
    """
    both = sorted(first.keys() & second.keys())
    return mean([second[prompt] - first[prompt] for prompt in both], seed) if both else None
