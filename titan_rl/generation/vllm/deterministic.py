"""What vLLM computes on CPU, in a form in which a request's tokens and logprobs are functions of the request alone.

With every adaptation of this module in place they do not depend, bit for bit, on the other requests of a batch, on
their order or number, on the prefix cache, on preemption, or on one against two tensor-parallel ranks. Attention,
norms, rotary embedding and sampling of one row never look at another row; three things would:

- **Products of few rows.** `F.linear` picks its kernel by the number of rows, and kernels add in different orders.
  float32: at least `TILE` rows, padded with zeros; from there on rows are alike. bfloat16: tiles of exactly `TILE`
  rows. `check_rows` tries both with the weights at hand, so a CPU on which this is not enough is refused.
- **Sums over ranks.** Two ranks add two rounded products of half the inner dimension each (gloo's sum of two is the
  one rounded addition). One rank therefore computes the same two products and adds them. More ranks add in an order
  that depends on where in the batch a row stands, so they are refused (`generation.config.refuse_more_ranks`).
- **Tiles of attention.** The kernel takes keys in blocks whose length depends on how many queries a request brings, so
  a prompt's token would differ in its last bits from the same token decoded (seen from 260 positions on at head size
  128, 966 at 32). Every query is therefore given to the kernel as a request of one token.

Also needed: `VLLM_CPU_ATTN_SPLIT_KV=0` (see `generation.config.generator_environment`). It keeps the split of long
contexts over threads from depending on the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata, CPUAttentionMetadataBuilder

from titan_rl.errors import ConfigError

TILE = 16
"""Rows from which on float32 products give every row alike, and rows of each bfloat16 product."""

_CHECKED_BATCHES = (1, 2, 3, 5, TILE - 1, TILE, TILE + 1, 3 * TILE, 129)
"""Batch sizes on both sides of where libraries change kernels."""
_CHECKED_ROWS = (0, 1, 4, TILE - 1, TILE, 2 * TILE + 7, 128)
"""Places in a batch whose row is also computed alone: few, for the sake of large vocabularies."""

_stock_build = CPUAttentionMetadataBuilder.build


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` with every row computed alike, whatever rows stand beside it.

    Args:
        x: [M, K].
        weight: [N, K].
        bias: [N] or None.

    Returns:
        [M, N].
    """
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


def linear_of(layer: torch.nn.Module) -> Any:
    """The function that `layer` is computed with: only a layer that ranks would sum over is halved."""
    return halved_linear if isinstance(layer, RowParallelLinear) and layer.tp_size == 1 else row_linear


def adapt_attention(deterministic: bool) -> None:
    """Let engines built from now on attend token by token, or as vLLM does."""
    if not deterministic:
        setattr(CPUAttentionMetadataBuilder, _stock_build.__name__, _stock_build)
        return

    def build(
        builder: CPUAttentionMetadataBuilder, common_prefix_len: int, common: Any, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        return _stock_build(builder, common_prefix_len, one_token_each(common), fast_build)

    setattr(CPUAttentionMetadataBuilder, _stock_build.__name__, build)


def one_token_each(common: Any) -> Any:
    """The same tokens, each as a request of its own that sees the keys up to itself.

    Args:
        common: vLLM's `CommonAttentionMetadata` of decoder attention.
    """
    if common.max_query_len == 1:
        return common
    tokens = common.num_actual_tokens
    starts = common.query_start_loc
    owners = torch.repeat_interleave(torch.arange(common.num_reqs), starts.diff(), output_size=tokens)
    later = starts[owners + 1] - 1 - torch.arange(tokens, dtype=starts.dtype)
    seq_lens = common.seq_lens[owners] - later
    each = torch.arange(tokens + 1, dtype=starts.dtype)
    return dataclasses.replace(
        common,
        query_start_loc=each,
        query_start_loc_cpu=each,
        seq_lens=seq_lens.to(common.seq_lens.dtype),
        num_reqs=tokens,
        max_query_len=1,
        block_table_tensor=common.block_table_tensor[owners],
    )


def check_rows(model: torch.nn.Module) -> None:
    """Try, for every shape of product in the model, whether a row comes out the same in batches of all sizes.

    Raises:
        ConfigError: it does not, on this CPU with these libraries.
    """
    generator = torch.Generator().manual_seed(0)
    for path, layer in _one_of_each_shape(model):
        compute, weight = layer.cpu_linear, layer.weight
        x = torch.randn(max(_CHECKED_BATCHES), weight.shape[1], generator=generator).to(weight.dtype)
        alone = {row: compute(x[row : row + 1], weight, None)[0] for row in _CHECKED_ROWS}
        for rows in _CHECKED_BATCHES:
            together = compute(x[:rows], weight, None)
            if any(not torch.equal(together[row], alone[row]) for row in _CHECKED_ROWS if row < rows):
                raise ConfigError(
                    f"deterministic = true cannot be had on this CPU: {path} ({weight.dtype}, "
                    f"{tuple(weight.shape)}) gives a row differently among {rows} rows than alone"
                )


def _one_of_each_shape(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    seen = set()
    for path, layer in model.named_modules():
        compute = getattr(layer, "cpu_linear", None)
        if compute is not None and (key := (compute, layer.weight.dtype, layer.weight.shape)) not in seen:
            seen.add(key)
            yield path, layer


def _padded(x: Tensor, rows: int) -> Tensor:
    return x if x.shape[0] == rows else pad(x, (0, 0, 0, rows - x.shape[0]))
