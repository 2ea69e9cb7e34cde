"""`deterministic = true` on real vLLM engines: what a request gets is a function of the request, bit for bit.

One cell (float32, two engines) takes about 40 s on two free cores. The matrix adds bfloat16, untied embeddings, another
head size, and engines of other shapes.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run_on_ranks
from safetensors.numpy import load_file, save_file
from torch.nn.functional import linear

from titan_rl.errors import ConfigError
from titan_rl.generation.config import GeneratorConfig, check_environment, generator_environment
from titan_rl.policy.config import TinyPolicyConfig
from titan_rl.policy.models.tiny import make_tiny_policy

Answers = dict[str, tuple[list[int], bytes]]
Found = dict[str, dict[str, Answers]]
"""By cell and by way of asking."""

COUNT = 40
LENGTH = 1536
LONGEST = 1400
"""Prompt tokens: past the length from which tiles of keys no longer hold all of them."""
SHARPER = 8.0
"""Factor on the matrices of a fresh policy, whose next-token distribution would be almost uniform otherwise."""
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


def policy(config: TinyPolicyConfig, directory: Path) -> str:
    made = make_tiny_policy(config, directory / "made")
    model = Path(shutil.copytree(made, directory / "sharper"))
    tensors = load_file(model / "model.safetensors")
    sharper = {name: tensor * SHARPER if tensor.ndim == 2 else tensor for name, tensor in tensors.items()}
    save_file(sharper, model / "model.safetensors", metadata={"format": "pt"})
    return str(model)


def run_cells(
    model: str, ranks: int, cells: dict[str, dict[str, Any]], scenario: str = "cells"
) -> list[dict[str, Any]]:
    cells = {name: {**overrides, "tensor_parallel": ranks} for name, overrides in cells.items()}
    return run_on_ranks(
        f"vllm_deterministic_scenario:{scenario}",
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
    model = policy(SMALL["tied"], tmp_path_factory.mktemp("policy"))
    return {"model": model, **run_cells(model, 1, {"orders": {}}, "one_cell")[0]}


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


def test_vllm_still_attends_differently_to_a_prompt_and_to_single_tokens(one: dict[str, Any]) -> None:
    assert one["queries that tiles change"] > 0, "adapt_attention is no longer needed"


# --- the matrix -------------------------------------------------------------------------------------------------------


@pytest.mark.acceptance
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [*SMALL, *OTHERS])
def test_engines_of_all_shapes_give_the_same(shape: str, dtype: str, tmp_path: Path) -> None:
    model = policy((SMALL | OTHERS)[shape], tmp_path)
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
    model = policy(SMALL["tied"], tmp_path)
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
class TestProducts:
    def test_a_row_is_the_same_in_batches_of_every_size(self, one: dict[str, Any], dtype: str) -> None:
        assert one[dtype]["sizes that change rows"] == []

    def test_columns_are_the_same_on_one_rank_and_on_two(self, one: dict[str, Any], dtype: str) -> None:
        assert one[dtype]["split columns"]

    def test_one_rank_adds_the_two_halves_that_two_ranks_would(self, one: dict[str, Any], dtype: str) -> None:
        assert one[dtype]["sum of halves"]

    def test_a_product_is_near_the_true_one(self, one: dict[str, Any], dtype: str) -> None:
        assert one[dtype]["error"] < {"float32": 1e-5, "bfloat16": 2e-2}[dtype]


def test_a_cpu_whose_rows_depend_on_each_other_is_refused_by_name(one: dict[str, Any]) -> None:
    assert one["refused rows"].startswith("deterministic = true cannot be had on this CPU: proj (torch.float32")


def test_tokens_of_several_requests_become_requests_of_one_token(one: dict[str, Any]) -> None:
    expanded = one["expanded"]
    assert expanded["query_start_loc"] == list(range(7))
    assert expanded["seq_lens"] == [5, 6, 7, 3, 1, 2]
    assert expanded["block_table"] == [[1, 2], [1, 2], [1, 2], [3, 4], [5, 6], [5, 6]]


def test_another_linear_function_is_refused_in_deterministic_mode() -> None:
    with pytest.raises(ConfigError, match="not with generator.linear"):
        GeneratorConfig(deterministic=True, linear="torch.nn.functional:linear")


@pytest.mark.parametrize(
    ("device", "variable"), [("cpu", "VLLM_CPU_ATTN_SPLIT_KV=0"), ("cuda", "VLLM_BATCH_INVARIANT=1")]
)
def test_a_deterministic_engine_refuses_a_process_without_its_environment(
    monkeypatch: pytest.MonkeyPatch, device: str, variable: str
) -> None:
    rendezvous = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    for name, value in (generator_environment(device, deterministic=True) | rendezvous).items():
        monkeypatch.setenv(name, value)
    check_environment(device, tensor_parallel=1, deterministic=True)
    monkeypatch.delenv(variable.partition("=")[0])
    check_environment(device, tensor_parallel=1)
    with pytest.raises(ConfigError, match=variable):
        check_environment(device, tensor_parallel=1, deterministic=True)
