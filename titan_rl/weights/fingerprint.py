"""An additive fingerprint of a tensor: what shards of any layout sum to, without a gather.

    fingerprint = sum over elements of folded(bits) * key(position)   modulo 2**64
    folded(bits)  = bits + (bits >> 16)
    key(position) = odd_key(position mod BLOCK) * odd_key(BLOCK + position div BLOCK)

`bits` is the element's memory as a signed integer (float32: 32 bits, bfloat16: 16), so NaN payloads and -0.0 count;
`position` is the element's linear index in the GLOBAL tensor; `odd_key` is SplitMix64's finalizer, made odd. It holds:

- **Additive**: over any disjoint boxes that cover a tensor, the fingerprints sum to the whole's, modulo 2**64.
- **Any change of one element is seen**: folding is one to one, and an odd key has an inverse modulo 2**64.
- **Any other change is missed with a probability below (64 - v) * 2**(v-62)**, if it was not made with the keys in mind
  and they are as good as drawn at random. 2**v is the largest power of two that divides all differences of folded bits.
  Where the lowest bit of one element changes alone, v is 0, which makes 2**-56. It is 16 at most, which makes 2**-40,
  unless in every float32 that changes the low half falls by what the high half rises; then it may be 32 (2**-25).

  Proof: the sum over one block (its own key left out) is 0 modulo 2**k with probability 2**(v+1-k) at most, because
  the odd keys of its places leave 63 bits to chance. If only one block differs, that is it: 2**(v-63). If several do,
  and 2**w divides their sums, the blocks' keys cancel them with probability 2**(w-63); all w together make the bound.

Keys that are linear in the position would not do: element 10 and 20 one up, 12 and 18 one down, and nothing is seen.
This is no cryptographic hash: who knows the keys can make changes that it does not see.

The keys of a block's places are a table that stays in the first-level cache, and a block's own key enters once per
block. That makes one pass at memory speed, in one thread.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from titan_rl.errors import WeightsError
from titan_rl.weights.manifest import Manifest

BLOCK = 1024
"""Elements that share a key. Their places' keys, 8 KiB, must leave most of a first-level cache to the elements: with
twice as many the sum over large tensors takes a quarter longer."""

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
        data: the box, any shape (empty: 0), float32 or bfloat16, on any device; rows need not be contiguous.
        global_shape, offset: of the whole tensor, and the box's first element in it.

    Raises:
        WeightsError: a box that does not lie in the tensor, or another dtype.
    """
    if data.dtype not in BITS:
        raise WeightsError(f"no fingerprint of {data.dtype}; served are {', '.join(map(str, BITS))}")
    check_box(data.shape, global_shape, offset)
    if not data.numel():
        return 0
    sum_of = _sum_on_host if data.device.type == "cpu" else _sum_on_device
    total = 0
    for plane, first, pitch in _planes(data.detach(), global_shape, offset):
        if plane.stride(1) != 1:
            plane = plane.clone(memory_format=torch.contiguous_format)  # `contiguous` keeps a single column's stride
        total += sum_of(plane, first, pitch)
    return unsigned(total)


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


def _planes(data: Tensor, global_shape: Sequence[int], offset: Sequence[int]) -> Iterator[tuple[Tensor, int, int]]:
    """The box as planes [rows, columns], with the global position of the first element and from row to row.

    Dimensions that the box covers completely are merged into the one before them, so an FSDP shard is one long row
    and a matrix cut by columns is one plane; only boxes with three or more cut dimensions come in several planes.
    """
    steps = [math.prod(global_shape[dim + 1 :]) for dim in range(len(global_shape))]
    first = sum(start * step for start, step in zip(offset, steps, strict=True))
    sizes: list[int] = []
    pitches: list[int] = []
    for size, step in zip(data.shape, steps, strict=True):
        if pitches and pitches[-1] == size * step:
            sizes[-1] *= size
            pitches[-1] = step
        else:
            sizes.append(size)
            pitches.append(step)
    while len(sizes) < 2:
        sizes.insert(0, 1)
        pitches.insert(0, 0)
    box = data.reshape(sizes)
    for index in itertools.product(*map(range, sizes[:-2])):
        start = sum(at * pitch for at, pitch in zip(index, pitches[:-2], strict=True))
        yield box[index], first + start, pitches[-2]


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


def _sum_on_host(plane: Tensor, first: int, pitch: int) -> int:
    rows, columns = plane.shape
    stride = plane.stride(0)
    span = plane.view(BITS[plane.dtype]).as_strided(((rows - 1) * stride + columns,), (1,)).numpy()
    return compiled_sum()(span, rows, columns, stride, first, pitch, _place_keys(plane.device).numpy())


@functools.cache
def compiled_sum() -> Callable[..., int]:
    """`_sum_rows` as machine code: one pass at memory speed, in one thread.

    Call it only after the engine is built. It imports numba, and vLLM's engine looks into every object of every loaded
    module for kernels to replace; llvmlite has one that does not bear it.
    """
    from numba import njit
    from numba.extending import register_jitable

    register_jitable(odd_key)
    # Machine code is kept beside this file, which spares every process 0.3 s; in a read-only place each compiles anew.
    compiled: Callable[..., int] = njit(nogil=True, cache=os.access(Path(__file__).parent, os.W_OK))(_sum_rows)
    return compiled


def _sum_rows(bits, rows, columns, stride, first, pitch, keys):  # type: ignore[no-untyped-def]
    """`bits` is signed, one-dimensional and contiguous; all other integers are int64 and wrap."""
    total = np.int64(0)
    for row in range(rows):
        done = 0
        while done < columns:
            position = first + row * pitch + done
            place = position % BLOCK
            size = min(BLOCK - place, columns - done)
            # Unsigned, because indices that might be negative keep the compiler from using vector instructions.
            start, start_key = np.uint64(row * stride + done), np.uint64(place)
            block_sum = np.int64(0)
            for index in range(np.uint64(size)):
                element = np.int64(bits[start + index])
                block_sum += (element + (element >> 16)) * keys[start_key + index]
            total += block_sum * odd_key(BLOCK + position // BLOCK)
            done += size
    return total


def _sum_on_device(plane: Tensor, first: int, pitch: int) -> int:
    """The same sum by torch, for accelerators. Tested on CPU tensors; never run on an accelerator."""
    rows, columns = plane.shape
    width = min(columns, _DEVICE_CHUNK)
    height = max(1, _DEVICE_CHUNK // width)
    place_keys = _place_keys(plane.device)
    total = torch.zeros((), dtype=torch.int64, device=plane.device)
    for top in range(0, rows, height):
        for left in range(0, columns, width):
            part = plane[top : top + height, left : left + width]
            bits = part.contiguous().view(BITS[part.dtype]).to(torch.int64)
            row = torch.arange(top, top + part.shape[0], device=plane.device)
            column = torch.arange(left, left + part.shape[1], device=plane.device)
            position = (first + row * pitch)[:, None] + column
            keys = place_keys[position % BLOCK] * odd_key(BLOCK + position // BLOCK)
            total += ((bits + (bits >> 16)) * keys).sum()
    return int(total.item())
