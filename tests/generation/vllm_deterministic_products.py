"""What test_vllm_deterministic asks of the functions themselves, in a process that has imported vLLM."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from vllm import _custom_ops as ops
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import cpu_attn

from titan_rl.errors import ConfigError
from titan_rl.generation.vllm.deterministic import (
    check_rows,
    halved_linear,
    one_token_each,
    row_linear,
)

SHAPES = ((64, 64), (96, 192), (256, 64), (64, 512))
"""(N, K)."""
BATCHES = (*range(1, 50), 63, 64, 65, 100, 128, 129, 300)


def products(dtype: torch.dtype) -> dict[str, Any]:
    torch.manual_seed(0)
    sizes: set[int] = set()
    split, halves, error = True, True, 0.0
    for columns, inner in SHAPES:
        x, weight, bias = torch.randn(300, inner), torch.randn(columns, inner), torch.randn(columns)
        x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
        alone = torch.cat([row_linear(row[None], weight, bias) for row in x])
        for size in BATCHES:
            # the last rows, so that a row stands at every place of a batch
            same = torch.equal(row_linear(x[300 - size :], weight, bias), alone[300 - size :])
            sizes |= set() if same else {size}
        middle, half = columns // 2, inner // 2
        parts = [row_linear(x, weight[:middle], bias[:middle]), row_linear(x, weight[middle:], bias[middle:])]
        split &= torch.equal(torch.cat(parts, 1), alone)
        first = row_linear(x[:, :half].contiguous(), weight[:, :half].contiguous(), bias)
        second = row_linear(x[:, half:].contiguous(), weight[:, half:].contiguous(), None)
        halves &= torch.equal(halved_linear(x, weight, bias), first + second)
        true = linear(x.double(), weight.double(), bias.double())
        for found in (alone, halved_linear(x, weight, bias)):
            error = max(error, float((found.double() - true).abs().max() / true.abs().max()))
    return {"sizes that change rows": sorted(sizes), "split columns": split, "sum of halves": halves, "error": error}


def message(action: Any) -> str:
    try:
        action()
    except ConfigError as error:
        return str(error)
    return ""


def expanded() -> dict[str, Any]:
    """Three requests: 3 tokens that end at position 7, one at 3, two from the beginning."""
    starts = torch.tensor([0, 3, 4, 6], dtype=torch.int32)
    made = one_token_each(
        CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor([7, 3, 2], dtype=torch.int32),
            num_reqs=3,
            num_actual_tokens=6,
            max_query_len=3,
            max_seq_len=7,
            block_table_tensor=torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int32),
            slot_mapping=torch.arange(6),
        )
    )
    assert (made.num_reqs, made.max_query_len) == (6, 1)
    return {
        "query_start_loc": made.query_start_loc.tolist(),
        "seq_lens": made.seq_lens.tolist(),
        "block_table": made.block_table_tensor.tolist(),
    }


def queries_that_tiles_change(length: int = 1024, heads: int = 4, size: int = 128, block: int = 32) -> int:
    """Tokens of one prompt for which vLLM's attention kernel gives something else than token by token."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(length, heads, size) for _ in range(3))
    key_cache, value_cache = (torch.zeros(length // block, heads, block, size) for _ in range(2))
    isa = cpu_attn._get_attn_isa(torch.float32, block, size, "auto")
    ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, torch.arange(length), isa)

    def attend(starts: Tensor, seq_lens: Tensor) -> Tensor:
        count = len(seq_lens)
        metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=count,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=size,
            seq_lens=seq_lens,
            dtype=torch.float32,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=isa,
            enable_kv_split=False,
        )
        blocks = torch.arange(length // block, dtype=torch.int32).repeat(count, 1)
        output = torch.empty_like(query)
        ops.cpu_attention_with_kv_cache(
            query, key_cache, value_cache, output, starts, seq_lens, 0.1, True, None, -1, blocks, 0.0, metadata, None
        )
        return output

    whole = attend(torch.tensor([0, length], dtype=torch.int32), torch.tensor([length], dtype=torch.int32))
    one_by_one = attend(torch.arange(length + 1, dtype=torch.int32), torch.arange(1, length + 1, dtype=torch.int32))
    return int((whole != one_by_one).flatten(1).any(1).sum())


def everything() -> dict[str, Any]:
    layer = torch.nn.Linear(192, 64, bias=False)
    layer.cpu_linear = lambda x, weight, bias: linear(x, weight, bias) * len(x)
    return {
        "float32": products(torch.float32),
        "bfloat16": products(torch.bfloat16),
        "refused rows": message(lambda: check_rows(torch.nn.ModuleDict({"proj": layer}))),
        "expanded": expanded(),
        "queries that tiles change": queries_that_tiles_change(),
    }
