"""The fingerprint's promises: additive over any cover, sensitive to every bit and to every position (4 s)."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from weight_examples import shard_fingerprint

from titan_rl.errors import WeightsError
from titan_rl.weights import fingerprint as module
from titan_rl.weights.fingerprint import BLOCK, combined_fingerprint, odd_key, signed
from titan_rl.weights.manifest import Manifest, TensorEntry

MODULUS = 1 << 64
ANY_TIME = settings(deadline=None)
"""The first fingerprint of a process compiles."""
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
SHAPES = st.lists(st.integers(0, 9), min_size=0, max_size=4).map(tuple)


@dataclass(frozen=True)
class Box:
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[tuple(slice(start, start + size) for start, size in zip(self.offset, self.shape, strict=True))]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Every bit pattern is possible: NaN payloads, infinities, -0.0, subnormals."""
    random = np.random.default_rng(seed)
    size = dtype.itemsize * math.prod(shape)
    return torch.frombuffer(bytearray(random.bytes(size) or b"\0" * dtype.itemsize), dtype=dtype)[
        : math.prod(shape)
    ].view(shape)


def whole(tensor: torch.Tensor) -> int:
    return shard_fingerprint(tensor, tensor.shape, (0,) * tensor.dim())


def by_definition(tensor: torch.Tensor) -> int:
    width = 8 * tensor.itemsize
    columns = tensor.shape[-1] if tensor.dim() else 1
    blocks = -(-columns // BLOCK)
    total = 0
    for position, element in enumerate(tensor.contiguous().view(-1).view(BITS[tensor.dtype]).tolist()):
        row, column = divmod(position, columns)
        element %= 1 << width
        key = key_by_definition(column % BLOCK) * key_by_definition(BLOCK + row * blocks + column // BLOCK)
        total += (element ^ (element >> 16)) * key
    return signed(total)


def key_by_definition(number: int) -> int:
    """SplitMix64 as it is published, in whole numbers; made odd."""
    mixed = number * 0x9E3779B97F4A7C15 % MODULUS
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % MODULUS
    return (mixed ^ (mixed >> 31)) | 1


@st.composite
def covers(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Disjoint boxes that cover a tensor: one box, cut again and again; some are empty."""
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.shape[dim]))
        before, after = list(box.shape), list(box.shape)
        before[dim], after[dim] = at, box.shape[dim] - at
        moved = list(box.offset)
        moved[dim] += at
        boxes += [Box(box.offset, tuple(before)), Box(tuple(moved), tuple(after))]
    return boxes


@ANY_TIME
@example(shape=(2, 2 * BLOCK + 5), dtype=torch.bfloat16, seed=1)
@given(shape=SHAPES, dtype=DTYPES, seed=st.integers(0, 2**32))
def test_it_is_the_sum_of_folded_bits_times_keys(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> None:
    tensor = random_bits(shape, dtype, seed)
    assert whole(tensor) == by_definition(tensor)


@ANY_TIME
@given(data=st.data(), shape=SHAPES, dtype=DTYPES, seed=st.integers(0, 2**32), copied=st.booleans())
def test_the_boxes_of_any_cover_sum_to_the_whole(
    data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype, seed: int, copied: bool
) -> None:
    tensor = random_bits(shape, dtype, seed)
    total = 0
    for box in data.draw(covers(shape)):
        part = box.of(tensor)
        total += shard_fingerprint(part.clone() if copied else part, shape, box.offset)
    assert signed(total) == whole(tensor)


@ANY_TIME
@given(
    shape=st.lists(st.integers(1, 9), max_size=4).map(tuple), dtype=DTYPES, seed=st.integers(0, 2**32), data=st.data()
)
def test_one_flipped_bit_is_seen(shape: tuple[int, ...], dtype: torch.dtype, seed: int, data: st.DataObject) -> None:
    tensor = random_bits(shape, dtype, seed)
    before = whole(tensor)
    bits = tensor.view(-1).view(torch.uint8).numpy()
    bits[data.draw(st.integers(0, len(bits) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert whole(tensor) != before


@ANY_TIME
@given(size=st.integers(2, 300), dtype=DTYPES, seed=st.integers(0, 2**32), data=st.data())
def test_two_exchanged_elements_are_seen(size: int, dtype: torch.dtype, seed: int, data: st.DataObject) -> None:
    bits = random_bits((size,), dtype, seed).view(BITS[dtype])
    first, second = data.draw(st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)))
    assume(bits[first] != bits[second])
    exchanged = bits.clone()
    exchanged[first], exchanged[second] = bits[second], bits[first]
    assert whole(bits.view(dtype)) != whole(exchanged.view(dtype))


def test_exchanges_at_power_of_two_distances_of_a_large_tensor_are_seen() -> None:
    tensor = torch.zeros(1 << 25, dtype=torch.bfloat16)
    tensor[0] = -2.0  # bits 0xC000: many factors of two, as has the distance
    seen = {whole(tensor)}
    for power in range(25):
        moved = torch.zeros_like(tensor)
        moved[1 << power] = -2.0
        seen.add(whole(moved))
    assert len(seen) == 26


def test_changes_that_cancel_in_sums_and_moments_are_seen() -> None:
    """Elements 10 and 20 one bit up, 12 and 18 one down: their positions add up, and so do their bits."""
    before = torch.ones(128, dtype=torch.bfloat16)
    after = before.clone()
    after.view(torch.int16)[[10, 20]] += 1
    after.view(torch.int16)[[12, 18]] -= 1
    assert whole(before) != whole(after)


def test_keys_are_those_of_splitmix64() -> None:
    numbers = [*range(2 * BLOCK), (1 << 40) + 1]
    assert odd_key(torch.tensor(numbers)).tolist() == [signed(key_by_definition(number)) for number in numbers]


def test_negative_zero_and_nan_payloads_are_bits() -> None:
    assert whole(torch.tensor([0.0])) != whole(torch.tensor([-0.0]))
    quiet, other = (
        torch.tensor([payload], dtype=torch.int32).view(torch.float32) for payload in (0x7FC00000, 0x7FC00001)
    )
    assert torch.isnan(quiet) and torch.isnan(other)
    assert whole(quiet) != whole(other)


@st.composite
def panels_of(draw: st.DrawFn, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix, and the same elements as a packed layout may hold them, padding between the panels."""
    panels, rows, groups, width, padding = (draw(st.integers(1, top)) for top in (3, 9, 70, 3, 5))
    matrix = random_bits((panels * rows, groups * width), dtype, seed=draw(st.integers(0, 99)))
    memory = random_bits((panels, groups * rows * width + padding), dtype, seed=100)
    inner = (width, rows * width) if draw(st.booleans()) else (groups * width, width)
    packed = memory.as_strided((panels, rows, groups, width), (memory.shape[1], *inner, 1))
    packed.view(BITS[dtype]).copy_(matrix.view(BITS[dtype]).view(packed.shape))
    return matrix, packed


def test_a_single_row_of_pairs_counts_as_the_row_whatever_its_step():
    row = random_bits((1, 4), torch.bfloat16, seed=0)
    packed = random_bits((1, 6), torch.bfloat16, seed=100).as_strided((1, 1, 2, 2), (6, 4, 2, 1))
    packed.view(torch.int16).copy_(row.view(torch.int16).view(packed.shape))
    assert shard_fingerprint(packed, (2, 4), (0, 0)) == shard_fingerprint(row, (2, 4), (0, 0))


@ANY_TIME
@given(data=st.data(), dtype=DTYPES, columns=st.integers(0, 2 * BLOCK), row=st.integers(0, 2**20))
def test_a_packed_matrix_counts_as_the_matrix(data: st.DataObject, dtype: torch.dtype, columns: int, row: int) -> None:
    matrix, packed = data.draw(panels_of(dtype))
    offset = (row, data.draw(st.integers(0, columns)))
    whole_shape = (row + 2 * len(matrix), columns + matrix.shape[1])
    expected = shard_fingerprint(matrix, whole_shape, offset)
    assert shard_fingerprint(packed, whole_shape, offset) == expected
    bits = packed.view(BITS[dtype])
    place = data.draw(st.tuples(*(st.integers(0, size - 1) for size in bits.shape)))
    bits[place] ^= 1 << data.draw(st.integers(0, 8 * dtype.itemsize - 2))
    assert shard_fingerprint(packed, whole_shape, offset) != expected


@ANY_TIME
@given(
    data=st.data(), shape=st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple), dtype=DTYPES,
    chunk=st.integers(1, 200),
)  # fmt: skip
def test_the_sum_for_accelerators_is_the_sum_for_hosts(
    data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype, chunk: int
) -> None:
    if data.draw(st.booleans()):
        _, bits = data.draw(panels_of(dtype))
        whole_shape: tuple[int, ...] = (bits.shape[0] * bits.shape[1], bits.shape[2] * bits.shape[3])
    else:
        bits, whole_shape = random_bits(shape, dtype, seed=7), shape
    offset = tuple(data.draw(st.integers(0, 2**12)) for _ in whole_shape)
    whole_shape = tuple(size + at for size, at in zip(whole_shape, offset, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_DEVICE_CHUNK", chunk)
        for part in module._parts(bits.view(BITS[dtype]), whole_shape, offset):
            assert int(module._sum_on_device(*part)) == module._sum_on_host(*part)


def test_a_transposed_view_counts_as_what_it_shows() -> None:
    tensor = random_bits((7, 5), torch.float32, seed=1)
    assert whole(tensor.t()) == whole(tensor.t().contiguous())


def test_a_single_column_counts_as_what_it_shows() -> None:
    row = random_bits((1, 7), torch.float32, seed=1)
    assert whole(row.t()) == whole(row.view(-1).view(7, 1))


def test_a_dtype_that_is_not_served_is_refused() -> None:
    with pytest.raises(WeightsError, match="float64"):
        shard_fingerprint(torch.zeros(2, dtype=torch.float64), (2,), (0,))


def test_the_combined_fingerprint_depends_on_names_bytes_and_aliases_not_on_order() -> None:
    def entry(name: str, fingerprint: int) -> TensorEntry:
        return TensorEntry(name=name, shape=(2,), dtype="float32", offset=0, nbytes=8, fingerprint=fingerprint)

    a, b = entry("a", 1), entry("b", 2)
    base = combined_fingerprint(Manifest(entries=(a, b), nbytes=16))
    assert combined_fingerprint(Manifest(entries=(b, a), nbytes=16)) == base
    others = [
        Manifest(entries=(entry("a", 2), entry("b", 1)), nbytes=16),
        Manifest(entries=(a,), nbytes=16),
        Manifest(entries=(a, b), aliases=(("c", "a"),), nbytes=16),
    ]
    assert base not in {combined_fingerprint(other) for other in others}
