"""Packing is exact: what comes out is what went in, in the same order."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.rpc.requests import pack
from titan_rl.support import Supports
from titan_rl.types import (
    SAMPLED_ARRAYS,
    Completion,
    FinishReason,
    GenerationRequest,
    Piece,
    PolicyVersion,
    SamplingParams,
)

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=6)
versions = st.builds(PolicyVersion, st.integers(0, 2**20), st.integers(0, 2**31))


@st.composite
def requests(draw: st.DrawFn) -> GenerationRequest:
    return GenerationRequest(
        request_id=draw(st.text(max_size=5)),
        prompt_token_ids=np.array(draw(tokens), np.int32),
        sampling=SamplingParams(
            max_new_tokens=draw(st.integers(1, 3)), temperature=draw(st.sampled_from([0.0, 1.0])), stop_token_ids=(1,)
        ),
        seed=draw(st.integers(0, 2**63 - 1)),
        min_version=draw(versions),
        session_id=draw(st.none() | st.text(max_size=3)),
        stream_from=draw(st.sampled_from([-1, 0, 7])),
    )


@st.composite
def supports(draw: st.DrawFn, tokens: int) -> Supports | None:
    forced = draw(st.lists(st.integers(0, tokens - 1), max_size=3)) if tokens else []
    return Supports.of({place: np.array([place], np.int32) for place in forced}, 0, tokens)


@st.composite
def pieces(draw: st.DrawFn) -> Piece:
    ids = draw(tokens)
    return Piece(
        request_id=draw(st.text(max_size=5)),
        offset=draw(st.integers(0, 2**40)),
        token_ids=np.array(ids, np.int32),
        logprobs=np.array([draw(st.floats(-30, 0, width=32)) for _ in ids], np.float32),
        versions=np.array([draw(versions).encode() for _ in ids], np.int64),
        supports=draw(supports(len(ids))),
    )


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    ids = draw(tokens)
    return Completion(
        request_id=draw(st.text(max_size=5)),
        token_ids=np.array(ids, np.int32),
        logprobs=np.array([draw(st.floats(-30, 0, width=32)) for _ in ids], np.float32),
        versions=np.array([draw(versions).encode() for _ in ids], np.int64),
        finish_reason=draw(st.sampled_from(list(FinishReason))),
        generator=draw(st.sampled_from(["generator0", "generator1"])),
        metrics={"seconds": draw(st.floats(0, 9))},
        supports=draw(supports(len(ids))),
    )


def same(left: object, right: object) -> bool:
    for name in left.__dataclass_fields__:  # type: ignore[attr-defined]
        a, b = getattr(left, name), getattr(right, name)
        if isinstance(a, np.ndarray):
            if a.dtype != b.dtype or not np.array_equal(a, b):
                return False
        elif isinstance(a, Supports) and isinstance(b, Supports):
            if a.values.tobytes() != b.values.tobytes() or a.sizes.tobytes() != b.sizes.tobytes():
                return False
        elif a != b:
            return False
    return True


@pytest.mark.parametrize(
    ("kind", "items"), [(GenerationRequest, requests()), (Piece, pieces()), (Completion, completions())]
)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_items_survive_packing_and_pickling(data: st.DataObject, kind: type, items: st.SearchStrategy) -> None:
    originals = data.draw(st.lists(items, max_size=5))
    copies = pickle.loads(pickle.dumps(pack(kind, originals))).unpack()
    assert len(copies) == len(originals)
    assert all(same(a, b) for a, b in zip(originals, copies, strict=True))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_selected_completions_are_those_at_their_places(data: st.DataObject) -> None:
    originals = data.draw(st.lists(completions(), max_size=5))
    places = [place for place in range(len(originals)) if data.draw(st.booleans())]
    selected = pickle.loads(pickle.dumps(pack(Completion, originals).select(places)))
    assert len(selected) == len(places)
    assert list(selected.column("finish_reason")) == [originals[place].finish_reason for place in places]
    assert all(same(originals[place], copy) for place, copy in zip(places, selected.unpack(), strict=True))


def test_equal_sampling_travels_once() -> None:
    both = pack(GenerationRequest, [asked(np.array([5, 1], np.int32)) for _ in range(2)])
    first, second = pickle.loads(pickle.dumps(both)).unpack()
    assert first.sampling is second.sampling


@given(versions, versions)
def test_an_encoded_version_keeps_the_order_and_comes_back(a: PolicyVersion, b: PolicyVersion) -> None:
    assert PolicyVersion.decode(a.encode()) == a
    assert (a.encode() < b.encode()) == (a < b)


def asked(prompt: object) -> GenerationRequest:
    return GenerationRequest(
        request_id="r0",
        prompt_token_ids=prompt,  # type: ignore[arg-type]
        sampling=SamplingParams(max_new_tokens=8),
        seed=0,
    )


@pytest.mark.parametrize(
    "prompt", [[2, 1], np.array([2, 1]), np.array([2, 1], np.float32), np.array([[2], [1]], np.int32)]
)
def test_a_prompt_that_a_message_cannot_carry_exactly_is_refused_where_the_request_is_made(prompt: object) -> None:
    with pytest.raises(ValueError, match=r"r0: prompt_token_ids is .*; a one-dimensional array of int32 is expected"):
        asked(prompt)


def test_a_version_that_does_not_fit_is_not_taken_for_another_one() -> None:
    for version in (PolicyVersion(0, 2**32), PolicyVersion(0, -1), PolicyVersion(2**31, 0)):
        with pytest.raises(ValueError, match="is no version that can be encoded"):
            version.encode()


@pytest.mark.parametrize("kind", [{"finish_reason": FinishReason.STOP}, {"offset": 0}])
@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"logprobs": np.array([-0.1, -0.5])}, r"r: logprobs is float64 \[2\]; a one-dimensional array of float32"),
        ({"versions": np.zeros(1, np.int64)}, "r: versions has 1 elements, and there are 2 tokens"),
        ({"token_ids": [2, 1]}, "r: token_ids is list"),
        (
            {"supports": Supports(np.zeros(3, np.int32), np.ones(3, np.int32))},
            "r: supports of 3 tokens, and there are 2",
        ),
    ],
)
def test_what_was_sampled_cannot_be_made_of_other_dtypes_or_lengths(kind, wrong, problem) -> None:
    """Otherwise a message would round it, or its neighbour in the message would get what is too much."""
    arrays = {name: np.zeros(2, dtype) for name, dtype in SAMPLED_ARRAYS.items()}
    with pytest.raises(ValueError, match=problem):
        (Completion if "finish_reason" in kind else Piece)(request_id="r", **kind, **(arrays | wrong))
