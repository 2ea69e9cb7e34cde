"""Requests, completions and pieces packed into a few flat arrays for a message.

A message of n items costs a few array headers instead of several per item: pickling 256 small completions one by one
costs more than sampling them. Packing is exact: `unpack(pack(x)) == x`, in the same order, and unpacked arrays are
views of the message. An array that a message cannot carry exactly (a token id of more than 32 bits, a logprob that
float32 would round) raises ValueError, and nothing is packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, TypeVar

import numpy as np

from titan_rl.types import Completion, GenerationRequest, Piece

T = TypeVar("T", GenerationRequest, Completion, Piece)

_SAMPLED: dict[str, type] = {"token_ids": np.int32, "logprobs": np.float32, "versions": np.int64}
_ARRAYS: dict[type, dict[str, type]] = {
    GenerationRequest: {"prompt_token_ids": np.int32},
    Completion: _SAMPLED,
    Piece: _SAMPLED,
}
"""Of every kind of item: its arrays, which have one length, and their dtypes. All other fields travel as they are."""

_KINDS = {"i": "iu", "f": "f"}
"""Kinds of arrays that may travel as integers and floats; their values must be the same afterwards."""


@dataclass(frozen=True, slots=True)
class Packed(Generic[T]):
    """Many items in one message."""

    kind: type[T]
    lengths: np.ndarray  # [n] int64
    arrays: tuple[np.ndarray, ...]  # each [sum of lengths], in the order of `_ARRAYS`
    columns: tuple[tuple[Any, ...], ...]  # each [n]: the other fields, in the order of their names

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Of every item; readable even if the message cannot be unpacked."""
        return self.columns[_columns(self.kind).index("request_id")]

    def unpack(self) -> list[T]:
        bounds: list[int] = [0, *np.cumsum(self.lengths).tolist()]
        spans = list(zip(bounds[:-1], bounds[1:], strict=True))
        parts = [[array[start:end] for start, end in spans] for array in self.arrays]
        names = (*_ARRAYS[self.kind], *_columns(self.kind))
        rows = zip(*parts, *self.columns, strict=True)
        return [self.kind(**dict(zip(names, row, strict=True))) for row in rows]


def pack(kind: type[T], items: Sequence[T]) -> Packed[T]:
    """Raises ValueError where an array is not one-dimensional, would lose something, or has another length than the
    item's other arrays."""
    arrays, lengths = [], None
    for name, dtype in _ARRAYS[kind].items():
        exact = [_exact(name, array, np.dtype(dtype)) for array in map(attrgetter(name), items)]
        found = [len(array) for array in exact]
        lengths = found if lengths is None else lengths
        if found != lengths:
            raise ValueError(f"{name} have {found} elements, and token_ids {lengths}")
        arrays.append(np.concatenate(exact) if exact else np.zeros(0, dtype))
    columns = tuple(tuple(map(attrgetter(name), items)) for name in _columns(kind))
    return Packed(kind, np.array(lengths, np.int64), tuple(arrays), columns)


def _columns(kind: type) -> list[str]:
    return [name for name in kind.__dataclass_fields__ if name not in _ARRAYS[kind]]  # type: ignore[attr-defined]


def _exact(name: str, values: Any, dtype: np.dtype) -> np.ndarray:
    """`values` as an array of `dtype`."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name} has {array.ndim} dimensions; one is expected")
    if array.dtype == dtype:
        return array
    if not array.size:
        return np.zeros(0, dtype)
    if array.dtype.kind not in _KINDS[dtype.kind]:
        raise ValueError(f"{name} holds {array.dtype}; {dtype} is expected")
    with np.errstate(over="ignore"):  # it is found below
        converted = array.astype(dtype)
    if not np.array_equal(converted, array, equal_nan=dtype.kind == "f"):
        lost = array[(converted != array) & (array == array)][0]
        raise ValueError(f"{name} holds {lost}, which is not exact as {dtype}")
    return converted
