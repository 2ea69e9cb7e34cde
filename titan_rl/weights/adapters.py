"""LoRA's adapters of one policy version, and the weights that they make of a base (arXiv:2106.09685).

    effective = round(base + (alpha / r) * B @ A)

The bits of an effective weight are a function of base, A, B and alpha alone. A sum over the rank is made term by term,
in one order, by float32 products and sums that round each by itself. So every box of a weight, on any rank, split in
any way, on any device, has the bits of the whole: what a trainer's shards and a generator's sum to can be compared.

Names are PEFT's: `….q_proj.lora_A.weight` [r, in] and `….q_proj.lora_B.weight` [out, r] adapt `….q_proj.weight`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
"""What the names of adapters end with, in place of `.weight`."""

WHOLE = (slice(None), slice(None))
"""The box of a whole matrix."""

_CACHED, _ON_DEVICE = 1 << 17, 1 << 26
"""Elements that are summed at a time: in a CPU's cache; elsewhere it bounds the memory for two float32 copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """All of a version."""

    alpha: float
    tensors: Mapping[str, Tensor]
    """Whole, float32, by name."""

    @property
    def r(self) -> int:
        return next(len(tensor) for name, tensor in self.tensors.items() if name.endswith(LORA_A))

    def adapt(self, name: str) -> bool:
        """Whether this weight is another than the base's."""
        return name.removesuffix(".weight") + LORA_A in self.tensors

    def box(self, name: str, base: Tensor, box: tuple[slice, ...], dtype: torch.dtype) -> Tensor:
        """A box of a weight. `base`: of this box; it is rounded to `dtype` first, because engines hold it so."""
        if not self.adapt(name):
            return base.to(dtype)
        stem = name.removesuffix(".weight")
        a, b = self.tensors[stem + LORA_A][:, box[1]], self.tensors[stem + LORA_B][box[0]]
        return effective(self.alpha / self.r, dtype, base, a.to(base.device), b.to(base.device))


def effective(scale: float, dtype: torch.dtype, base: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A box of a weight; `base`, `a` [r, in] and `b` [out, r]: of this box."""
    whole, factors = base.to(dtype, copy=True), b * scale
    rows = max(1, (_CACHED if base.device.type == "cpu" else _ON_DEVICE) // max(1, a.shape[1]))
    for piece, mine in zip(whole.split(rows), factors.split(rows), strict=True):
        weight = piece.to(torch.float32, copy=True)
        for each in range(len(a)):  # no addcmul_ and no matrix product: they may round once, or add otherwise
            weight += mine[:, each : each + 1] * a[each]
        piece.copy_(weight)
    return whole


@dataclass(frozen=True, slots=True)
class AdaptedTensor:
    """A whole weight of which only the boxes that are asked for are computed, on a device."""

    adapters: Adapters
    name: str
    base: Tensor
    dtype: torch.dtype
    device: torch.device | str = "cpu"

    def __getitem__(self, box: tuple[slice, ...]) -> Tensor:
        return self.adapters.box(self.name, self.base[box].to(self.device), box, self.dtype)

    def to(self, device: torch.device | str) -> AdaptedTensor:
        return replace(self, device=device)

    def clone(self) -> Tensor:
        return self[WHOLE]
