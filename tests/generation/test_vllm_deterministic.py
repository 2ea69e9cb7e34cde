"""`deterministic = true` on real vLLM engines: what a request gets is a function of the request, bit for bit.

One cell (float32, two engines) takes about 25 s on two free cores. The matrix adds bfloat16, untied embeddings, another
head size, and engines of other shapes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loop_harness import sharper_policy
from rank_processes import run_on_ranks
from torch import Tensor
from torch.nn.functional import linear
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import cpu_attn

from titan_rl.errors import ConfigError
from titan_rl.generation.vllm.adaptation import check_rows, one_token_each
from titan_rl.generation.vllm.rows import halved_linear, row_linear
from titan_rl.policy.config import TinyPolicyConfig

Answers = dict[str, tuple[list[int], bytes]]
Found = dict[str, dict[str, Answers]]
"""By cell and by way of asking."""

COUNT = 24
LENGTH = 1536
LONGEST = 1400
"""Prompt tokens: past the length from which tiles of keys no longer hold all of them."""
WAYS = ["together", "again, from its cache", "backwards", "trickling", "preempted"]

SMALL = {"tied": TinyPolicyConfig(max_length=LENGTH, seed=0)}
OTHERS = {
    "untied": TinyPolicyConfig(max_length=LENGTH, seed=1, tied_embeddings=False),
    "wide heads": TinyPolicyConfig(max_length=LENGTH, seed=2, head_dim=128, dim=96, heads=2, ffn=320),
}
SHAPES: dict[str, dict[str, Any]] = {
    "max_num_seqs 4": {"max_num_seqs": 4},
    "no prefix cache": {"prefix_caching": False},
    "small steps": {"max_num_batched_tokens": LENGTH},
    "large blocks": {"block_size": 128},
}


def run_cells(model: str, ranks: int, cells: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    cells = {name: {**overrides, "tensor_parallel": ranks} for name, overrides in cells.items()}
    return run_on_ranks(
        "vllm_deterministic_scenario:cells",
        ranks,
        deterministic=True,
        model=model,
        cells=cells,
        longest=LONGEST,
        count=COUNT,
    )


def different(found: Answers, expected: Answers) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name in expected if found[name] != expected[name]]


# --- one cell: float32, TP 1 in every order, TP 2 ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = sharper_policy(SMALL["tied"], tmp_path_factory.mktemp("policy") / "sharper")
    return {"model": model, **run_cells(model, 1, {"orders": {}})[0]}


@pytest.fixture(scope="module")
def two(one: dict[str, Any]) -> list[dict[str, Any]]:
    return run_cells(one["model"], 2, {"two": {}})


@pytest.mark.parametrize("way", WAYS)
def test_a_request_gets_the_same_alone_and_however_it_meets_others(one: dict[str, Any], way: str) -> None:
    assert different(one["orders"][way], one["orders"]["alone"]) == []


def test_the_requests_differ_enough_for_a_comparison(one: dict[str, Any]) -> None:
    alone: Answers = one["orders"]["alone"]
    assert len(alone) == COUNT
    assert len({tuple(tokens) for tokens, _ in alone.values()}) > COUNT * 0.9


def test_a_request_resumed_with_its_own_tokens_goes_on_as_if_it_had_never_stopped(one: dict[str, Any]) -> None:
    parts, alone = one["orders"]["in two parts"], one["orders"]["alone"]
    assert len(parts) > COUNT / 2
    assert different(parts, {name: alone[name] for name in parts}) == []


def test_two_ranks_give_what_one_gives(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    for rank in two:
        assert different(rank["two"]["together"], one["orders"]["alone"]) == []
        assert different(rank["two"]["again, from its cache"], one["orders"]["alone"]) == []


# --- the matrix -------------------------------------------------------------------------------------------------------


@pytest.mark.acceptance
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [*SMALL, *OTHERS])
def test_engines_of_all_shapes_give_the_same(shape: str, dtype: str, tmp_path: Path) -> None:
    model = sharper_policy((SMALL | OTHERS)[shape], tmp_path / "sharper")
    cells = {name: {**overrides, "dtype": dtype} for name, overrides in SHAPES.items()}
    found = run_cells(model, 1, {"orders": {"dtype": dtype}, **cells})[0]
    ranks = run_cells(model, 2, {"orders at TP 2": {"dtype": dtype}, "max_num_seqs 4 at TP 2": cells["max_num_seqs 4"]})
    alone: Answers = found["orders"]["alone"]
    wrong = [
        (cell, way)
        for result in (found, *ranks)
        for cell, ways in result.items()
        for way, answers in ways.items()
        if different(answers, {name: alone[name] for name in answers} if way == "in two parts" else alone)
    ]
    assert wrong == []


@pytest.mark.acceptance
def test_plain_engines_give_a_request_something_else_in_a_batch(tmp_path: Path) -> None:
    model = sharper_policy(SMALL["tied"], tmp_path / "sharper")
    found = run_cells(model, 1, {"orders": {"deterministic": False}})[0]["orders"]
    assert different(found["together"], found["alone"]), "deterministic mode is no longer needed in float32"


# --- what it is built on ----------------------------------------------------------------------------------------------


def test_torch_still_multiplies_few_rows_in_another_order() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(40, 192), torch.randn(64, 192)
    whole = linear(x, weight)
    sizes = [size for size in range(1, 40) if not torch.equal(linear(x[:size], weight), whole[:size])]
    assert sizes, "row_linear needs no padding in float32 any more"
    assert max(sizes) < 16, "rows are not alike from 16 on: the padding of row_linear is too small"


@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-5), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("product", [row_linear, halved_linear])
def test_a_product_is_near_the_true_one_and_each_row_is_as_it_is_alone(product: Any, dtype: str, error: float) -> None:
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    x, weight, bias = torch.randn(100, 192).to(kind), torch.randn(96, 192).to(kind), torch.randn(96).to(kind)
    found, true = product(x, weight, bias), linear(x.double(), weight.double(), bias.double())
    assert float((found.double() - true).abs().max() / true.abs().max()) < error
    assert torch.equal(found, torch.cat([product(row[None], weight, bias) for row in x]))


def test_a_cpu_whose_rows_depend_on_each_other_is_refused_by_name() -> None:
    layer: Any = torch.nn.Linear(192, 64, bias=False).requires_grad_(False)
    layer.cpu_linear = lambda x, weight, bias: linear(x, weight, bias) * len(x)
    with pytest.raises(ConfigError, match=r"deterministic = true cannot be had on this CPU: proj \(torch.float32"):
        check_rows(torch.nn.ModuleDict({"proj": layer}))


def test_tokens_of_several_requests_become_requests_of_one_token() -> None:
    """Three requests: 3 tokens that end at position 7, one at 3, two from the beginning."""
    starts = torch.tensor([0, 3, 4, 6], dtype=torch.int32)
    each = one_token_each(
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
    assert (each.num_reqs, each.max_query_len, each.query_start_loc.tolist()) == (6, 1, list(range(7)))
    assert each.seq_lens.tolist() == [5, 6, 7, 3, 1, 2]
    assert each.block_table_tensor.tolist() == [[1, 2], [1, 2], [1, 2], [3, 4], [5, 6], [5, 6]]


def test_vllm_still_attends_differently_to_a_prompt_and_to_single_tokens() -> None:
    current_platform.import_kernels()
    assert queries_that_tiles_change() > 0, "one_token_each is no longer needed"


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
