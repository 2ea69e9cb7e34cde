"""Where vLLM's CPU backend must be adapted, so that it starts beside other libraries, several engines share a host, and
new weights reach every linear layer.

Applied explicitly, before an engine is built in this process; importing this module changes nothing. A test per
adaptation fails when vLLM no longer needs it.

- **Search for kernels.** While the CPU worker is built, vLLM looks through the globals of every imported module and
  fails at objects of other libraries (llvmlite's, under numba). All kernels that it looks for are in its own modules.
- **Names of shared memory.** All tensor-parallel groups of a host would open segments of one fixed name, so a second
  generator, or the segments of a crashed one, break the start. A name per process makes vLLM use gloo instead.
- **Norms.** vLLM uses its kernel for RMS norms on other devices only: each norm would take six operations of torch, a
  fifth of a small policy's step. Engines in float32 use it. It computes every row alike, in deterministic mode too.
- **Linear layers.** vLLM packs their weights after loading and drops the originals, and nobody can read or write what
  it has packed: later weights would not reach it (with tied embeddings without any error). Here "plain" computes
  `F.linear` on the live weight; "packed" computes with the same oneDNN products on memory that is known (`packed.py`);
  "deterministic" is described below.

With `deterministic = true` a request's tokens and logprobs are functions of the request and the weights alone
(`GeneratorConfig`). Attention, norms, rotary embedding and sampling of one row never look at another row; three things
would:

- **Products of few rows.** `F.linear` picks its kernel by the number of rows, and kernels add in different orders.
  float32: at least `TILE` rows, padded with zeros; from there on rows are alike. bfloat16: tiles of exactly `TILE`
  rows. `check_rows` tries both with the weights at hand, so a CPU on which this is not enough is refused.
- **Sums over ranks.** Two ranks add two rounded products of half the inner dimension each (gloo's sum of two is the
  one rounded addition). One rank therefore computes the same two products and adds them. More ranks add in an order
  that depends on where in the batch a row stands, so they are refused (`generation.config.refuse_more_ranks`).
- **Tiles of attention.** The kernel takes keys in blocks whose length depends on how many queries a request brings, so
  a prompt's token would differ in its last bits from the same token decoded (seen from 260 positions on at head size
  128, 966 at 32). Every query is therefore given to the kernel as a request of one token.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import linear
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator, _CPUSHMDistributed
from vllm.model_executor.layers import utils as vllm_linear
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.triton_utils import dispatcher as vllm_kernels
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

from titan_rl.errors import ConfigError, WeightsError
from titan_rl.generation.config import GeneratorConfig
from titan_rl.generation.vllm.experts import adapt_experts
from titan_rl.generation.vllm.packed import PackedMatrix, packed
from titan_rl.generation.vllm.rows import TILE, halved_linear, row_linear

AUTO, PACKED, PLAIN, DETERMINISTIC = "auto", "packed", "plain", "deterministic"

PACKED_FROM = 192
"""Hidden size from which "auto" is packed; smaller products gain nothing."""

_CHECKED_BATCHES = (1, 2, 3, 5, TILE - 1, TILE, TILE + 1, 3 * TILE, 129)
"""Batch sizes on both sides of where libraries change kernels."""
_CHECKED_ROWS = (0, 1, 4, TILE - 1, TILE, 2 * TILE + 7, 128)
"""Places in a batch whose row is also computed alone: few, for the sake of large vocabularies."""

_stock_rebind_kernels = vllm_kernels._rebind_kernels
_stock_group_name = _CPUSHMDistributed.make_group_name
_stock_build = CPUAttentionMetadataBuilder.build


def adapt(config: GeneratorConfig, model_path: Path) -> Linears:
    """Prepare this process for engines on CPU of this config and checkpoint."""
    vllm_kernels._rebind_kernels = _rebind_own_kernels
    setattr(_CPUSHMDistributed, _stock_group_name.__name__, staticmethod(_group_name_of_process))
    setattr(RMSNorm, RMSNorm.forward_cpu.__name__, kernel_norm)
    setattr(CPUAttentionMetadataBuilder, _stock_build.__name__, _build if config.deterministic else _stock_build)
    adapt_experts()
    return adapt_linear(linear_of(config, model_path))


def _rebind_own_kernels(overrides: list[tuple[Any, Any]]) -> None:
    own = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm"}
    vllm_kernels.sys = cast(Any, SimpleNamespace(modules=own))
    try:
        _stock_rebind_kernels(overrides)
    finally:
        vllm_kernels.sys = sys


def _group_name_of_process(communicator: CpuCommunicator) -> str:
    return f"{_stock_group_name(communicator)}-{os.getpid()}"


def kernel_norm(norm: RMSNorm, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """`RMSNorm.forward`: norm(x), or (norm(x + residual), x + residual) in their memory."""
    residual_fits = residual is None or residual.is_contiguous() and x.is_contiguous()
    if x.dtype != torch.float32 or not residual_fits:
        return norm.forward_native(x, residual)  # the kernel's bfloat16 is rounded otherwise
    if residual is not None:
        torch.ops._C.fused_add_rms_norm.default(x, residual, norm.weight.data, norm.variance_epsilon)
        return x, residual
    out = torch.empty(x.shape, dtype=x.dtype)
    torch.ops._C.rms_norm.default(out, x.contiguous(), norm.weight.data, norm.variance_epsilon)  # it takes no strides
    return out


def linear_of(config: GeneratorConfig, model_path: Path) -> str:
    """`GeneratorConfig.linear` for an engine of this checkpoint, without "auto"; or "deterministic"."""
    if config.deterministic:
        return DETERMINISTIC
    if config.linear != AUTO:
        return config.linear
    hidden_size: int = json.loads((model_path / "config.json").read_text())["hidden_size"]
    return PACKED if hidden_size >= PACKED_FROM else PLAIN


def adapt_linear(name: str) -> Linears:
    """Choose how linear layers of engines built from now on are computed on CPU: by `linear_of`'s name."""
    linears = Linears(name)
    vllm_linear.dispatch_cpu_unquantized_gemm = linears.set_up
    return linears


class Linears:
    """How the linear layers of the engines built since `adapt_linear` compute: a function that gets the live weight at
    every call, or a packed matrix where that is asked for and the CPU can."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _function_of(self, layer: Any) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
        """`(x [M, K], weight [N, K], bias [N] or None) -> [M, N]`."""
        if self._name != DETERMINISTIC:
            return linear
        # only a layer that ranks would sum over is halved
        return halved_linear if isinstance(layer, RowParallelLinear) and layer.tp_size == 1 else row_linear

    def set_up(self, layer: Any, remove_weight: bool) -> None:
        """Called by vLLM after the first load."""
        embeds = type(layer) is VocabParallelEmbedding  # looks up rows; vLLM would pack it too
        matrix = packed(layer.weight.data) if self._name == PACKED and not embeds else None
        layer.cpu_linear = self._function_of(layer) if matrix is None else matrix

    def drop_originals(self, model: torch.nn.Module) -> None:
        """Of packed matrices, which vLLM's loader needs. The embedding keeps a weight that it shares."""
        for _, layer in _linear_layers(model):
            if isinstance(layer.cpu_linear, PackedMatrix):
                layer.weight = torch.nn.Parameter(layer.weight.new_empty(0), requires_grad=False)

    def check(self, model: torch.nn.Module) -> None:
        """Raises WeightsError, which names it, for a layer that computes with memory that is not known."""
        for path, layer in _linear_layers(model):
            if not isinstance(layer.cpu_linear, PackedMatrix) and layer.cpu_linear is not self._function_of(layer):
                raise WeightsError(f"{path} computes with a copy of its weight, which new weights would not reach")


def _linear_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        if hasattr(module, "cpu_linear"):
            yield path, module


def _build(builder: CPUAttentionMetadataBuilder, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
    return _stock_build(builder, common_prefix_len, one_token_each(common), fast_build)


def one_token_each(common: Any) -> Any:
    """The same tokens (in vLLM's `CommonAttentionMetadata`), each as a request of its own that sees the keys up to
    itself."""
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
    """Try, for every shape of product in the model, whether a row comes out the same in batches of all sizes. Raises
    ConfigError where it does not, on this CPU with these libraries."""
    generator = torch.Generator().manual_seed(0)
    tried = set()
    for path, layer in _linear_layers(model):
        compute, weight = layer.cpu_linear, layer.weight
        if (kind := (compute, weight.dtype, weight.shape)) in tried:
            continue
        tried.add(kind)
        x = torch.randn(max(_CHECKED_BATCHES), weight.shape[1], generator=generator).to(weight.dtype)
        alone = {row: compute(x[row : row + 1], weight, None)[0] for row in _CHECKED_ROWS}
        for rows in _CHECKED_BATCHES:
            together = compute(x[:rows], weight, None)
            if any(not torch.equal(together[row], alone[row]) for row in _CHECKED_ROWS if row < rows):
                raise ConfigError(
                    f"deterministic = true cannot be had on this CPU: {path} ({weight.dtype}, "
                    f"{tuple(weight.shape)}) gives a row differently among {rows} rows than alone"
                )
