"""An additive fingerprint of a tensor: what shards of any layout sum to, without a gather.

    fingerprint = sum over elements of folded(bits) * key(row, column)   modulo 2**64
    folded(bits) = bits ^ (bits >> 16)
    key(row, column) = odd_key(column mod BLOCK) * odd_key(BLOCK + row * blocks in a row + column div BLOCK)

`bits` is the element's memory as an unsigned integer (float32: 32 bits, bfloat16: 16), so NaN payloads and -0.0 count;
`column` is its index in the last dimension of the GLOBAL tensor, `row` the linear index in all others; `odd_key` is
SplitMix64's finalizer, made odd. It holds:

- **Additive**: over any disjoint boxes that cover a tensor, the fingerprints sum to the whole's, modulo 2**64.
- **Any change of one element is seen**: folding is one to one, and an odd key has an inverse modulo 2**64.
- **Any other change is missed with a probability below (64 - v) * 2**(v-62)**, if it was not made with the keys in mind
  and they are as good as drawn at random. 2**v is the largest power of two that divides all differences of folded bits.
  Where the lowest bit of an element changes, v is 0, which makes 2**-56. It is 15 at most, which makes 2**-41, unless
  in every float32 that changes the same bits of the low half flip as of the high half; then it may be 31 (2**-25).

  Proof: the sum over one block (its own key left out) is 0 modulo 2**k with probability 2**(v+1-k) at most, because
  the odd keys of its places leave 63 bits to chance. If only one block differs, that is it: 2**(v-63). If several do,
  and 2**w divides their sums, the blocks' keys cancel them with probability 2**(w-63); all w together make the bound.

Keys that are linear in the position would not do: element 10 and 20 one up, 12 and 18 one down, and nothing is seen.
This is no cryptographic hash: who knows the keys can make changes that it does not see.

The keys of a block's places are a table that stays in the first-level cache. Whichever way the memory runs, along rows
or, in a packed matrix, along columns, one of the two keys enters once per run: one pass at memory speed, in one thread.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from titan_rl.errors import WeightsError
from titan_rl.weights.manifest import MATRIX, PANELS, Manifest, box_shape

BLOCK = 1024
"""Elements of a row that share a key. Their places' keys, 8 KiB, must leave most of a first-level cache to the
elements: with twice as many the sum over large tensors takes a quarter longer."""

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
"""Dtypes that can be served, and the integer that an element's bits are read as."""

_DEVICE_CHUNK = 1 << 24
"""Elements that are widened to int64 at a time on an accelerator: 128 MiB."""


_MODULUS = 1 << 64


def signed(value: int) -> int:
    """The int64 that is `value` modulo 2**64: what a tensor or a collective can carry."""
    value %= _MODULUS
    return value - _MODULUS if value >= _MODULUS >> 1 else value


def unsigned(value: int) -> int:
    """The inverse of `signed`."""
    return value % _MODULUS


def shard_fingerprint(data: Tensor, global_shape: Sequence[int], offset: Sequence[int]) -> int:
    """This box's summand of the fingerprint of the whole tensor, unsigned 64-bit.

    Args:
        data: the box (empty: 0), float32 or bfloat16, on any device, contiguous or not; or panels (`TensorShard.data`).
        global_shape, offset: of the whole tensor, and the box's first element in it.

    Raises:
        WeightsError: a box that does not lie in the tensor, or another dtype.
    """
    if data.dtype not in BITS:
        raise WeightsError(f"no fingerprint of {data.dtype}; served are {', '.join(map(str, BITS))}")
    check_box(box_shape(data.shape, global_shape), global_shape, offset)
    if not data.numel():
        return 0
    sum_of = _sum_on_host if data.device.type == "cpu" else _sum_on_device
    return unsigned(sum(sum_of(*part) for part in _parts(data.detach().view(BITS[data.dtype]), global_shape, offset)))


def combined_fingerprint(manifest: Manifest) -> int:
    """One number for all tensors and aliases of a publication, unsigned 64-bit; equal wherever it is computed."""
    hashed = hashlib.blake2b(digest_size=8)
    for entry in sorted(manifest.entries, key=lambda entry: entry.name):
        hashed.update(f"{entry.name}|{entry.shape}|{entry.dtype}|{entry.fingerprint}\n".encode())
    for alias in sorted(manifest.aliases):
        hashed.update(f"{alias}\n".encode())
    return int.from_bytes(hashed.digest(), "little")


def check_box(shape: Sequence[int], global_shape: Sequence[int], offset: Sequence[int]) -> None:
    """Raises WeightsError unless a box of `shape` at `offset` lies in a tensor of `global_shape`."""
    fits = len(shape) == len(global_shape) == len(offset) and all(
        0 <= start and start + size <= whole for start, size, whole in zip(offset, shape, global_shape, strict=True)
    )
    if not fits:
        raise WeightsError(
            f"a box of shape {tuple(shape)} at {tuple(offset)} does not lie in a tensor of shape {tuple(global_shape)}"
        )


class _Place(NamedTuple):
    """Where panels [P, R, G, W] lie in a global tensor of rows."""

    row: int
    """Of the first element."""
    panel_rows: int
    """From panel to panel."""
    column: int
    columns: int
    """Of the global tensor."""


def _parts(bits: Tensor, global_shape: Sequence[int], offset: Sequence[int]) -> Iterator[tuple[Tensor, _Place]]:
    """The box as panels [P, R, G, W], and where they lie. Only a box of four or more dimensions comes in parts."""
    if bits.dim() == PANELS and len(global_shape) == MATRIX:
        yield bits, _Place(offset[0], bits.shape[1], offset[1], global_shape[1])
        return
    missing = max(0, 3 - bits.dim())
    box = bits[(None,) * missing]
    shape, first = (1,) * missing + tuple(global_shape), (0,) * missing + tuple(offset)
    *_, panel_rows, columns = shape
    steps = [math.prod(shape[dim + 1 : -1]) for dim in range(len(shape) - 1)]
    start = sum(at * step for at, step in zip(first[:-1], steps, strict=True))
    for index in itertools.product(*map(range, box.shape[:-3])):
        row = start + sum(at * step for at, step in zip(index, steps[:-2], strict=True))
        yield box[index].unsqueeze(2), _Place(row, panel_rows, first[-1], columns)


_STEP, _FIRST, _SECOND = map(signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def odd_key(number):  # type: ignore[no-untyped-def]
    """SplitMix64's output number `number` (Steele et al. 2014), made odd: of an int64 in compiled code, or of a tensor.

    The masks make the arithmetic shifts of signed integers logical ones.
    """
    mixed = number * _STEP
    mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * _FIRST
    mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * _SECOND
    return (mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)) | 1


@functools.cache
def _place_keys(device: torch.device) -> Tensor:
    """[BLOCK] int64: the keys of the places in a block."""
    keys: Tensor = odd_key(torch.arange(BLOCK, device=device))
    return keys


def _sum_on_host(panels: Tensor, place: _Place) -> int:
    if panels.shape[3] > 1 and panels.stride(3) != 1:
        if panels.shape[2] > 1 or panels.stride(1) != 1:
            panels = panels.contiguous()
        else:  # a transposed view: memory runs along its columns
            panels = panels.transpose(2, 3)
    along_columns = panels.shape[3] == 1 and panels.stride(1) == 1 and panels.shape[2] > 1
    span = 1 + sum((size - 1) * step for size, step in zip(panels.shape, panels.stride(), strict=True))
    memory = panels.as_strided((span,), (1,)).numpy()
    memory = memory.view(f"u{memory.itemsize}")
    keys = _place_keys(panels.device).numpy()
    blocks = -(-place.columns // BLOCK)
    sum_of = compiled_sums()[along_columns]
    return sum_of(memory, *panels.shape, *panels.stride()[:3], place.row, place.panel_rows, place.column, blocks, keys)


@functools.cache
def compiled_sums() -> tuple[Callable[..., int], Callable[..., int]]:
    """`_sum_along_rows` and `_sum_along_columns` as machine code: one pass at memory speed, in one thread.

    Call it only after the engine is built. It imports numba, and vLLM's engine looks into every object of every loaded
    module for kernels to replace; llvmlite has one that does not bear it.
    """
    from numba import njit
    from numba.extending import register_jitable

    register_jitable(odd_key)
    register_jitable(_folded)
    # Machine code is kept beside this file, which spares every process 0.3 s; in a read-only place each compiles anew.
    compiled = njit(nogil=True, cache=os.access(Path(__file__).parent, os.W_OK))
    return compiled(_sum_along_rows), compiled(_sum_along_columns)


def _folded(bits):  # type: ignore[no-untyped-def]
    element = np.int64(bits)
    return element ^ (element >> 16)


# Memory is one-dimensional and unsigned: the compiler multiplies faster where it knows that the upper half is 0. All
# other integers are int64 and wrap. Indices of the inner loops are unsigned, because those that might be negative keep
# it from using vector instructions.


def _sum_along_rows(  # type: ignore[no-untyped-def]
    memory, panels, rows, groups, width, panel_step, row_step, group_step, row, panel_rows, column, blocks, keys
):
    """Runs of `width` elements lie in a row."""
    total = np.int64(0)
    for panel in range(panels):
        for each in range(rows):
            first_block = BLOCK + (row + panel * panel_rows + each) * blocks
            block, block_sum = np.int64(-1), np.int64(0)
            for group in range(groups):
                base = panel * panel_step + each * row_step + group * group_step
                done = 0
                while done < width:
                    at = column + group * width + done
                    if at // BLOCK != block:
                        total += block_sum * odd_key(first_block + block)
                        block, block_sum = at // BLOCK, np.int64(0)
                    size = min(BLOCK - at % BLOCK, width - done)
                    start, start_key = np.uint64(base + done), np.uint64(at % BLOCK)
                    run_sum = np.int64(0)
                    for index in range(np.uint64(size)):
                        run_sum += _folded(memory[start + index]) * keys[start_key + index]
                    block_sum += run_sum
                    done += size
            total += block_sum * odd_key(first_block + block)
    return total


def _sum_along_columns(  # type: ignore[no-untyped-def]
    memory, panels, rows, groups, width, panel_step, row_step, group_step, row, panel_rows, column, blocks, keys
):
    """Runs of `rows` elements lie in a column (`width` and `row_step` are 1)."""
    total = np.int64(0)
    row_keys = np.empty(rows, np.int64)
    for panel in range(panels):
        block = np.int64(-1)
        for group in range(groups):
            at = column + group
            if at // BLOCK != block:
                block = at // BLOCK
                for each in range(rows):
                    row_keys[each] = odd_key(BLOCK + (row + panel * panel_rows + each) * blocks + block)
            start = np.uint64(panel * panel_step + group * group_step)
            run_sum = np.int64(0)
            for index in range(np.uint64(rows)):
                run_sum += _folded(memory[start + index]) * row_keys[index]
            total += run_sum * keys[at % BLOCK]
    return total


def _sum_on_device(panels: Tensor, place: _Place) -> int:
    """The same sum by torch, for accelerators. Tested on CPU tensors; never run on an accelerator."""
    count, height, groups, width = panels.shape
    place_keys, device = _place_keys(panels.device), panels.device
    total = torch.zeros((), dtype=torch.int64, device=device)
    mask, blocks = (1 << (8 * panels.itemsize)) - 1, -(-place.columns // BLOCK)
    columns = (place.column + torch.arange(groups * width, device=device)).view(groups, width)
    at_a_time = max(1, _DEVICE_CHUNK // columns.numel())
    for panel in range(count):
        for top in range(0, height, at_a_time):
            part = panels[panel, top : top + at_a_time]
            bits = part.to(torch.int64) & mask
            first = place.row + panel * place.panel_rows + top
            rows = (first + torch.arange(len(part), device=device))[:, None, None]
            keys = place_keys[columns % BLOCK] * odd_key(BLOCK + rows * blocks + columns // BLOCK)
            total += ((bits ^ (bits >> 16)) * keys).sum()
    return int(total.item())
