"""Where vLLM's mixtures of experts must be adapted to CPU: their products, and what tells who computed a token.

vLLM packs the experts' weights after loading and drops the originals: later weights would not reach them. Here each
expert's product is taken with the live weight, as linear layers' are (`adaptation.py`). Where the products' rows do not
depend on other rows, neither does the sum: a row adds up its experts in the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from titan_rl.generation.engine import RunningRequest

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


class RouteTable:
    """Which experts computed each token whose KV is in the cache, in the KV's slot: a prefix that is found there has
    its experts there too. (vLLM's own `enable_return_routed_experts` needs a model runner that CPUs do not have.)"""

    def __init__(self, runner: Any, scheduler: Any) -> None:
        layers: list[Any] = [module for module in runner.model.modules() if isinstance(module, MoERunner)]
        self._requests, self._block_size = runner.requests, scheduler.block_size
        slots = scheduler.kv_cache_config.num_blocks * scheduler.block_size
        self._table = np.full((slots, len(layers), layers[0].router.top_k), -1, np.int16)
        for number, layer in enumerate(layers):
            layer.router.set_capture_fn(partial(self._note, number))

    def _note(self, layer: int, ids: Tensor) -> None:
        """Called in every forward pass with the experts of its tokens."""
        mapping: Any = get_forward_context().slot_mapping
        slots = next(iter(mapping.values()))  # of every layer the same
        self._table[slots[: len(ids)].numpy(), layer] = ids.numpy()

    def tell(self, running: RunningRequest) -> None:
        """What the token is sampled after that a request is about to get; with its first one the whole prompt. It is
        read now, because a new version computes KV anew and may choose others."""
        request = running.request
        end = len(request.prompt_token_ids) + len(running.tokens)
        whole = not (running.tokens or request.sampled)
        places = np.arange(0 if whole else end - 1, end)
        blocks = np.array(self._requests[request.request_id].block_ids[0])[places // self._block_size]
        found = self._table[blocks * self._block_size + places % self._block_size]
        running.routes.append(found[-1])
        if whole:
            running.prompt_routes = found[:-1]
