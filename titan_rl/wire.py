"""Requests, completions and pieces packed into a few flat arrays for a message.

A message of n items costs a few array headers instead of several per item: pickling 256 small completions one by one
costs more than sampling them. The router hands packed completions on without unpacking them. Packing is exact:
`unpack(pack(x)) == x`, in the same order, and unpacked arrays are views of the message. An array that a message cannot
carry exactly (a token id of more than 32 bits, a logprob that float32 would round) raises ValueError, and nothing is
packed.
"""

from __future__ import annotations

import itertools
from collections import deque
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
"""Of every kind of item: its arrays, which have one length, and their dtypes."""

_COLUMNS: dict[type, list[str]] = {
    kind: [name for name in kind.__dataclass_fields__ if name not in arrays]  # type: ignore[attr-defined]
    for kind, arrays in _ARRAYS.items()
}
"""All other fields, which travel as they are."""

_KINDS = {"i": "iu", "f": "f"}
"""Kinds of arrays that may travel as integers and floats; their values must be the same afterwards."""


@dataclass(frozen=True, slots=True)
class Packed(Generic[T]):
    """Many items in one message."""

    kind: type[T]
    lengths: np.ndarray  # [n] int64
    arrays: tuple[np.ndarray, ...]  # each [sum of lengths], in the order of `_ARRAYS`
    columns: tuple[tuple[Any, ...], ...]  # each [n]: the other fields, in the order of `_COLUMNS`

    def __len__(self) -> int:
        return len(self.lengths)

    def column(self, name: str) -> tuple[Any, ...]:
        """One field of every item, which is no array; readable even if the message cannot be unpacked."""
        return self.columns[_COLUMNS[self.kind].index(name)]

    @property
    def request_ids(self) -> tuple[str, ...]:
        return self.column("request_id")

    def select(self, places: Sequence[int]) -> Packed[T]:
        """The items at these places, in the message's order. Raises ValueError if the message is damaged."""
        items, tokens = len(self), int(self.lengths.sum())
        found = [*map(len, self.arrays), *map(len, self.columns)]
        if found != [tokens] * len(_ARRAYS[self.kind]) + [items] * len(_COLUMNS[self.kind]):
            raise ValueError(f"{items} items of {tokens} tokens have fields of {found} elements")
        if len(places) == items:
            return self
        chosen = np.zeros(items, bool)
        chosen[list(places)] = True
        arrays = tuple(array[np.repeat(chosen, self.lengths)] for array in self.arrays)
        columns = tuple(tuple(itertools.compress(column, chosen)) for column in self.columns)
        return Packed(self.kind, self.lengths[chosen], arrays, columns)

    def unpack(self) -> list[T]:
        spans = [slice(*span) for span in itertools.pairwise([0, *np.cumsum(self.lengths).tolist()])]
        parts: list[list[np.ndarray]] = [[array[span] for span in spans] for array in self.arrays]
        items = [self.kind.__new__(self.kind) for _ in spans]
        names = (*_ARRAYS[self.kind], *_COLUMNS[self.kind])
        for name, column in zip(names, (*parts, *self.columns), strict=True):
            if len(column) != len(items):
                raise ValueError(f"{len(items)} items have {len(column)} {name}")
            # field by field: the constructors of frozen dataclasses take three times as long
            deque(map(getattr(self.kind, name).__set__, items, column), maxlen=0)
        return items


def pack(kind: type[T], items: Sequence[T]) -> Packed[T]:
    """Raises ValueError where an array is not one-dimensional, would lose something, or has another length than the
    item's other arrays."""
    arrays, lengths = [], None
    for name, dtype in _ARRAYS[kind].items():
        exact = [_exact(name, getattr(item, name), np.dtype(dtype)) for item in items]
        found = [len(array) for array in exact]
        lengths = found if lengths is None else lengths
        if found != lengths:
            raise ValueError(f"{name} have {found} elements, and token_ids {lengths}")
        arrays.append(np.concatenate(exact) if exact else np.zeros(0, dtype))
    columns = tuple(_column(name, items) for name in _COLUMNS[kind])
    return Packed(kind, np.array(lengths, np.int64), tuple(arrays), columns)


def _column(name: str, items: Sequence[Any]) -> tuple[Any, ...]:
    values = map(attrgetter(name), items)
    if name != "sampling":
        return tuple(values)
    # Equal ones become one object, which is pickled once. It would take half the time of a message otherwise.
    known: dict[Any, Any] = {}
    return tuple(known.setdefault(value, value) for value in values)


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
