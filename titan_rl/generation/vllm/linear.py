"""How linear layers of vLLM's CPU engines are computed, so that new weights reach every one of them.

vLLM packs the weights of linear layers after loading and drops the originals: new weights would then never reach the
packed copies (for tied embeddings without any error). Here the originals stay, and

- "plain" computes with them: `F.linear` on the live weight;
- "packed" keeps vLLM's packed copies beside them, and makes these anew from every weights that are loaded;
- "deterministic" is told all of in `deterministic`.

What an engine computes with is checked before it serves: a copy must give back the very weights it was made from.
Applied explicitly before an engine is built; a test fails when vLLM no longer needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from vllm.model_executor.layers import utils as vllm_linear

from titan_rl.errors import WeightsError
from titan_rl.generation.vllm import deterministic
from titan_rl.importing import import_name

LinearFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""`(x [M, K], weight [N, K], bias [N] or None) -> [M, N]`."""

DETERMINISTIC = "deterministic"
"""Rows that do not depend on each other; not only the function but the layer decides."""
PACKED = "packed"
_FUNCTIONS = {"plain": "torch.nn.functional:linear"}

_stock_dispatch = vllm_linear.dispatch_cpu_unquantized_gemm


class Linears(Protocol):
    """The linear layers of the engines that were built since `adapt_linear`."""

    def dispatch(self, layer: Any, remove_weight: bool) -> None:
        """Set the layer up; takes the place of vLLM's own function, which calls it when weights were first loaded."""

    def renew(self, model: torch.nn.Module) -> None:
        """New weights were loaded."""

    def check(self, model: torch.nn.Module) -> None:
        """Make sure that every layer computes with its live weight.

        Raises:
            WeightsError: naming a layer that does not.
        """


def adapt_linear(name: str) -> Linears:
    """Choose how linear layers of engines built from now on are computed on CPU.

    Args:
        name: `GeneratorConfig.linear`, or "deterministic".

    Raises:
        ConfigError: `name` names nothing.
    """
    linears: Linears
    if name == PACKED:
        linears = PackedCopies()
    elif name == DETERMINISTIC:
        linears = LiveWeights(deterministic.linear_of)
    else:
        function: LinearFunction = import_name(name, _FUNCTIONS)
        linears = LiveWeights(lambda layer: function)

    def dispatch(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim != 2:
            _stock_dispatch(layer, remove_weight)  # a convolution or experts, which are no linear layers
        else:
            linears.dispatch(layer, remove_weight)

    vllm_linear.dispatch_cpu_unquantized_gemm = dispatch
    return linears


class LiveWeights:
    """A function that is given the weight at every call."""

    def __init__(self, function_of: Callable[[Any], LinearFunction]) -> None:
        self._function_of = function_of

    def dispatch(self, layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = self._function_of(layer)

    def renew(self, model: torch.nn.Module) -> None:
        """Nothing is kept that could be old."""

    def check(self, model: torch.nn.Module) -> None:
        for path, layer in _linear_layers(model):
            if layer.cpu_linear is not self._function_of(layer):
                raise WeightsError(f"{path} computes with a copy of its weight, which new weights would not reach")


class PackedCopies:
    """vLLM's packed copies, renewed with the weights: faster products for twice the memory."""

    def dispatch(self, layer: Any, remove_weight: bool) -> None:
        _stock_dispatch(layer, remove_weight=False)

    def renew(self, model: torch.nn.Module) -> None:
        for _, layer in _linear_layers(model):
            self.dispatch(layer, remove_weight=False)

    def check(self, model: torch.nn.Module) -> None:
        for path, layer in _linear_layers(model):
            weight = layer.weight
            # the product with the unit matrix is the weight itself: sums of one number and zeros are exact
            unit = torch.eye(weight.shape[1], dtype=weight.dtype)
            if not torch.equal(layer.cpu_linear(unit, weight, None), weight.t()):
                raise WeightsError(f"{path} computes with a packed copy of other weights than its own")


def _linear_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        if hasattr(module, "cpu_linear") and module.weight.ndim == 2:
            yield path, module
