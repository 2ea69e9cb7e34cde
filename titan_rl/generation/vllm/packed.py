"""Weights in the layout that oneDNN multiplies fastest with, and the only copy of them.

The layout depends on CPU, dtype and shape, and oneDNN does not tell it. So a matrix of known bits is packed first, and
a layout is used only if every one of them is where it says. New weights are then stored in place, and verification
reads that place: the memory that the product reads.
"""

import ctypes
import functools
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from titan_rl.weights.fingerprint import BITS

_ROWS = 16
"""Rows of a product, for which oneDNN chooses the layout; with 1 it would not pack. The others use the same layout."""

_PANEL_ROWS = (64, 48, 32, 16, 24, 8)
_WIDTHS = (1, 2)
"""Layouts that are looked for, as `TensorShard.data` describes them: float32 has width 1, bfloat16 pairs of columns."""

_MIXER = -1640531535  # 2654435769, Knuth's


class PackedMatrix:
    """A weight [N, K] and the product with it. Made by `packed`."""

    def __init__(self, matrix: Tensor, panels: Tensor, rows: int) -> None:
        self._matrix = matrix  # opaque
        self._panels = panels  # [P, R, G, W], its memory; the last rows may be padding
        self.shape = (rows, panels.shape[2] * panels.shape[3])

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As `F.linear`; `weight` is not looked at."""
        return torch.ops.mkldnn._linear_pointwise(x, self._matrix, bias, "none", [], "")

    def boxes(self, first: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """Rows `first` to `end`: how many, and panels with them."""
        height = self._panels.shape[1]
        while first < end:
            panel, start = divmod(first, height)
            whole = 0 if start else (end - first) // height
            taken = whole * height or min(height - start, end - first)
            yield taken, self._panels[panel : panel + whole] if whole else self._panels[panel, None, start:][:, :taken]
            first += taken


def packed(weight: Tensor) -> PackedMatrix | None:
    """A copy of a matrix [N, K]; None where this CPU packs this dtype in no layout that is known here."""
    if (layout := _layout(weight.shape, weight.dtype)) is None:
        return None
    matrix, memory = _reordered(weight)
    return PackedMatrix(matrix, _panels(memory, weight.shape, *layout), len(weight))


def _reordered(weight: Tensor) -> tuple[Tensor, Tensor]:
    """What oneDNN multiplies with, and its memory."""
    matrix = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
    size, address = torch.ops.mkldnn._nbytes(matrix), torch.ops.mkldnn.data_ptr(matrix)
    return matrix, torch.frombuffer((ctypes.c_byte * size).from_address(address), dtype=weight.dtype)


def _panels(memory: Tensor, shape: torch.Size, height: int, width: int) -> Tensor:
    """[P, R, G, W]; raises RuntimeError if memory cannot be laid out so."""
    count, columns = -(-shape[0] // height), shape[1]
    return memory.view(count, -1, height, width).transpose(1, 2)[:, :, : columns // width]


@functools.cache
def _layout(shape: torch.Size, dtype: torch.dtype) -> tuple[int, int] | None:
    """Rows of a panel, and its width."""
    bits = torch.arange(shape.numel(), dtype=torch.int32).mul_(_MIXER)  # of float32: each another
    bits = bits.bitwise_right_shift_(32 - 8 * dtype.itemsize).to(BITS[dtype])
    try:
        matrix, memory = _reordered(bits.view(dtype).view(shape))  # the memory is the matrix's
    except RuntimeError:  # not this dtype on this CPU
        return None
    for height, width in itertools.product(_PANEL_ROWS, _WIDTHS):
        if shape[1] % width or memory.numel() % (-(-shape[0] // height) * height * width):
            continue
        panels = _panels(memory, shape, height, width)
        if panels.shape[2] * width == shape[1]:
            held = panels.reshape(-1, shape[1])[: shape[0]]
            if torch.equal(held.view(BITS[dtype]), bits.view(shape)):
                return height, width
    return None
