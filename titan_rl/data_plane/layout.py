"""One training sample as flat bytes, for stores and transports. No pickle, no pointers.

    header 48 B | token_ids int32 [L] | logprobs float32 [L] | versions int64 [L] | loss_mask uint8 [L] | zeros to 8 B

Little-endian; every array lies at a multiple of its item's size, so a decoded sample is four views of one buffer.
The round trip is exact, bit for bit, NaN included. Bytes that were changed after they were written are found by their
checksum and never become a sample.

The mask keeps a byte per token: packed into bits it would save 5 % of the bytes and cost more time than their copy.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Iterable

import numpy as np

from titan_rl.errors import SampleError
from titan_rl.types import TrainingSample

_MAGIC = b"TRLS"
_FORMAT = 1
_HEADER = struct.Struct("<4sHHqqqdd")  # magic, format, 0, length, group id, sample, advantage, reward
_ARRAYS = (
    ("token_ids", np.dtype("<i4")),
    ("logprobs", np.dtype("<f4")),
    ("versions", np.dtype("<i8")),
    ("loss_mask", np.dtype(np.bool_)),
)
"""In the order of the bytes, which keeps each one aligned: the first two make 8 bytes per token together."""
_TOKEN_BYTES = sum(dtype.itemsize for _, dtype in _ARRAYS)
ALIGNMENT = 8
"""Bytes; an encoded sample begins at a multiple of it and has a multiple of it as its size."""

_ROW_BYTES = 2048
_FOLDED_FROM = 32 * 1024
"""Bytes from which folding and its dozen of calls are quicker than a CRC over everything."""


def checksum_of(buffer: bytes | memoryview) -> int:
    """32 bits that change with any byte, and with any damage within three 8-byte words; others escape once in 2^32.

    A CRC-32 of the bytes, or of large ones folded first: as a table of 2 KiB rows they become the sum of every row and
    the exclusive or of every column, and what fills no row stays as it is. That is two to four times as fast as the CRC
    alone, which costs more than both copies of a sample's way through a store.
    """
    if len(buffer) < _FOLDED_FROM:
        return zlib.crc32(buffer)
    rows = len(buffer) // _ROW_BYTES
    words = np.frombuffer(buffer, np.dtype("<u8"), rows * _ROW_BYTES // 8).reshape(rows, -1)
    folded = zlib.crc32(words.sum(axis=1, dtype=words.dtype), zlib.crc32(np.bitwise_xor.reduce(words, axis=0)))
    return zlib.crc32(memoryview(buffer)[rows * _ROW_BYTES :], folded)


def encoded_size(length: int) -> int:
    """Bytes of a sample of `length` tokens."""
    return -(-(_HEADER.size + length * _TOKEN_BYTES) // ALIGNMENT) * ALIGNMENT


def encode(samples: Iterable[TrainingSample]) -> tuple[bytes, list[int]]:
    """The bytes of these samples one after the other, and of each the checksum that `decode` asks for.

    Raises:
        ValueError: an array has another dtype than `TrainingSample` says; names the sample.
    """
    parts: list[bytes | memoryview] = []
    lengths = []
    for sample in samples:
        length = len(sample.token_ids)
        lengths.append(length)
        parts.append(
            _HEADER.pack(_MAGIC, _FORMAT, 0, length, sample.group_id, sample.sample, sample.advantage, sample.reward)
        )
        for name, dtype in _ARRAYS:
            array = getattr(sample, name)
            if array.dtype != dtype:
                raise ValueError(
                    f"group {sample.group_id} sample {sample.sample}: {name} is {array.dtype}, not {dtype}"
                )
            parts.append(np.ascontiguousarray(array).data)
        parts.append(bytes(encoded_size(length) - _HEADER.size - length * _TOKEN_BYTES))
    content = b"".join(parts)
    ends = [0, *itertools.accumulate(map(encoded_size, lengths))]
    return content, [checksum_of(memoryview(content)[start:end]) for start, end in itertools.pairwise(ends)]


def decode(buffer: bytes | memoryview, checksum: int, *, group_id: int, sample: int) -> TrainingSample:
    """The sample in `buffer`. Its arrays are views: they live with `buffer` and change with it.

    So a buffer that another process may write again is copied before it is decoded, not after.

    Args:
        buffer: as `encode` made it.
        checksum: as `encode` returned it.
        group_id: of the sample that these bytes should be; an error names it.
        sample: likewise, its number within the group.

    Raises:
        SampleError: the bytes are not what was written, or not this sample.
    """
    found = checksum_of(buffer)
    if found != checksum:
        raise SampleError(
            f"{len(buffer)} bytes with checksum {found:08x}, written was {checksum:08x}", group_id, sample
        )
    header = _HEADER.unpack_from(buffer) if len(buffer) >= _HEADER.size else (b"", 0, 0, 0, 0, 0, 0.0, 0.0)
    magic, number, _, length, written_group, written_sample, advantage, reward = header
    if (magic, number) != (_MAGIC, _FORMAT) or len(buffer) != encoded_size(length):
        raise SampleError(f"{len(buffer)} bytes that are no sample of format {_FORMAT}", group_id, sample)
    if (written_group, written_sample) != (group_id, sample):
        raise SampleError(f"found group {written_group} sample {written_sample} in its place", group_id, sample)
    arrays = {}
    offset = _HEADER.size
    for name, dtype in _ARRAYS:
        arrays[name] = np.frombuffer(buffer, dtype, length, offset)
        offset += length * dtype.itemsize
    return TrainingSample(group_id=group_id, sample=sample, advantage=advantage, reward=reward, **arrays)
