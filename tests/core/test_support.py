"""What is written down of a support is what was possible, in the fewest values (2 s)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.supports import impossible, supports_of

from titan_rl.support import MASK, Supports, encode_support


@st.composite
def drawn_from(draw: st.DrawFn) -> np.ndarray:
    """[T, V] bool; every token had something to be drawn from."""
    vocab = draw(st.integers(2, 100))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shares = draw(st.lists(st.sampled_from([0.0, 0.03, 0.5, 0.97, 1.0]), max_size=6))
    possible = rng.random((len(shares), vocab)) < np.array(shares)[:, None]
    possible[np.arange(len(shares)), rng.integers(0, vocab, len(shares))] = True
    return possible


@given(drawn_from(), st.data())
def test_what_was_possible_comes_back_by_tokens_and_by_parts_of_the_vocabulary(possible, data):
    supports = supports_of(possible)
    assert (impossible(supports, possible.shape) == ~possible).all()
    assert (supports is None) == possible.all()
    if supports is not None:
        tokens, ids = (slice(*sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2)))) for size in possible.shape)
        assert (supports.impossible(tokens, ids) == ~possible[tokens, ids]).all()
        assert (supports.forced == (possible.sum(1) == 1)).all()
        assert (supports.values.dtype, supports.sizes.dtype) == (np.int32, np.int32)


@given(drawn_from(), st.data())
def test_parts_that_are_cut_and_joined_are_the_whole(possible, data):
    at = data.draw(st.integers(0, len(possible)))
    supports = supports_of(possible)
    parts = [supports and supports.select(slice(0, at)), supports and supports.select(slice(at, None))]
    joined = Supports.join(zip(parts, (at, len(possible) - at), strict=True))
    assert (impossible(joined, possible.shape) == ~possible).all()
    chosen = np.array(data.draw(st.lists(st.booleans(), min_size=len(possible), max_size=len(possible))), bool)
    some = supports and supports.select(chosen)
    assert (impossible(some, possible[chosen].shape) == ~possible[chosen]).all()


@pytest.mark.parametrize(
    ("kept", "vocab", "values"),
    [
        ([0, 1, 2], 3, []),
        ([2], 3, [2]),
        ([0, 2], 3, [~1]),
        ([3, 70], 128, [3, 70]),
        ([*range(1, 100), *range(101, 128)], 128, [~0, ~100]),
        ([*range(0, 64, 2)], 64, [MASK, 0x55555555, 0x55555555]),
    ],
)
def test_the_shortest_form_is_taken(kept, vocab, values):
    possible = np.zeros(vocab, bool)
    possible[kept] = True
    assert encode_support(possible).tolist() == values


def test_a_token_that_nothing_was_possible_for_is_an_error():
    with pytest.raises(ValueError, match="none of 5 was possible"):
        encode_support(np.zeros(5, bool))
