"""A completion that was interrupted any number of times reaches its caller as one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_examples import V0, V1, completion, request, serving

from titan_rl.routing.dispatcher import Assignment, Dispatcher, estimated_cost
from titan_rl.routing.strategies import LeastLoaded, RoundRobin
from titan_rl.types import Completion, FinishReason, GenerationRequest, PolicyVersion, SamplingParams

LOST = -1


def only(assignments: list[Assignment]) -> GenerationRequest:
    (assignment,) = assignments
    return assignment.request


def interrupt(dispatcher: Dispatcher, attempt: GenerationRequest, sampled: int) -> Completion:
    """Answer with so many tokens and an interruption that the request survives."""
    part = completion(attempt, sampled)
    assert dispatcher.completed(attempt.request_id, part, 0.0) is None
    return part


@given(
    budget=st.integers(1, 12),
    interruptions=st.lists(st.integers(LOST, 4), max_size=8),
    end=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
    last=st.integers(1, 12),
)
def test_the_parts_add_up_to_what_was_asked_for(
    budget: int, interruptions: list[int], end: FinishReason, last: int
) -> None:
    _, dispatcher = serving(RoundRobin(), 2)
    asked = request("r0", budget=budget)
    (attempt,) = (a.request for a in dispatcher.submit([asked], 0.0))
    parts: list[Completion] = []
    sampled: list[int] = []
    whole: Completion | None = None

    def end_with(count: int, reason: FinishReason, version: PolicyVersion) -> Completion | None:
        part = completion(attempt, min(count, budget - len(sampled)), reason, version=version)
        parts.extend([part] if len(part.token_ids) else [])
        sampled.extend(part.token_ids.tolist())
        return dispatcher.completed(attempt.request_id, part, 0.0)

    for step, count in enumerate(interruptions):
        assert attempt.prompt_token_ids.tolist() == [*asked.prompt_token_ids.tolist(), *sampled]
        assert attempt.sampling == replace(asked.sampling, max_new_tokens=budget - len(sampled))
        assert attempt.session_id == asked.session_id and attempt.min_version == asked.min_version
        assert attempt.seed == asked.seed, "the noise of a token depends on its position too"
        if count == LOST:
            assert dispatcher.lost(attempt.request_id, 0.0) is None
        else:
            whole = end_with(count, FinishReason.ABORT, PolicyVersion(0, step))
            if whole is not None:
                break
        attempt = only(dispatcher.reconsider(0.0))
    if whole is None:
        whole = end_with(last, end, V1)
        assert whole is not None and whole.finish_reason is end
    else:
        assert len(sampled) == budget and whole.finish_reason is FinishReason.LENGTH

    assert whole.request_id == "r0"
    assert len(sampled) <= budget
    for name in ("token_ids", "logprobs", "versions"):
        expected = np.concatenate([getattr(part, name) for part in parts])
        assert getattr(whole, name).tolist() == expected.tolist()
        assert getattr(whole, name).dtype == expected.dtype
    assert dispatcher.live == dispatcher.waiting == dispatcher.load("g0") == dispatcher.load("g1") == 0


def test_an_undisturbed_completion_is_handed_on_as_it_is() -> None:
    _, dispatcher = serving(LeastLoaded(), 1)
    answer = completion(only(dispatcher.submit([request("r0")], 0.0)), 5, FinishReason.STOP)
    assert dispatcher.completed("r0", answer, 0.0) is answer


def test_a_stitched_completion_says_how_it_came_about() -> None:
    _, dispatcher = serving(RoundRobin(), 2)
    attempt = only(dispatcher.submit([request("r0")], 0.0))
    interrupt(dispatcher, attempt, 2)
    attempt = only(dispatcher.reconsider(0.0))
    dispatcher.lost(attempt.request_id, 0.0)
    attempt = only(dispatcher.reconsider(0.0))
    whole = dispatcher.completed(
        attempt.request_id, completion(attempt, 1, FinishReason.STOP, generator="g1", version=V1), 0.0
    )
    assert whole is not None
    assert whole.generator == "g1"
    assert whole.metrics == {"segments": 2, "attempts": 3, "seconds": 2.0}
    assert whole.versions.tolist() == [V0.encode(), V0.encode(), V1.encode()]


def test_a_request_that_is_lost_without_tokens_is_retried_as_it_was() -> None:
    _, dispatcher = serving(RoundRobin(), 2)
    first = only(dispatcher.submit([request("r0", seed=11)], 0.0))
    assert dispatcher.lost(first.request_id, 0.0) is None
    second = only(dispatcher.reconsider(0.0))
    assert second.request_id != first.request_id
    assert (second.seed, second.sampling) == (11, first.sampling)
    assert second.prompt_token_ids is first.prompt_token_ids


def test_an_interrupted_part_keeps_the_tokens_of_earlier_parts_when_a_later_one_is_lost() -> None:
    _, dispatcher = serving(RoundRobin(), 2)
    part = interrupt(dispatcher, only(dispatcher.submit([request("r0")], 0.0)), 2)
    second = only(dispatcher.reconsider(0.0))
    dispatcher.lost(second.request_id, 0.0)
    third = only(dispatcher.reconsider(0.0))
    assert third.prompt_token_ids.tolist() == [0, 1, 2, *part.token_ids.tolist()]
    assert third.seed == second.seed


def test_the_estimated_cost_of_a_continued_request_is_that_of_the_whole() -> None:
    _, dispatcher = serving(RoundRobin(), 1)
    asked = request("r0", prompt=3, budget=5)
    interrupt(dispatcher, only(dispatcher.submit([asked], 0.0)), 2)
    assert dispatcher.load("g0") == 0
    attempt = only(dispatcher.reconsider(0.0))
    assert dispatcher.load("g0") == estimated_cost(attempt) == estimated_cost(asked) == 8


def test_an_interruption_after_the_last_token_is_the_end() -> None:
    _, dispatcher = serving(RoundRobin(), 1)
    attempt = only(dispatcher.submit([request("r0", budget=3)], 0.0))
    whole = dispatcher.completed("r0", completion(attempt, 3), 0.0)
    assert whole is not None and whole.finish_reason is FinishReason.LENGTH and len(whole.token_ids) == 3


def test_an_interruption_after_a_stop_token_is_the_end() -> None:
    _, dispatcher = serving(RoundRobin(), 1)
    attempt = only(dispatcher.submit([request("r0", stop=(99,))], 0.0))
    part = completion(attempt, 2)
    stopped = replace(part, token_ids=np.array([5, 99], np.int32))
    whole = dispatcher.completed("r0", stopped, 0.0)
    assert whole is not None and whole.finish_reason is FinishReason.STOP


def test_without_resumption_an_interrupted_request_starts_again_from_nothing() -> None:
    _, dispatcher = serving(RoundRobin(), 1, resume=False)
    asked = request("r0")
    interrupt(dispatcher, only(dispatcher.submit([asked], 0.0)), 2)
    attempt = only(dispatcher.reconsider(0.0))
    assert attempt.prompt_token_ids.tolist() == asked.prompt_token_ids.tolist()
    assert (attempt.sampling, attempt.seed) == (asked.sampling, asked.seed)
    whole = dispatcher.completed(attempt.request_id, completion(attempt, 5, FinishReason.STOP), 0.0)
    assert whole is not None and (whole.request_id, len(whole.token_ids)) == ("r0", 5)


@pytest.mark.parametrize(
    "option", [{"min_new_tokens": 1}, {"repetition_penalty": 1.2}, {"presence_penalty": 0.5}, {"frequency_penalty": 1}]
)
def test_options_that_depend_on_past_output_are_refused_where_completions_are_resumed(option: dict[str, Any]) -> None:
    asked = replace(request("r0"), sampling=SamplingParams(max_new_tokens=5, **option))
    refusal = serving(RoundRobin(), 1)[1].refusal(asked)
    assert refusal is not None and "router.resume = false" in str(refusal)
    assert serving(RoundRobin(), 1, resume=False)[1].refusal(asked) is None


def test_a_caller_that_gives_up_is_answered_with_the_tokens_so_far() -> None:
    _, dispatcher = serving(RoundRobin(), 1)
    attempt = only(dispatcher.submit([request("r0")], 0.0))
    first = interrupt(dispatcher, attempt, 2)
    attempt = only(dispatcher.reconsider(0.0))
    assert dispatcher.abort("r0") == Assignment("g0", attempt)
    whole = dispatcher.completed(attempt.request_id, second := completion(attempt, 1), 0.0)
    assert whole is not None and whole.finish_reason is FinishReason.ABORT
    assert whole.token_ids.tolist() == [*first.token_ids.tolist(), *second.token_ids.tolist()]
    assert dispatcher.abort("r0") is None


def test_a_caller_that_gives_up_while_its_request_waits_is_answered_at_once() -> None:
    fleet, dispatcher = serving(RoundRobin(), 1)
    part = interrupt(dispatcher, only(dispatcher.submit([request("r0")], 0.0)), 2)
    whole = dispatcher.abort("r0")
    assert isinstance(whole, Completion)
    assert whole.token_ids.tolist() == part.token_ids.tolist()
    assert dispatcher.reconsider(0.0) == [] and dispatcher.waiting == 0


def test_a_given_up_request_whose_generator_dies_is_answered_and_not_retried() -> None:
    _, dispatcher = serving(RoundRobin(), 2)
    attempt = only(dispatcher.submit([request("r0")], 0.0))
    dispatcher.abort("r0")
    whole = dispatcher.lost(attempt.request_id, 0.0)
    assert whole is not None and whole.finish_reason is FinishReason.ABORT and len(whole.token_ids) == 0
    assert dispatcher.reconsider(0.0) == []


def test_a_live_request_id_is_refused() -> None:
    _, dispatcher = serving(RoundRobin(), 1)
    asked = request("r0")
    dispatcher.submit([asked], 0.0)
    assert "r0 is already live" in str(dispatcher.refusal(asked))
    with pytest.raises(ValueError, match="r0 is already live"):
        dispatcher.submit([asked], 0.0)
