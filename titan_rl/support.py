"""The support of a token: the ids that were possible when it was drawn, and so the sum that its logprob is taken over.

Truncation (top-p, top-k, min-p) and masks leave ids out. A token's support is the shortest of these, as int32 values:

    (nothing)          every id was possible
    3 17 250           only these were; one alone: the token was forced
    ~3 ~17             all but these (~id is -id - 1)
    MASK word word …   bit i of the words, 32 a word, says whether id i was

It is written down by the engine that draws the token, and never recomputed: other weights would leave out other ids.

Imports numpy only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

MASK = np.iinfo(np.int32).min
"""No id and no ~id."""
ALL = np.zeros(0, np.int32)
"""Every id was possible."""


def encode_support(possible: np.ndarray) -> np.ndarray:
    """The values [n] int32 of a support, given as possible [V] bool. Raises ValueError where no id is possible."""
    kept, vocab = int(np.count_nonzero(possible)), len(possible)
    if kept == vocab:
        return ALL
    if not kept:
        raise ValueError(f"a token was drawn, and none of {vocab} was possible")
    words = -(-vocab // 32)
    if min(kept, vocab - kept) <= words:
        ids = np.flatnonzero(possible) if kept <= vocab - kept else ~np.flatnonzero(~possible)
        return ids.astype(np.int32)
    bits = np.zeros(32 * words, bool)
    bits[:vocab] = possible
    return np.concatenate([[MASK], np.packbits(bits, bitorder="little").view(np.int32)], dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Supports:
    """Those of T tokens in a row, at least one of which was not drawn from everything. None stands for all others."""

    values: np.ndarray  # [sum of sizes] int32
    sizes: np.ndarray  # [T] int32, how many values each token has

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.sizes.nbytes

    @staticmethod
    def of(known: Mapping[int, np.ndarray], start: int, end: int) -> Supports | None:
        """Of tokens `start` to `end`, from their values by place; where there are none, everything was possible."""
        if not known:
            return None
        values = [known.get(place, ALL) for place in range(start, end)]
        sizes = np.array([len(each) for each in values], np.int32)
        return Supports(np.concatenate(values), sizes) if sizes.any() else None

    @staticmethod
    def join(parts: Iterable[tuple[Supports | None, int]]) -> Supports | None:
        """Parts of so many tokens each, one after the other."""
        parts = list(parts)
        values = [part.values for part, _ in parts if part is not None]
        if not values:
            return None
        sizes = [np.zeros(count, np.int32) if part is None else part.sizes for part, count in parts]
        return Supports(np.concatenate(values), np.concatenate(sizes))

    def select(self, chosen: slice | np.ndarray) -> Supports | None:
        """Of the tokens in a slice, or where `chosen` [T] is True."""
        keep = np.zeros(len(self), bool)
        keep[chosen] = True
        sizes = self.sizes[keep]
        return Supports(self.values[np.repeat(keep, self.sizes)], sizes) if sizes.any() else None

    @property
    def forced(self) -> np.ndarray:
        """[T] bool, which tokens were the only possible ones."""
        forced = self.sizes == 1
        forced[forced] = self.values[np.cumsum(self.sizes)[forced] - 1] >= 0
        return forced

    def impossible(self, tokens: slice, vocab: slice) -> np.ndarray:
        """Which ids of a part of the vocabulary each of some tokens could not have been: [tokens, ids] bool."""
        start, stop = vocab.start, vocab.stop
        sizes = self.sizes[tokens]
        first = int(self.sizes[: tokens.start].sum())
        values = self.values[first : first + int(sizes.sum())]
        kinds = np.full(len(sizes), ~0)  # of all tokens their first value: those without any are "all but" nothing
        kinds[sizes > 0] = values[(np.cumsum(sizes) - sizes)[sizes > 0]]
        kept, masked = kinds >= 0, kinds == MASK
        found = np.repeat(kept[:, None], stop - start, axis=1)
        rows, ids = np.repeat(np.arange(len(sizes)), sizes), np.where(values < 0, ~values, values)
        here = (ids >= start) & (ids < stop) & ~masked[rows]
        found[rows[here], ids[here] - start] = ~kept[rows[here]]
        if masked.any():
            words = values[masked[rows]].reshape(masked.sum(), -1)[:, 1:]
            bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")
            found[masked] = bits[:, start:stop] == 0
        return found
