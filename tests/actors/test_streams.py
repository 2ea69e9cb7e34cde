"""Pieces that overlap or are missing become the completion, each token once. Under 2 s."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.actors.router_client import Shown
from titan_rl.errors import GeneratorFailed
from titan_rl.types import Completion, FinishReason, Piece


def completion(length: int, first: int = 100) -> Completion:
    return Completion(
        request_id="r0",
        token_ids=np.arange(first, first + length, dtype=np.int32),
        logprobs=-np.arange(length, dtype=np.float32),
        versions=np.arange(length, dtype=np.int64) // 3,
        finish_reason=FinishReason.STOP,
    )


def part(whole: Completion, start: int, end: int) -> Piece:
    return Piece(
        request_id="r0",
        offset=start,
        token_ids=whole.token_ids[start:end],
        logprobs=whole.logprobs[start:end],
        versions=whole.versions[start:end],
    )


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[Completion, list[Piece]]:
    """A completion, and any parts of it in any order."""
    whole = completion(draw(st.integers(0, 12)))
    length = len(whole.token_ids)
    spans = draw(st.lists(st.tuples(st.integers(0, length), st.integers(0, length)), max_size=10))
    return whole, [part(whole, min(span), max(span)) for span in spans]


@given(arrivals())
def test_the_pieces_are_the_completion(arrived: tuple[Completion, list[Piece]]) -> None:
    whole, parts = arrived
    shown = Shown()
    handed_on = [new for each in [shown.add(piece) for piece in parts] if (new := each) is not None]
    rest = shown.rest(whole)
    handed_on += [] if rest is None else [rest]
    position = 0
    for piece in handed_on:
        assert piece.offset == position and len(piece.token_ids) > 0
        position = piece.end
    for name in ("token_ids", "logprobs", "versions"):
        joined = [value for piece in handed_on for value in getattr(piece, name).tolist()]
        assert joined == getattr(whole, name).tolist()


def test_pieces_in_order_are_handed_on_at_once_and_those_of_a_second_sampling_from_where_the_first_ended() -> None:
    whole, shown = completion(6), Shown()
    assert [(new.offset, new.end) for each in ((0, 2), (2, 4)) if (new := shown.add(part(whole, *each)))] == [
        (0, 2),
        (2, 4),
    ]
    assert shown.add(part(whole, 0, 3)) is None
    again = shown.add(part(whole, 3, 6))
    assert again is not None and (again.offset, again.end) == (4, 6)


def test_tokens_that_are_others_than_those_that_were_streamed_are_an_error() -> None:
    for other in (completion(5, first=101), completion(2)):
        shown = Shown()
        shown.add(part(completion(5), 0, 3))
        with pytest.raises(GeneratorFailed, match="request r0: its generator was lost after 3 tokens were streamed"):
            shown.rest(other)


def test_nothing_is_left_of_a_completion_that_was_streamed_to_its_end() -> None:
    shown = Shown()
    shown.add(part(completion(3), 0, 3))
    assert shown.rest(completion(3)) is None
