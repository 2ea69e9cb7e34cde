"""Log-probability and entropy of tokens from the rows before the head. All rows' logits never exist at once.

Logits are computed in chunks, float32 inside, and again in the backward pass, so memory beyond the head's gradient is a
few copies of one chunk. The head may be split over the vocabulary (tensor parallelism): the forward pass then exchanges
three numbers per row, the backward pass nothing.

Ids outside of a target's support have no probability: they are no part of its norm or entropy, and get no gradient.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from titan_rl.generation.vllm.rows import row_linear
from titan_rl.support import Supports

CHUNK_ELEMENTS = {"cpu": 16 << 20, "cuda": 128 << 20}
"""Logits computed at once, by device (as float32 64 and 512 MiB). Larger chunks cost memory, smaller ones kernel
launches and sums of the head's gradient."""


def token_scores(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    supports: Supports | None = None,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
    as_engine: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of `targets` and entropy under softmax(hidden @ head.T / temperature), over their supports: [N]
    float32 each, in nats.

    Args:
        hidden: [N, D] of the tokens that predict the targets. With `group` its gradient is this rank's summand.
        head: [V, D] or this rank's part of the vocabulary, from token id `vocab_start` on; float dtype as `hidden`.
        targets: [N] int64 token ids of the whole vocabulary.
        temperature: > 0, what the engine sampled with (vLLM's `processed_logprobs`).
        supports: of the N targets, each in its own; None: the whole vocabulary is every target's.
        group: the ranks that hold the other parts, None when `head` is whole. All of them must call with the
            same rows and use the results alike.
        as_engine: compute logprobs by the operations of a deterministic engine on CPU, to the last bit; without
            `group`.
    """
    return _TokenScores.apply(hidden, head, targets, temperature, supports, vocab_start, group, as_engine)


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        targets: Tensor,
        temperature: float,
        supports: Supports | None,
        vocab_start: int,
        group: dist.ProcessGroup | None,
        as_engine: bool,
    ) -> tuple[Tensor, Tensor]:
        local = targets - vocab_start
        owned = (local >= 0) & (local < len(head))
        local = local.clamp(0, len(head) - 1)
        logprobs, entropies, log_norms = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
        for part in _chunks(hidden, head):
            logits = row_linear(hidden[part], head, None) if as_engine else F.linear(hidden[part], head)
            scaled = logits.float().div_(temperature)
            if (impossible := _impossible(supports, part, head, vocab_start)) is not None:
                scaled.masked_fill_(impossible, -torch.inf)
            if as_engine:
                engines = scaled.log_softmax(-1).gather(1, local[part, None])[:, 0]
            peak = scaled.amax(-1)
            if group is not None:
                dist.all_reduce(peak, dist.ReduceOp.MAX, group)
            scaled -= peak[:, None]
            target = torch.where(owned[part], scaled.gather(1, local[part, None])[:, 0], 0.0)
            weights = scaled.exp()
            if impossible is not None:
                scaled.masked_fill_(impossible, 0.0)  # 0 * -inf is NaN
            sums = torch.stack([weights.sum(-1), weights.mul_(scaled).sum(-1), target])
            del scaled, weights  # before the next chunk's are made
            if group is not None:
                dist.all_reduce(sums, dist.ReduceOp.SUM, group)
            norm, weighted, target = sums
            log_norm = norm.log()
            logprobs[part] = engines if as_engine else target - log_norm
            # Relative to the peak both terms are small for a sure policy; absolute logits would cancel.
            entropies[part] = log_norm - weighted / norm
            log_norms[part] = peak + log_norm
        ctx.save_for_backward(hidden, head, local, owned, entropies, log_norms)
        ctx.temperature, ctx.supports, ctx.vocab_start = temperature, supports, vocab_start
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropies = grads
        hidden, head, local, owned, entropies, log_norms = ctx.saved_tensors
        grad_hidden, grad_head = torch.empty_like(hidden), None
        for part in _chunks(hidden, head):
            logprobs = F.linear(hidden[part], head).float().div_(ctx.temperature).sub_(log_norms[part, None])
            # d logprob(t)/dz_j = [j = t] - p_j and d entropy/dz_j = -p_j (log p_j + entropy).
            piece = (logprobs + entropies[part, None]).mul_(grad_entropies[part, None]).add_(grad_logprobs[part, None])
            piece.mul_(logprobs.exp_()).neg_()
            del logprobs
            if (impossible := _impossible(ctx.supports, part, head, ctx.vocab_start)) is not None:
                piece.masked_fill_(impossible, 0.0)
            piece.scatter_add_(1, local[part, None], torch.where(owned[part], grad_logprobs[part], 0.0)[:, None])
            grad = piece.div_(ctx.temperature).to(hidden.dtype)
            del piece
            grad_hidden[part] = grad @ head
            share = grad.T @ hidden[part]
            grad_head = share if grad_head is None else grad_head.float().add_(share)  # summed in float32
            del grad, share
        # Without rows it is 0 and not None: FSDP reduces it on all ranks.
        grad_head = torch.zeros_like(head) if grad_head is None else grad_head.to(head.dtype)
        return grad_hidden, grad_head, None, None, None, None, None, None


def _impossible(supports: Supports | None, part: slice, head: Tensor, vocab_start: int) -> Tensor | None:
    """[rows, len(head)] bool."""
    if supports is None:
        return None
    ids = slice(vocab_start, vocab_start + len(head))
    return torch.from_numpy(supports.impossible(part, ids)).to(head.device)


def _chunks(hidden: Tensor, head: Tensor) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS[hidden.device.type] // max(1, len(head)))
    return [slice(start, min(start + size, len(hidden))) for start in range(0, len(hidden), size)]
