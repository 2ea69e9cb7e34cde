"""Where vLLM's mixtures of experts must be adapted to CPU.

vLLM packs the experts' weights after loading and drops the originals: later weights would not reach them. Here each
expert's product is taken with the live weight, as linear layers' are (`adaptation.py`). Where the products' rows do not
depend on other rows, neither does the sum: a row adds up its experts in the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

Product = Callable[[Tensor, Tensor, None], Tensor]


def adapt_experts(product: Product, *, halved: bool) -> None:
    """Of engines built from now on. `halved`: one rank computes what each of two would, and adds that up as they do."""

    def compute(
        experts: Any,
        *,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,  # [E, 2F, D], gate and up
        w2: Tensor,  # [E, D, F]
        topk_weights: Tensor,
        topk_ids: Tensor,
        **_: Any,
    ) -> None:
        parts = 2 if halved and experts.moe_config.moe_parallel_config.tp_size == 1 else 1
        sums = [torch.zeros_like(output) for _ in range(parts)]
        for number in topk_ids.unique().tolist():
            rows, which = (topk_ids == number).nonzero(as_tuple=True)
            gate, up = product(hidden_states[rows], w1[number], None).chunk(2, -1)
            share = topk_weights[rows, which, None].to(output.dtype)
            inner = (silu(gate) * up).chunk(parts, -1)
            for total, part, weight in zip(sums, inner, w2[number].chunk(parts, -1), strict=True):
                total.index_add_(0, rows, product(part, weight, None) * share)
        output.copy_(sum(sums[1:], sums[0]))

    stock: Any = CPUUnquantizedExperts
    stock.process_weights_after_loading, stock.apply = lambda experts, layer: None, compute
