"""LoRA's adapters of one policy version, and the weights that they make of a base (arXiv:2106.09685).

    effective = round(base + (alpha / r) * B @ A)

The bits of an effective weight are a function of base, A, B and alpha alone. A sum over the rank is made term by term,
in one order, by float32 products and sums that round each by itself. So every box of a weight, on any rank, split in
any way, on any device, has the bits of the whole: what a trainer's shards and a generator's sum to can be compared.

Names are PEFT's: `….q_proj.lora_A.weight` [r, in] and `….q_proj.lora_B.weight` [out, r] adapt `….q_proj.weight`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
"""What the names of adapters end with, in place of `.weight`."""

WHOLE = (slice(None), slice(None))
"""The box of a whole matrix."""

_PIECE_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 25}
"""Computed at a time, by device: what stays in a CPU's cache while a product for each of r is added to it; on others it
bounds the memory for two float32 copies."""


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

    def pieces(
        self, name: str, base: Tensor, box: tuple[slice, ...], dtype: torch.dtype
    ) -> Iterator[tuple[int, Tensor]]:
        """Consecutive rows of a box of a weight, with the first one's index in it.

        Args:
            base: of this box, in any dtype; rounded to `dtype` first, because engines hold it so.
            box: index into the whole weight.
        """
        rows = max(1, _PIECE_ELEMENTS.get(base.device.type, 1 << 25) * len(base) // max(1, base.numel()))
        for first in range(0, len(base), rows):
            piece = base[first : first + rows].to(dtype)
            if self.adapt(name):
                stem, start = name.removesuffix(".weight"), (box[0].start or 0) + first
                columns = self.tensors[stem + LORA_A][:, box[1]].to(base.device)
                factors = self.tensors[stem + LORA_B][start : start + len(piece)].to(base.device)
                weight = piece.to(torch.float32, copy=True)  # of a live one
                piece = _sum(weight, columns, factors * (self.alpha / self.r)).to(dtype)
            yield first, piece

    def box(self, name: str, base: Tensor, box: tuple[slice, ...], dtype: torch.dtype) -> Tensor:
        """A box of a weight, in one piece."""
        whole = torch.empty(base.shape, dtype=dtype, device=base.device)
        for first, piece in self.pieces(name, base, box, dtype):
            whole[first : first + len(piece)] = piece
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


def _sum(weight: Tensor, columns: Tensor, factors: Tensor) -> Tensor:
    """`weight` + `factors` @ `columns`, one of r after the other."""
    for each in range(len(columns)):  # never addcmul_ or a matrix product: they may round once, or add in another order
        weight += factors[:, each : each + 1] * columns[each]
    return weight
