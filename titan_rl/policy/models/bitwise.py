"""A model on CPU that computes every logprob as a deterministic engine does, to the last bit: `trainer.parity`.

Forward, each operation is the engine's own (`generation.vllm.rows`), on the weights that the engine is sent, so that
both come to the same bits whatever else is packed or batched beside a token. Backward, it is the ordinary formula: its
gradient is taken at the same inputs, and rounds otherwise than the values do.

An engine adds what a layer made to the residual stream within the next norm, which in bfloat16 does not see that sum
rounded. Layers here therefore hand on both summands.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.models.common import CosSinRoPE, Linear
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.models.common.decoder import TransformerBlock
from torchtitan.models.common.nn_modules import RMSNorm

from titan_rl.generation.vllm import rows
from titan_rl.policy.config import LoraConfig, TrainerConfig
from titan_rl.weights.adapters import effective

_Stream = Tensor | tuple[Tensor, Tensor]
"""Rows between layers, or the two summands of them."""


def make_bitwise(model: Any, config: TrainerConfig) -> None:
    """Have a built model compute as engines of its dtype do."""
    rows.load_kernels()
    for name, module in model.named_modules():
        stock = module.forward
        if isinstance(module, TransformerBlock):
            module.forward = partial(_block, module)
        elif isinstance(module, RMSNorm):
            module.forward = partial(_norm, module)
        elif isinstance(module, CosSinRoPE):
            module.forward = partial(_rotary, stock, _cosines(module).to(getattr(torch, config.dtype)))
        elif isinstance(module, VarlenAttention):
            module.forward = partial(_attention, stock)
        elif isinstance(module, Linear) and module is not model.lm_head and module.bias is None:
            # engines halve the layers that tensor-parallel ranks would sum over
            product = rows.halved_linear if name.endswith((".wo", ".w2")) else rows.row_linear
            module.forward = partial(_linear, module, product, config.lora)
    model.lm_head.as_engine = True


class _Agreed(torch.autograd.Function):
    """What `engine` makes of the inputs, with the gradient of `ordinary`, which the backward pass computes again."""

    @staticmethod
    def forward(ctx: Any, engine: Callable[..., Any], ordinary: Callable[..., Any], *inputs: Tensor) -> Any:
        ctx.save_for_backward(*inputs)
        ctx.ordinary = ordinary
        return engine(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            inputs = [each.detach().requires_grad_() for each in ctx.saved_tensors]
            outputs = ctx.ordinary(*inputs)
        return None, None, *torch.autograd.grad(outputs, inputs, grads)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: Callable[..., Tensor], x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        return None, grad @ weight, grad.T @ x


def _block(block: Any, stream: _Stream, attention_masks: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    normed = block.attention_norm(stream)
    residual = stream[0] + stream[1] if isinstance(stream, tuple) else stream
    attended = block.attention(normed, attention_masks, positions)
    return block.feed_forward(block.ffn_norm((attended, residual))), attended + residual


def _norm(module: Any, stream: _Stream) -> Tensor:
    def ordinary(weight: Tensor, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return F.rms_norm(x if residual is None else x + residual, weight.shape, weight, module.eps)

    summands = stream if isinstance(stream, tuple) else (stream,)
    normed: Tensor = _Agreed.apply(partial(rows.norm, module.eps), ordinary, module.weight, *summands)
    return normed


def _cosines(rope: Any) -> Tensor:
    """[positions, size], half of them sines. Of Llama 3.1's frequencies torchtitan's differ in their last bits."""
    of = rope.config
    if of.scaling != "llama":
        return torch.cat([part[:, : part.shape[1] // 2] for part in rope.cache.chunk(2, dim=-1)], -1)
    kept = 1.0 / (of.theta ** (torch.arange(0, of.dim, 2).float() / of.dim))
    lengths, positions = 2 * math.pi / kept, of.original_max_position_embeddings
    smooth = (positions / lengths - of.low_freq_factor) / (of.high_freq_factor - of.low_freq_factor)
    mixed = (1 - smooth) * kept / of.scaling_factor + smooth * kept
    mixed = torch.where(lengths > positions / of.low_freq_factor, kept / of.scaling_factor, mixed)
    frequencies = torch.where(lengths < positions / of.high_freq_factor, kept, mixed)
    angles = torch.outer(torch.arange(of.max_seq_len).float(), frequencies)
    return torch.cat([angles.cos(), angles.sin()], -1)


def _rotary(
    stock: Callable[..., Any], cache: Tensor, query: Tensor, key: Tensor, positions: Tensor
) -> tuple[Tensor, ...]:
    def engine(query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
        return tuple(each[None] for each in rows.rotate(query[0], key[0], positions[0], cache))

    rotated: tuple[Tensor, ...] = _Agreed.apply(engine, partial(stock, positions=positions), query, key)
    return rotated


def _attention(
    stock: Callable[..., Any], *inputs: Tensor, attention_masks: Any, scale: float, **options: Any
) -> Tensor:
    def engine(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = key[0], value[0]
        if attention_masks.key_rows is not None:
            key, value = (each.index_select(0, attention_masks.key_rows) for each in (key, value))
        where = rows.places(tuple(run for run, _ in attention_masks.runs))
        return rows.attend(query[0].contiguous(), key, value, where, scale)[None]

    ordinary = partial(stock, attention_masks=attention_masks, scale=scale, **options)
    attended: Tensor = _Agreed.apply(engine, ordinary, *inputs)
    return attended


def _linear(module: Any, product: Callable[..., Tensor], lora: LoraConfig, x: Tensor) -> Tensor:
    weight = module.weight
    if hasattr(module, "lora_a"):  # engines compute with what the adapters make of it
        scaled = module.lora_a.weight, lora.scale * module.lora_b.weight
        weight = _Agreed.apply(partial(effective, weight.dtype), lambda base, a, b: base + b @ a, weight, *scaled)
    made: Tensor = _Product.apply(product, x.flatten(0, -2), weight)
    return made.view(*x.shape[:-1], -1)
