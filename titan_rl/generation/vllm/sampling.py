"""Sampling noise: a function of (request seed, position, token id), computed for all rows of a batch at once.

vLLM keeps one random generator per seeded request, whose state depends on where the request was sampled so far. Here
nothing is kept. The noise of a token is hashed from the request's seed, the token's position in the sequence (prompt
included) and its id. A completion that goes on elsewhere, with its tokens as part of the prompt, therefore meets the
noise that it would have met. A row never looks at another row.

The noise is Gumbel noise and the token is the argmax of logits plus noise (the Gumbel-max trick), which is exact
sampling from the softmax. Greedy rows need none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""splitmix64's constants."""


class SeededSampling:
    """Takes the place of vLLM's sampler of random rows in one model runner."""

    def __init__(self, runner: Any) -> None:
        """
        Args:
            runner: vLLM's model runner of this rank, after its warm-up. Its requests carry no seed of vLLM's.
        """
        self._batch = runner.input_batch
        self.seeds: dict[str, int] = {}
        """By request id; every request that is sampled must have one."""
        runner.sampler.topk_topp_sampler.forward = self._forward

    def _forward(
        self, logits: Tensor, generators: dict[int, Any], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See vLLM's `TopKTopPSampler`. logits [N, V] float32, one row per request of the batch."""
        rows = logits.shape[0]
        seeds = np.fromiter((self.seeds[each] for each in self._batch.req_ids[:rows]), np.int64, rows)
        logits = apply_top_k_top_p(logits, k, p)
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        keys = torch.from_numpy(noise_keys(seeds, self._batch.num_tokens_no_spec[:rows])).to(logits.device)
        return sample(logits, keys), logprobs


def noise_keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One key per row, well mixed.

    Args:
        seeds: [N] int64.
        positions: [N] integers.

    Returns:
        [N] int64.
    """
    mixed = seeds.astype(np.uint64) + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_FIRST)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SECOND)
    return (mixed ^ (mixed >> np.uint64(31))).view(np.int64)


def sample(logits: Tensor, keys: Tensor) -> Tensor:
    """One token per row from softmax(logits), with the noise of the row's key.

    Args:
        logits: [N, V] float32.
        keys: [N] int64, from `noise_keys`.

    Returns:
        [N] int64.
    """
    if logits.device.type == "cpu":
        return torch.ops._C.fused_gumbel_argmax(logits, keys)  # vLLM's: splitmix64 of key and token id
    return (logits - exponential_noise(keys, logits.shape[1]).log_()).argmax(dim=-1)


def exponential_noise(keys: Tensor, size: int) -> Tensor:
    """Exponential noise, hashed from key and column (splitmix64); minus its logarithm is Gumbel noise.

    Returns:
        [N, size] float32, in (0, 37).
    """
    mixed = keys[:, None] + (torch.arange(1, size + 1, device=keys.device) * _signed(GOLDEN))[None, :]
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        mixed ^= (mixed >> shift) & (2 ** (64 - shift) - 1)
        mixed *= _signed(factor)
    mixed ^= (mixed >> 31) & (2**33 - 1)
    # 53 bits, never 0. Small values keep their precision, and those decide: the smallest exponential wins.
    uniform = ((mixed >> 11) & (2**53 - 1) | 1).to(torch.float32).mul_(2.0**-53)
    return uniform.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_()


def _signed(constant: int) -> int:
    return constant - 2**64 if constant >= 2**63 else constant
