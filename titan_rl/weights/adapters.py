"""LoRA's adapters, and the weights that they make of a base (arXiv:2106.09685).

    effective = round(base + B @ A)      B is published with its scale, alpha / r

The bits of an effective weight are a function of base, A and B alone. A sum over the rank is made term by term, in one
order, by float32 products and sums that round each by itself. So every box of a weight, on any rank, split in any way,
on any device, has the bits of the whole: what a trainer's shards and a generator's sum to can be compared.

Names are PEFT's: `….q_proj.lora_A.weight` [r, in] and `….q_proj.lora_B.weight` [out, r] adapt `….q_proj.weight`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from titan_rl.weights.manifest import TensorShard

_CACHED, _ON_DEVICE = 1 << 17, 1 << 26
"""Elements that are summed at a time: in a CPU's cache; elsewhere it bounds the memory for two float32 copies."""


def adapter_names(weight: str) -> tuple[str, str]:
    """Of A and B."""
    stem = weight.removesuffix("weight")
    return f"{stem}lora_A.weight", f"{stem}lora_B.weight"


def effective(dtype: torch.dtype, base: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A box of a weight, of this box of `base`, `a` [r, in] and `b` [out, r]. Engines hold a base that is rounded to
    `dtype`."""
    whole = base.to(dtype, copy=True)
    rows = max(1, (_CACHED if base.device.type == "cpu" else _ON_DEVICE) // max(1, a.shape[1]))
    for piece, factors in zip(whole.split(rows), b.split(rows), strict=True):
        weight = piece.to(torch.float32, copy=True)
        for each in range(len(a)):  # no addcmul_ and no matrix product: they may round once, or add otherwise
            weight += factors[:, each : each + 1] * a[each]
        piece.copy_(weight)
    return whole


@dataclass(frozen=True, slots=True)
class AdaptedTensor:
    """A weight of which only the boxes that are asked for are computed, on a device."""

    base: Tensor
    a: Tensor
    b: Tensor
    dtype: torch.dtype
    device: torch.device | str

    def __getitem__(self, box: tuple[slice, ...]) -> Tensor:
        """`()`: all of it."""
        rows, columns = box or (slice(None), slice(None))
        parts = self.base[box], self.a[:, columns], self.b[rows]
        return effective(self.dtype, *(part.to(self.device) for part in parts))


def adapted(
    base: TensorShard, adapters: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device | str | None = None
) -> Tensor | AdaptedTensor:
    """What whole adapters make of a box of the base, on this device or its own; the base itself where they have none
    for it."""
    a, b = map(adapters.get, adapter_names(base.name))
    if a is None or b is None:
        return base.data
    rows, columns = base.slices
    return AdaptedTensor(base.data, a[:, columns], b[rows], dtype, device or base.data.device)
