"""Operations of a deterministic engine on CPU that give a row the same bits whatever rows stand beside it.

The engine computes with the products; a trainer that must come to the engine's very logprobs computes with all of them
(`policy/models/bitwise.py`). Nothing of vLLM is imported before `load_kernels`, and then its kernels only.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

TILE = 16
"""Rows from which on float32 products give every row alike, and rows of each bfloat16 product."""

BLOCK = 32
"""Tokens per block of keys and values. The kernel's results do not depend on it."""


def load_kernels() -> None:
    """Those of this CPU, as an engine does: `norm` in float32, `rotate` and `attend` need them."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    torch.cpu._init_amx()  # the kernel of attention uses it without asking for leave


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` with every row computed alike, whatever rows stand beside it."""
    rows = x.shape[0]
    if x.dtype == torch.float32:
        return linear(x, weight, bias) if rows >= TILE else linear(_padded(x, TILE), weight, bias)[:rows]
    if rows <= TILE:
        return linear(_padded(x, TILE), weight, bias)[:rows]
    tiles = _padded(x, rows + -rows % TILE).split(TILE)
    return torch.cat([linear(tile, weight, bias) for tile in tiles])[:rows]


def halved_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`row_linear` as two tensor-parallel ranks compute it: each its half of the inner dimension, then one sum."""
    half = x.shape[-1] // 2
    return row_linear(x[:, :half], weight[:, :half], bias) + row_linear(x[:, half:], weight[:, half:], None)


def _padded(x: Tensor, rows: int) -> Tensor:
    return x if x.shape[0] == rows else pad(x, (0, 0, 0, rows - x.shape[0]))


def norm(eps: float, weight: Tensor, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """RMS norm of x, or of x + residual, which is not rounded before."""
    if x.dtype != torch.float32:
        total = x.float() if residual is None else x.float() + residual.float()
        normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
        return normed.to(weight.dtype) * weight
    out = x.clone(memory_format=torch.contiguous_format)
    if residual is None:
        torch.ops._C.rms_norm.default(out, x.contiguous(), weight, eps)
    else:
        torch.ops._C.fused_add_rms_norm.default(out, residual.clone(), weight, eps)
    return out


def rotate(query: Tensor, key: Tensor, positions: Tensor, cosines: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding of [T, heads, size] by halves. `cosines`: [positions, size], half of them sines."""
    rotated = tuple(each.clone(memory_format=torch.contiguous_format).flatten(1) for each in (query, key))
    torch.ops._C.rotary_embedding(positions, *rotated, query.shape[-1], cosines, True)
    return rotated[0].view_as(query), rotated[1].view_as(key)


class Places(NamedTuple):
    """Where keys lie in a cache of blocks, and what each query sees of it."""

    blocks: int
    slots: Tensor  # [K] int64
    seen: Tensor  # [T] int32, keys of each query
    table: Tensor  # [T, most] int32, the blocks that they lie in


@lru_cache(maxsize=1)
def places(runs: Sequence[tuple[int, int, int]]) -> Places:
    """`runs`: neighbours of one shape, so many segments of so many tokens, each after so many shared ones. The keys of
    each segment in turn: its shared tokens, and its own."""
    segments = torch.tensor([run[1:] for run in runs]).repeat_interleave(torch.tensor([run[0] for run in runs]), 0)
    lengths, shared = segments.T
    keys = lengths + shared
    blocks = (keys + BLOCK - 1) // BLOCK
    firsts = blocks.cumsum(0) - blocks
    table = firsts.repeat_interleave(lengths)[:, None] + torch.arange(int(blocks.max()))
    return Places(
        blocks=int(blocks.sum()),
        slots=firsts.repeat_interleave(keys) * BLOCK + _numbered(keys),
        seen=(shared.repeat_interleave(lengths) + _numbered(lengths) + 1).int(),
        table=table.clamp(max=int(blocks.sum()) - 1).int(),
    )


def _numbered(counts: Tensor) -> Tensor:
    """0, 1, … for each count in turn."""
    return torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)


def attend(query: Tensor, key: Tensor, value: Tensor, where: Places, scale: float) -> Tensor:
    """Attention of [T, heads, size] to keys and values [K, kv heads, size]: each query as a request of one token."""
    (count, heads, size), kv_heads = query.shape, key.shape[1]
    cache = torch.zeros(where.blocks, kv_heads, 2 * BLOCK, size, dtype=query.dtype)
    keys, values = cache.chunk(2, dim=2)
    isa, kind = attention_isa(query.dtype, size), "auto"
    torch.ops._C.cpu_attn_reshape_and_cache(key, value, keys, values, where.slots, isa, 1.0, 1.0, kind)
    starts, output = torch.arange(count + 1, dtype=torch.int32), torch.empty_like(query)
    shape = (count, heads, kv_heads, size, where.seen, query.dtype, starts, True, -1, isa, False, None, kind)
    metadata = torch.ops._C.get_scheduler_metadata(*shape)
    seen = (starts, where.seen, scale, True, None, -1, where.table, 0.0, metadata, None, None, 1.0, 1.0, kind)
    torch.ops._C.cpu_attention_with_kv_cache(query, keys, values, output, *seen)
    return output


def attention_isa(dtype: torch.dtype, size: int) -> str:
    """The instructions that an engine's attention kernel is told to use."""
    if size % BLOCK:
        return "vec16"
    return "amx" if dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported() else "vec"
