"""Where vLLM's mixtures of experts must be adapted to CPU: their products, and what tells who computed a token.

vLLM packs the experts' weights after loading and drops the originals: later weights would not reach them. Here each
expert's product is taken with the live weight, as linear layers' are (`adaptation.py`).
"""

from functools import partial
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.functional import linear, silu
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from titan_rl.generation.engine import RunningRequest

_GIVEN = ("output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids")


def adapt_experts() -> None:
    """Of engines built from now on."""
    stock: Any = CPUUnquantizedExperts
    stock.process_weights_after_loading, stock.apply = lambda experts, layer: None, _compute


def _compute(experts: Any, **given: Any) -> None:
    """`w1`: [E, 2F, D], gate and up; `w2`: [E, D, F]."""
    output, hidden, w1, w2, shares, chosen = (given[name] for name in _GIVEN)
    output.zero_()
    for number in chosen.unique().tolist():
        rows, which = (chosen == number).nonzero(as_tuple=True)
        gate, up = linear(hidden[rows], w1[number]).chunk(2, -1)
        made = linear(silu(gate) * up, w2[number])
        output.index_add_(0, rows, made * shares[rows, which, None].to(made.dtype))


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
        """What the token is sampled after that a request is about to get; with its first one the prompt too. It is read
        now, because a new version computes KV anew and may choose others."""
        request = running.request
        end = len(request.prompt_token_ids) + len(running.tokens)
        whole = not (running.tokens or request.sampled)
        places = np.arange(request.routes_from if whole else end - 1, end)
        blocks = np.array(self._requests[request.request_id].block_ids[0])[places // self._block_size]
        found = self._table[blocks * self._block_size + places % self._block_size]
        running.routes.append(found[-1])
        if whole:
            running.prompt_routes = found[:-1]
