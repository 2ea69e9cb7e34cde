"""A completion that was interrupted any number of times reaches its caller as one: what was shown is its beginning.
Requests that fail do so alone. Random attempts without streams are in `test_router_schedules`."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_examples import V0, V1, completion, request, serving

from titan_rl.errors import GeneratorFailed, RequestError
from titan_rl.routing.attempts import Shown
from titan_rl.routing.dispatcher import Dispatcher
from titan_rl.routing.strategies import LeastLoaded, RoundRobin
from titan_rl.types import TOP, Completion, FinishReason, GenerationRequest, Piece, SamplingParams, sampled_arrays


def started(dispatcher: Dispatcher, asked: GenerationRequest) -> GenerationRequest:
    (assignment,) = dispatcher.submit([asked])
    return assignment.request


def resumed(dispatcher: Dispatcher) -> GenerationRequest:
    (assignment,) = dispatcher.reconsider()
    return assignment.request


def piece(attempt: GenerationRequest, sampled: Completion, start: int, end: int) -> Piece:
    """Of what an attempt samples, as its engine hands it out."""
    return Piece(
        request_id=attempt.request_id,
        offset=attempt.stream_from + start,
        **sampled_arrays(sampled, start=start, end=end),
    )


def cut(whole: Completion, end: int, reason: FinishReason) -> Completion:
    return replace(whole, finish_reason=reason, **sampled_arrays(whole, end=end))


def tokens_of(part: Completion | Piece) -> list[tuple[Any, ...]]:
    """Each token with all that is known of it."""
    sizes = [0] * len(part.token_ids) if part.supports is None else part.supports.sizes.tolist()
    values = [] if part.supports is None else part.supports.values.tolist()
    ends = itertools.accumulate(sizes)
    supports = [values[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    return [*zip(part.token_ids.tolist(), part.logprobs.tolist(), part.versions.tolist(), supports, strict=True)]


@given(
    budget=st.integers(1, 12),
    attempts=st.lists(
        st.tuples(
            st.lists(st.integers(1, 3), max_size=4).filter(lambda sizes: sum(sizes) < 12),
            st.integers(0, 2),
            st.booleans(),
        ),
        max_size=5,
    ),
)
def test_what_was_shown_is_never_sampled_again(budget: int, attempts: list[tuple[list[int], int, bool]]) -> None:
    """Each attempt hands out pieces, samples some tokens more, and is lost or interrupted."""
    _, dispatcher = serving(RoundRobin(), 2)
    asked = replace(request("r0", budget=budget), stream_from=0)
    attempt = started(dispatcher, asked)
    shown: list[Piece] = []
    whole: Completion | None = None
    for sizes, more, is_lost in attempts:
        known = sum(len(each.token_ids) for each in shown)
        left = attempt.sampling.max_new_tokens
        sampled = completion(attempt, min(sum(sizes) + more, left))
        start = 0
        for size in sizes:
            end = min(start + size, left)
            if start < end:
                each = dispatcher.shown(piece(attempt, sampled, start, end))
                if known == attempt.stream_from:
                    assert each is not None and each.request_id == "r0"
                    shown.append(each)
                start = end
        if is_lost:
            whole = dispatcher.lost(attempt.request_id)
        else:
            # What was sampled and not shown yet is the first that the caller misses.
            whole = dispatcher.completed(attempt.request_id, sampled)
            if start < len(sampled.token_ids):
                shown.append(replace(piece(attempt, sampled, start, len(sampled.token_ids)), request_id="r0"))
        assert dispatcher.shown(piece(attempt, sampled, 0, 1)) is None, "the attempt is over"
        if whole is not None:
            break
        attempt = resumed(dispatcher)
        assert attempt.stream_from == sum(len(each.token_ids) for each in shown)
    if whole is None:
        last = completion(attempt, 1, FinishReason.STOP, version=V1)
        whole = dispatcher.completed(attempt.request_id, last)
    assert whole is not None
    position = 0
    for each in shown:
        assert each.offset == position
        position = each.end
    joined = [token for each in shown for token in tokens_of(each)]
    assert joined == tokens_of(whole)[: len(joined)]
    assert dispatcher.in_flight("g0") == dispatcher.in_flight("g1") == dispatcher.waiting == 0


@pytest.mark.parametrize("streams", [False, True])
def test_the_logprobs_of_a_prompt_are_asked_for_until_a_token_was_sampled(streams: bool) -> None:
    _, dispatcher = serving(RoundRobin(), 2)
    asked = request("r0", budget=9)
    sampling = replace(asked.sampling, top_logprobs=1, prompt_logprobs=True)
    first = started(dispatcher, replace(asked, sampling=sampling, stream_from=0 if streams else -1))
    told = np.zeros((2, 2), TOP)
    nothing = cut(completion(first, 1), 0, FinishReason.ABORT)
    assert dispatcher.completed(first.request_id, nothing) is None
    second = resumed(dispatcher)
    assert second.sampling == sampling, "nothing was sampled, so nothing was told"
    sampled = replace(completion(second, 4), prompt_logprobs=told)
    if streams:
        shown = dispatcher.shown(piece(second, sampled, 0, 3)), dispatcher.shown(piece(second, sampled, 3, 4))
        assert [each.prompt_logprobs is told for each in shown if each is not None] == [True, False]
        assert dispatcher.lost(second.request_id) is None
    else:
        assert dispatcher.completed(second.request_id, sampled) is None
    third = resumed(dispatcher)
    assert len(third.prompt_token_ids) == len(asked.prompt_token_ids) + 4
    assert third.sampling == replace(sampling, max_new_tokens=5, prompt_logprobs=False)
    whole = dispatcher.completed(third.request_id, completion(third, 5, FinishReason.LENGTH))
    assert whole is not None and len(whole.token_ids) == 9 and whole.prompt_logprobs is told


def test_a_long_stream_goes_on_where_it_was_too() -> None:
    _, dispatcher = serving(RoundRobin(), 2)
    first = started(dispatcher, replace(request("r0", budget=2000), stream_from=0))
    sampled = completion(first, 1000)
    for position in range(1000):
        assert dispatcher.shown(piece(first, sampled, position, position + 1)) is not None
    assert dispatcher.lost("r0") is None
    second = resumed(dispatcher)
    assert second.prompt_token_ids[3:].tolist() == sampled.token_ids.tolist()
    whole = dispatcher.completed(second.request_id, completion(second, 1, FinishReason.STOP))
    assert whole is not None
    assert tokens_of(whole)[:1000] == tokens_of(sampled)


def test_a_lost_attempt_that_was_shown_to_its_end_has_ended() -> None:
    _, dispatcher = serving(RoundRobin(), 2)
    first = started(dispatcher, replace(request("r0", budget=5), stream_from=0))
    dispatcher.shown(piece(first, completion(first, 5), 0, 5))
    whole = dispatcher.lost("r0")
    assert whole is not None and (whole.finish_reason, len(whole.token_ids)) == (FinishReason.LENGTH, 5)
    second = started(dispatcher, replace(request("r1", budget=5, stop=(99,)), stream_from=0))
    stopped = replace(completion(second, 2), token_ids=np.array([7, 99], np.int32))
    dispatcher.shown(piece(second, stopped, 0, 2))
    whole = dispatcher.lost("r1")
    assert whole is not None and whole.finish_reason is FinishReason.STOP and whole.generator == "g1"


def test_a_piece_after_a_gap_is_not_shown() -> None:
    _, dispatcher = serving(RoundRobin(), 1)
    attempt = started(dispatcher, replace(request("r0"), stream_from=0))
    sampled = completion(attempt, 4)
    assert dispatcher.shown(piece(attempt, sampled, 0, 1)) is not None
    assert dispatcher.shown(piece(attempt, sampled, 2, 3)) is None
    assert dispatcher.shown(piece(attempt, sampled, 1, 2)) is not None
    assert dispatcher.shown(replace(piece(attempt, sampled, 2, 3), request_id="unknown")) is None


def test_without_resumption_everything_is_shown_again() -> None:
    _, dispatcher = serving(RoundRobin(), 2, resume=False)
    asked = replace(request("r0"), stream_from=0)
    first = started(dispatcher, asked)
    sampled = completion(first, 3)
    assert dispatcher.shown(piece(first, sampled, 0, 3)) is not None
    assert dispatcher.lost("r0") is None
    second = resumed(dispatcher)
    assert (second.stream_from, second.seed, second.sampling) == (0, asked.seed, asked.sampling)
    again = dispatcher.shown(piece(second, sampled, 0, 2))
    assert again is not None and (again.request_id, again.offset) == ("r0", 0)


def test_a_caller_that_gives_up_gets_what_it_was_shown_of_a_lost_attempt() -> None:
    _, dispatcher = serving(RoundRobin(), 1)
    attempt = started(dispatcher, replace(request("r0"), stream_from=0))
    sampled = completion(attempt, 3)
    dispatcher.shown(piece(attempt, sampled, 0, 2))
    dispatcher.abort("r0")
    whole = dispatcher.lost("r0")
    assert whole is not None and whole.finish_reason is FinishReason.ABORT
    assert whole.token_ids.tolist() == cut(sampled, 2, FinishReason.ABORT).token_ids.tolist()


STREAMED = replace(request("r0"), stream_from=0)


@given(
    length=st.integers(0, 12),
    spans=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted), max_size=10),
)
def test_what_is_shown_of_any_pieces_in_any_order_is_the_completion(length: int, spans: list[list[int]]) -> None:
    whole = replace(completion(STREAMED, length, FinishReason.STOP), versions=np.arange(length, dtype=np.int64))
    shown = Shown()
    arrived = [piece(STREAMED, whole, start, end) for start, end in spans if end <= length]
    handed_on = [new for each in [*map(shown.add, arrived), shown.rest(whole)] if (new := each) is not None]
    position = 0
    for each in handed_on:
        assert each.offset == position and len(each.token_ids) > 0
        position = each.end
    assert [token for each in handed_on for token in tokens_of(each)] == tokens_of(whole)


@pytest.mark.parametrize("length", [5, 2])
def test_tokens_that_are_others_than_those_that_were_streamed_are_an_error(length: int) -> None:
    shown = Shown()
    shown.add(piece(STREAMED, completion(STREAMED, 5), 0, 3))
    with pytest.raises(GeneratorFailed, match="request r0: its generator was lost after 3 tokens were streamed"):
        shown.rest(completion(STREAMED, length))


# --- completions of several attempts ---


def test_an_undisturbed_completion_is_handed_on_as_it_is() -> None:
    _, dispatcher = serving(LeastLoaded(), 1)
    answer = completion(started(dispatcher, request("r0")), 5, FinishReason.STOP)
    assert dispatcher.completed("r0", answer) is answer


def test_a_stitched_completion_says_how_it_came_about() -> None:
    _, dispatcher = serving(RoundRobin(), 2)
    attempt = started(dispatcher, request("r0"))
    assert dispatcher.completed("r0", completion(attempt, 2)) is None
    attempt = resumed(dispatcher)
    dispatcher.lost(attempt.request_id)
    attempt = resumed(dispatcher)
    whole = dispatcher.completed(
        attempt.request_id, completion(attempt, 1, FinishReason.STOP, generator="g1", version=V1)
    )
    assert whole is not None
    assert whole.generator == "g1"
    prompt = float(len(request("r0").prompt_token_ids))  # without what an interrupted attempt had sampled
    assert whole.metrics == {
        "generation/segments": 2,
        "generation/attempts": 3,
        "generation/seconds_in_engine": 2.0,
        "generation/prompt_tokens": prompt,
    }
    assert whole.versions.tolist() == [V0.encode(), V0.encode(), V1.encode()]


@pytest.mark.parametrize(
    "option", [{"min_new_tokens": 1}, {"repetition_penalty": 1.2}, {"presence_penalty": 0.5}, {"frequency_penalty": 1}]
)
def test_options_that_depend_on_past_output_are_refused_where_completions_are_resumed(option: dict[str, Any]) -> None:
    asked = replace(request("r0"), sampling=SamplingParams(max_new_tokens=5, **option))
    resuming, other = serving(RoundRobin(), 1)[1], serving(RoundRobin(), 1, resume=False)[1]
    assert not resuming.submit([asked]) and other.submit([asked])
    ((request_id, refusal),) = resuming.failures()
    assert request_id == "r0" and isinstance(refusal, RequestError) and "router.resume = false" in str(refusal)
    assert resuming.waiting == 0 and not other.failures()


class Choosy(RoundRobin):
    def choose(self, request: GenerationRequest) -> str | None:
        if request.session_id == "odd":
            raise KeyError("odd")
        return super().choose(request)


def test_a_request_for_which_the_strategy_raises_fails_alone() -> None:
    router = serving(Choosy(), 1)[1]
    assignments = router.submit([request("r0"), request("r1", session="odd"), request("r2")])
    assert [each.request.request_id for each in assignments] == ["r0", "r2"]
    ((request_id, error),) = router.failures()
    assert request_id == "r1" and isinstance(error, RequestError) and "strategy raised KeyError: 'odd'" in str(error)
    assert router.waiting == 0
