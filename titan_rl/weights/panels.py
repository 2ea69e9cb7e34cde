"""Copies a matrix into panels, in which memory runs along its columns (`TensorShard.data`).

Tiles of elements of 4 bytes are transposed in vector registers and written past the caches: about one copy of the
bytes. Through the caches it takes 1.4 to 1.7, element by element 2.5 to 5. A tile is 16 × 16 where registers hold a
whole line of the caches. Two of 8 × 8 fill lines one after the other elsewhere; on such a CPU that would take 3.6.
What does not fit in aligned tiles is left to torch. Importing this module loads numba (see `fingerprint.compiled_sum`).
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import njit
from numba.core import types
from numba.extending import intrinsic
from torch import Tensor

_BYTES = 4
_LINE = 64 // _BYTES
_TILE = _LINE if binding.get_host_cpu_features().get("avx512f") else _LINE // 2
_ROW = _TILE * _BYTES
"""Bytes of a tile's row; what is written past the caches must lie at a multiple of it."""


def store(source: Tensor, target: Tensor) -> None:
    """Copy a box, whose rows need not be contiguous, to where it is held (`TensorShard.data`)."""
    if source.dim() == target.dim():
        target.copy_(source)
        return
    count, rows, groups, width = target.shape
    steps = [step * _BYTES for step in (target.stride(0), target.stride(2), source.stride(0))]
    tiles = rows % _LINE == groups % _TILE == 0 and (width, target.stride(1), source.stride(1)) == (1, 1, 1)
    aligned = not any(at % _ROW for at in (target.data_ptr(), *steps[:2]))
    if tiles and aligned and target.dtype == source.dtype and target.itemsize == _BYTES:
        _store_tiles(target.data_ptr(), source.data_ptr(), count, rows, groups, *steps)
    else:
        target.copy_(source.view(target.shape))


@intrinsic
def _transpose_tile(typing: Any, target: Any, target_step: Any, source: Any, source_step: Any) -> Any:
    """Addresses and steps from row to row in bytes. Blocks of half a tile, …, 2 and 1 off the diagonal change
    places."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, target_step, source, source_step = arguments
        vector = places = ir.VectorType(ir.IntType(32), _TILE)
        rows = []
        for _ in range(_TILE):
            rows.append(builder.load(builder.inttoptr(source, vector.as_pointer()), align=_BYTES))
            source = builder.add(source, source_step)
        for step in (1 << bit for bit in reversed(range(_TILE.bit_length() - 1))):
            low = [at ^ step | _TILE if at & step else at for at in range(_TILE)]
            for at in range(_TILE):
                if not at & step:
                    pair = rows[at], rows[at | step]
                    rows[at] = builder.shuffle_vector(*pair, ir.Constant(places, low))
                    rows[at | step] = builder.shuffle_vector(*pair, ir.Constant(places, [each ^ step for each in low]))
        past_caches = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        for row in rows:
            stored = builder.store(row, builder.inttoptr(target, vector.as_pointer()), align=_ROW)
            stored.set_metadata("nontemporal", past_caches)
            target = builder.add(target, target_step)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@njit(nogil=True, cache=os.access(Path(__file__).parent, os.W_OK))  # type: ignore[untyped-decorator]
def _store_tiles(  # type: ignore[no-untyped-def]
    target, source, panels, rows, groups, panel_step, group_step, source_step
):
    """Addresses and steps in bytes."""
    for panel in range(panels):
        for line in range(0, rows, _LINE):
            for group in range(0, groups, _TILE):
                for row in range(line, line + _LINE, _TILE):
                    _transpose_tile(
                        np.int64(target + panel * panel_step + group * group_step + row * _BYTES),
                        np.int64(group_step),
                        np.int64(source + (panel * rows + row) * source_step + group * _BYTES),
                        np.int64(source_step),
                    )
