"""An additive fingerprint of a tensor: what shards of any layout sum to, without a gather.

    fingerprint = sum over elements of folded(bits) * key(row, column)   modulo 2**64
    folded(bits) = bits ^ (bits >> 16)
    key(row, column) = odd_key(column mod BLOCK) * odd_key(BLOCK + row * blocks in a row + column div BLOCK)

`bits` is the element's memory as an unsigned integer (float32: 32 bits, bfloat16: 16), so NaN payloads and -0.0 count;
`column` is its index in the last dimension of the GLOBAL tensor, `row` the linear index in all others; `odd_key` is
SplitMix64's finalizer, made odd. It holds:

- **Additive**: over any disjoint boxes that cover a tensor, the fingerprints sum to the whole's, modulo 2**64.
- **Any change of one element is seen**: folding is one to one, and an odd key has an inverse modulo 2**64.
- **Any other change is missed with a probability of (64 - v) * 2**(v-62) at most**, if it was not made with the keys in
  mind and they are as good as drawn at random. 2**v is the largest power of two that divides all differences of folded
  bits: v is 0 if the lowest bit of a folded element changes (2**-56), and 15 at most (2**-41) unless every float32 that
  changes flips the same bits in both of its halves (31, 2**-25). `README.md` has the proof.

Keys of places stay in the first-level cache, and each run in memory, of a row or of a packed matrix's column, takes one
other: one pass.
"""

import functools
import hashlib
import itertools
import math
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from titan_rl.errors import WeightsError
from titan_rl.weights.manifest import MATRIX, PANELS, Manifest

BLOCK = 1024
"""Elements of a row that share a key. Their places' keys, 8 KiB, must leave most of a first-level cache to the
elements: with twice as many the sum over large tensors takes a quarter longer."""

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
"""Dtypes that can be served, and the integer that an element's bits are read as."""

_DEVICE_CHUNK = 1 << 23
"""Elements that are widened to int64 at a time on an accelerator: 64 MiB, because an engine has filled the rest."""


def signed(value: int) -> int:
    """The int64 that is `value` modulo 2**64: what a tensor or a collective can carry."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def shard_sum(data: Tensor, global_shape: Sequence[int], offset: Sequence[int]) -> Tensor:
    """This box's summand of the fingerprint of the whole tensor: [] int64, where the data is, so that a device goes on
    until it is read. `data`: the box (empty: 0), float32 or bfloat16, on any device, contiguous or not; or panels
    (`TensorShard.data`). `offset`: of its first element in the whole tensor. Raises WeightsError: another dtype."""
    if data.dtype not in BITS:
        raise WeightsError(f"no fingerprint of {data.dtype}; served are {', '.join(map(str, BITS))}")
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for part in _parts(data.detach().view(BITS[data.dtype]), global_shape, offset) if data.numel() else ():
        total += (_sum_on_host if data.device.type == "cpu" else _sum_on_device)(*part)
    return total


def sums_by_name(names: Iterable[str], parts: Iterable[tuple[str, Tensor, int]]) -> Tensor:
    """[2, names] int64: the sum of each name's parts, and of their numbers of elements. `parts`: name, `shard_sum` and
    number of elements. Devices are read once, at the end."""
    places = {name: place for place, name in enumerate(names)}
    found = [(places[name], *part) for name, *part in parts]
    sums = torch.zeros(2, len(places), dtype=torch.int64)
    if found:
        at, totals, elements = zip(*found, strict=True)
        sums.index_add_(1, torch.tensor(at), torch.stack([torch.stack(totals).cpu(), torch.tensor(elements)]))
    return sums


def combined_fingerprint(manifest: Manifest) -> int:
    """One number for all tensors and aliases of a publication, unsigned 64-bit; equal wherever it is computed."""
    hashed = hashlib.blake2b(digest_size=8)
    for name, entry in sorted(manifest.expected.items()):
        hashed.update(f"{name}|{entry.name}|{entry.shape}|{entry.dtype}|{entry.fingerprint}\n".encode())
    return int.from_bytes(hashed.digest(), "little")


def _parts(bits: Tensor, global_shape: Sequence[int], offset: Sequence[int]) -> Iterator[tuple[Tensor, int, int, int]]:
    """The box as panels [P, R, G, W], and in the global matrix of rows: the row and the column of their first element,
    and blocks in a row. A tensor that is not packed is one panel."""
    blocks = -(-math.prod(global_shape[-1:]) // BLOCK)
    if bits.dim() == PANELS and len(global_shape) == MATRIX:
        yield bits, offset[0], offset[1], blocks
        return
    missing = (1,) * (2 - bits.dim())
    box, shape = bits.view(missing + bits.shape), missing + tuple(global_shape)
    first = (0,) * len(missing) + tuple(offset)
    steps = [math.prod(shape[dim + 1 : -1]) for dim in range(len(shape) - 1)]
    start = sum(map(operator.mul, first, steps))
    for index in itertools.product(*map(range, box.shape[:-2])):
        row = start + sum(map(operator.mul, index, steps))
        yield box[index][None, :, :, None], row, first[-1], blocks


STEP, _FIRST, _SECOND = map(signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def mix(number):  # type: ignore[no-untyped-def]
    """SplitMix64's finalizer (Steele et al. 2014): of int64, in compiled code, an array or a tensor.

    The masks make the arithmetic shifts of signed integers logical ones.
    """
    number = (number ^ ((number >> 30) & 0x3FFFFFFFF)) * _FIRST
    number = (number ^ ((number >> 27) & 0x1FFFFFFFFF)) * _SECOND
    return number ^ ((number >> 31) & 0x1FFFFFFFF)


def odd_key(number):  # type: ignore[no-untyped-def]
    """SplitMix64's output number `number`, made odd."""
    return mix(number * STEP) | 1


def _sum_on_host(panels: Tensor, row: int, column: int, blocks: int) -> int:
    total, width = 0, panels.shape[3]
    # Pairs of bfloat16 are read as words, a half of each at a time.
    even = panels.stride(3) == 1 and not any(step % 2 for step in (panels.storage_offset(), *panels.stride()[:3]))
    words = even and width == panels.itemsize == 2
    for each in range(width):
        part = panels.view(torch.int32)[..., 0] if words else panels[..., each]
        if part.stride(1) != 1 and (part.stride(2), width) != (1, 1):
            # `contiguous` would leave the steps of a single row as they are
            part = part.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
        span = 1 + sum((size - 1) * step for size, step in zip(part.shape, part.stride(), strict=True))
        memory = part.as_strided((span,), (1,)).numpy()
        memory = memory.view(f"u{memory.itemsize}")
        place = row, column + each, width, blocks
        total += compiled_sum()(memory, 16 * each if words else None, *part.shape, *part.stride(), *place)
    return signed(total)


@functools.cache
def compiled_sum() -> Callable[..., int]:
    """`_sum` as machine code: one pass at memory speed, in one thread.

    Call it only after the engine is built. It imports numba, and vLLM's engine looks into every object of every loaded
    module for kernels to replace; llvmlite has one that does not bear it.
    """
    from numba import njit
    from numba.extending import register_jitable

    for each in (mix, odd_key, _folded, _weighted):
        register_jitable(each)
    # Machine code is kept beside this file, which spares every process 0.3 s; in a read-only place each compiles anew.
    return njit(nogil=True, cache=os.access(Path(__file__).parent, os.W_OK))(_sum)


# All integers but the elements are int64 and wrap. Elements are unsigned: the compiler multiplies faster where it knows
# that the upper half is 0. So are indices of the inner loop: those that might be negative keep it from using vectors.


def _sum(  # type: ignore[no-untyped-def]
    memory, shift, panels, rows, groups, panel_step, row_step, group_step, row, column, width, blocks
):
    """Groups are `width` columns apart. `row_step` is 1, or `group_step` and `width` are. `shift`: of a word, to the
    half of it that is the element; None: words are elements."""
    total = np.int64(0)
    row_keys, place_keys = np.empty(rows, np.int64), np.empty(BLOCK, np.int64)
    for place in range(BLOCK):
        place_keys[place] = odd_key(place)
    for panel in range(panels):
        group = 0
        while group < groups:
            block, place = divmod(column + group * width, BLOCK)
            size = min(groups - group, -((place - BLOCK) // width))
            for each in range(rows):
                row_keys[each] = odd_key(BLOCK + (row + panel * rows + each) * blocks + block)
            start = panel * panel_step + group * group_step
            if row_step == 1:
                total += _weighted(memory, shift, start, size, group_step, place_keys[place::width], rows, row_keys)
            else:
                total += _weighted(memory, shift, start, rows, row_step, row_keys, size, place_keys[place:])
            group += size
    return total


def _weighted(memory, shift, start, runs, step, run_keys, size, keys):  # type: ignore[no-untyped-def]
    """Runs of `size` words lie `step` apart. Four, from four parts of the memory, are read side by side: a core that
    reads one stream waits for the memory half of the time."""
    total, part, last = np.int64(0), -(-runs // 4), runs - 1
    for first in range(part):
        second, third, fourth = first + part, first + 2 * part, first + 3 * part  # beyond the last they count nothing
        at, at_second = np.uint64(start + first * step), np.uint64(start + min(second, last) * step)
        at_third, at_fourth = np.uint64(start + min(third, last) * step), np.uint64(start + min(fourth, last) * step)
        sum_first, sum_second, sum_third, sum_fourth = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
        for index in range(np.uint64(size)):
            sum_first += _folded(memory[at + index], shift) * keys[index]
            sum_second += _folded(memory[at_second + index], shift) * keys[index]
            sum_third += _folded(memory[at_third + index], shift) * keys[index]
            sum_fourth += _folded(memory[at_fourth + index], shift) * keys[index]
        total += sum_first * run_keys[first]
        total += sum_second * run_keys[second] if second <= last else 0
        total += sum_third * run_keys[third] if third <= last else 0
        total += sum_fourth * run_keys[fourth] if fourth <= last else 0
    return total


def _folded(word, shift):  # type: ignore[no-untyped-def]
    """The bits of an element."""
    word = np.int64(word)
    return word ^ (word >> 16) if shift is None else (word >> shift) & 0xFFFF


def _sum_on_device(panels: Tensor, row: int, column: int, blocks: int) -> Tensor:
    """The same sum by torch, for accelerators: 34 bytes of traffic per element of bfloat16, and no read."""
    matrix = panels.reshape(panels.shape[0] * panels.shape[1], -1)
    mask, width = torch.full((1,), (1 << (8 * panels.itemsize)) - 1, device=panels.device), matrix.shape[1]
    total, start = torch.zeros((), dtype=torch.int64, device=panels.device), 0
    while start < width:  # the rest of a block, whole blocks, or the beginning of one
        block, place = divmod(column + start, BLOCK)
        size = min(BLOCK - place, width - start)
        count = (width - start) // BLOCK if size == BLOCK else 1
        keys, place_keys = _keys(panels.device, row, len(matrix), blocks, block, count, place, size)
        strip = matrix[:, start : start + count * size].unflatten(1, (count, size))
        rows = max(1, _DEVICE_CHUNK // (count * size))
        for part, part_keys in zip(strip.split(rows), keys.split(rows), strict=True):
            bits = part & mask  # which widens, too
            if panels.itemsize > 2:  # else folding changes nothing
                bits ^= bits >> 16
            total += bits.mul_(place_keys).sum(-1).mul_(part_keys).sum()
        start += count * size
    return total


@functools.lru_cache(256)
def _keys(
    device: torch.device, row: int, rows: int, blocks: int, block: int, count: int, place: int, size: int
) -> tuple[Tensor, Tensor]:
    """Of blocks of rows [rows, count], and of places in them [size]. Layers share theirs."""
    numbers = row + torch.arange(rows, device=device)[:, None]
    return (
        odd_key(BLOCK + numbers * blocks + block + torch.arange(count, device=device)),
        odd_key(place + torch.arange(size, device=device)),
    )
