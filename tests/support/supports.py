"""Supports of tokens, from what was possible."""

import numpy as np

from titan_rl.support import Supports, encode_support


def supports_of(possible: np.ndarray) -> Supports | None:
    """`possible` [T, V] bool."""
    return Supports.of({place: encode_support(row) for place, row in enumerate(possible)}, 0, len(possible))


def impossible(supports: Supports | None, shape: tuple[int, int]) -> np.ndarray:
    """[T, V] bool."""
    return np.zeros(shape, bool) if supports is None else supports.impossible(slice(0, shape[0]), slice(0, shape[1]))
