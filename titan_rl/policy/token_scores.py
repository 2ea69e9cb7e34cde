"""Log-probability and entropy of tokens from logits: float32 inside, and never a second float32 copy of all logits.

Rows are worked through in chunks, in the backward pass again, so memory beyond the logits and their gradient is one
chunk. Logits may be split over the vocabulary (tensor parallelism): the forward pass then exchanges three numbers
per row, the backward pass nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = 16 << 20
"""Logits converted to float32 at once (64 MiB); larger chunks cost memory, smaller ones kernel launches."""


def token_scores(
    logits: Tensor, targets: Tensor, *, temperature: float, vocab_start: int = 0, group: dist.ProcessGroup | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of `targets` and entropy under softmax(logits / temperature).

    Args:
        logits: [N, V] or this rank's part of the vocabulary, from token id `vocab_start` on; any float dtype, which
            gradients come back in.
        targets: [N] int64 token ids of the whole vocabulary.
        temperature: > 0, what the engine sampled with (vLLM's `processed_logprobs`).
        group: the ranks that hold the other parts, None when `logits` is whole. All of them must call with the
            same rows and use the results alike.

    Returns:
        logprobs [N] and entropies [N] (nats), float32.
    """
    logprobs, entropies = _TokenScores.apply(logits, targets, temperature, vocab_start, group)
    return logprobs, entropies


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, vocab_start: int, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        rows, columns = logits.shape
        local = targets - vocab_start
        owned = (local >= 0) & (local < columns)
        local = local.clamp(0, columns - 1)
        logprobs, entropies, log_norms = (logits.new_empty(rows, dtype=torch.float32) for _ in range(3))
        for part in _chunks(rows, columns):
            scaled = logits[part].float() / temperature
            peak = scaled.amax(-1)
            if group is not None:
                dist.all_reduce(peak, dist.ReduceOp.MAX, group)
            scaled -= peak[:, None]
            target = torch.where(owned[part], scaled.gather(1, local[part, None])[:, 0], 0.0)
            weights = scaled.exp()
            sums = torch.stack([weights.sum(-1), weights.mul_(scaled).sum(-1), target])
            if group is not None:
                dist.all_reduce(sums, dist.ReduceOp.SUM, group)
            norm, weighted, target = sums
            log_norm = norm.log()
            logprobs[part] = target - log_norm
            # Relative to the peak both terms are small for a sure policy; absolute logits would cancel.
            entropies[part] = log_norm - weighted / norm
            log_norms[part] = peak + log_norm
        ctx.save_for_backward(logits, local, owned, entropies, log_norms)
        ctx.temperature = temperature
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropies = grads
        logits, local, owned, entropies, log_norms = ctx.saved_tensors
        grad = torch.empty_like(logits)
        for part in _chunks(*logits.shape):
            logprobs = logits[part].float() / ctx.temperature - log_norms[part, None]
            # d logprob(t)/dz_j = [j = t] - p_j and d entropy/dz_j = -p_j (log p_j + entropy).
            pull = grad_entropies[part, None] * (logprobs + entropies[part, None]) + grad_logprobs[part, None]
            piece = logprobs.exp_().mul_(pull).neg_()
            piece.scatter_add_(1, local[part, None], torch.where(owned[part], grad_logprobs[part], 0.0)[:, None])
            grad[part] = piece / ctx.temperature
        return grad, None, None, None, None


def _chunks(rows: int, columns: int) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS // max(1, columns))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
