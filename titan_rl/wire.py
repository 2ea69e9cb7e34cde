"""Requests, completions and pieces packed into a few flat arrays for a message.

A message of n items costs a few array headers instead of several per item: pickling 256 small completions one by one
costs more than sampling them. The router hands packed completions on without unpacking them. Packing is exact:
`unpack(pack(x)) == x`, in the same order, and unpacked arrays are views of the message. Every item can be packed: its
type refuses arrays of other dtypes or lengths.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, TypeVar

import numpy as np

from titan_rl.types import PROMPT_ARRAYS, SAMPLED_ARRAYS, Completion, GenerationRequest, Piece

T = TypeVar("T", GenerationRequest, Completion, Piece)

_ARRAYS = {GenerationRequest: PROMPT_ARRAYS, Completion: SAMPLED_ARRAYS, Piece: SAMPLED_ARRAYS}

_COLUMNS: dict[type, list[str]] = {
    kind: [name for name in kind.__dataclass_fields__ if name not in arrays]  # type: ignore[attr-defined]
    for kind, arrays in _ARRAYS.items()
}
"""All other fields, which travel as they are."""


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
        """One field of every item, which is no array."""
        return self.columns[_COLUMNS[self.kind].index(name)]

    @property
    def request_ids(self) -> tuple[str, ...]:
        return self.column("request_id")

    def select(self, places: Sequence[int]) -> Packed[T]:
        """The items at these places, in the message's order."""
        if len(places) == len(self):
            return self
        chosen = np.zeros(len(self), bool)
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
            # field by field: the constructors of frozen dataclasses take three times as long
            deque(map(getattr(self.kind, name).__set__, items, column), maxlen=0)
        return items


def pack(kind: type[T], items: Sequence[T]) -> Packed[T]:
    arrays = []
    for name, dtype in _ARRAYS[kind].items():
        of_items = [getattr(item, name) for item in items]
        arrays.append(np.concatenate(of_items) if of_items else np.zeros(0, dtype))
    lengths = np.array([len(array) for array in of_items], np.int64)
    columns = tuple(_column(name, items) for name in _COLUMNS[kind])
    return Packed(kind, lengths, tuple(arrays), columns)


def _column(name: str, items: Sequence[Any]) -> tuple[Any, ...]:
    values = map(attrgetter(name), items)
    if name != "sampling":
        return tuple(values)
    # Equal ones become one object, which is pickled once. It would take half the time of a message otherwise.
    known: dict[Any, Any] = {}
    return tuple(known.setdefault(value, value) for value in values)
