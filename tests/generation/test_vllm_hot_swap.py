"""New weights under running requests, over real vLLM at TP 1 and TP 2: what is sampled is exactly what its version
says, a damaged publication is never served, and random calls in any order leave nothing behind. No time of its own:
it looks at the lives of test_vllm_lockstep.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rank_processes import run_on_ranks

from titan_rl.generation.decisions import ServingState
from titan_rl.types import FinishReason

Facts = dict[str, Any]

TOLERANCE = 2e-5
SAME_VERSION_SHARE = 0.25
"""Of the tortured requests: fewer that saw one version would mean that little was compared."""


def spans(versions: np.ndarray) -> int:
    return 1 + int(np.count_nonzero(np.diff(versions)))


def test_every_span_of_a_swapped_completion_is_what_a_prefill_under_its_version_gives(facts: Facts) -> None:
    assert len(facts["swaps"]) == 3
    for completion, tokens, logprobs in facts["swaps"]:
        assert spans(completion.versions) == 5 and np.all(np.diff(completion.versions) >= 0)
        assert np.unique(completion.versions, return_counts=True)[1].min() >= 3
        assert completion.token_ids.tolist() == tokens.tolist()
        np.testing.assert_allclose(completion.logprobs, logprobs, atol=TOLERANCE)


def test_a_stream_through_a_swap_is_its_completion_position_by_position(facts: Facts) -> None:
    before, pieces, completion = facts["stream"]
    assert before and all(np.array_equal(a.token_ids, b.token_ids) for a, b in zip(before, pieces, strict=False))
    assert 4 <= before[-1].end <= 9, "handed out while the engine was in its ninth step"
    position = 0
    for piece in pieces:
        assert piece.offset == position and len(piece.token_ids)
        position = piece.end
    assert position < len(completion.token_ids) == 40
    for name in ("token_ids", "logprobs", "versions"):
        joined = np.concatenate([getattr(piece, name) for piece in pieces])
        assert joined.tolist() == getattr(completion, name)[:position].tolist()
        assert joined.dtype == getattr(completion, name).dtype
    assert spans(completion.versions) == 2
    assert sum(len(set(piece.versions.tolist())) for piece in pieces) == len(pieces), "a swap comes between two bursts"


def test_the_prefix_cache_is_never_reused_across_versions(facts: Facts) -> None:
    cache = facts["cache"]
    assert cache["before"] == [0.0, 32.0]
    assert cache["in_flight"] == 1
    assert cache["preemptions"] == 1, "the running request computed its KV again"
    assert cache["after"] == 0.0
    completion, tokens, logprobs = cache["through"]
    assert spans(completion.versions) == 2
    assert completion.token_ids.tolist() == tokens.tolist()
    np.testing.assert_allclose(completion.logprobs, logprobs, atol=TOLERANCE)


def test_a_kept_prefix_cache_is_reused_across_versions_and_logprobs_are_of_no_single_one(one_rank: Facts) -> None:
    cache = one_rank["kept_cache"]
    assert cache["before"] == [0.0, 32.0]
    assert cache["in_flight"] == 1
    assert cache["preemptions"] == 0, "the running request kept its KV"
    assert cache["after"] == 32.0
    completion, tokens, logprobs = cache["through"]
    old = completion.versions == completion.versions[0]
    assert completion.token_ids[old].tolist() == tokens[old].tolist()
    np.testing.assert_allclose(completion.logprobs[old], logprobs[old], atol=TOLERANCE)
    first_new = int(np.argmin(old))
    assert abs(completion.logprobs[first_new] - logprobs[first_new]) > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("flipped", "is not what was published"),
        ("truncated", "its manifest says"),
        ("missing", "model.layers.0.mlp.down_proj.weight was never published"),
    ],
)
def test_a_damaged_publication_is_never_served(facts: Facts, damage: str, reason: str) -> None:
    found = facts["corrupted"][damage]
    assert "cannot be served: rank 0: WeightsError" in found["error"] and reason in found["error"]
    assert found["state"] == (ServingState.STALE, None)
    assert reason in found["refused"]
    assert found["flying"].finish_reason is FinishReason.ABORT
    assert set(found["flying"].versions.tolist()) == {found["good"]} and len(found["flying"].token_ids) < 40
    assert (found["waiting"].finish_reason, len(found["waiting"].token_ids)) == (FinishReason.ABORT, 0)
    assert set(found["served"].versions.tolist()) == {found["next"]}
    assert found["served"].token_ids.tolist() == facts["whole"].token_ids.tolist(), "as before the damage"
    np.testing.assert_allclose(found["served"].logprobs, facts["whole"].logprobs, atol=TOLERANCE)


def test_random_calls_leave_no_slot_behind(facts: Facts) -> None:
    assert sum(facts["torture"]["calls"].values()) == 200
    nothing_is_left(facts["torture"])


def test_a_request_that_saw_one_version_got_what_it_gets_alone(facts: Facts) -> None:
    like_alone(facts["torture"])


@pytest.mark.acceptance
@pytest.mark.parametrize("ranks", [1, 2], ids=["tp1", "tp2"])
def test_random_calls_of_many_seeds(tiny_models: dict[str, str], ranks: int) -> None:
    everyone = run_on_ranks("vllm_loop_scenario:tortures", ranks, models=tiny_models, seeds=list(range(1, 9)))
    for torture in everyone[0]["tortures"]:
        nothing_is_left(torture)
        like_alone(torture)
    assert len({each["end"] for each in everyone}) == 1
    assert [each["errors"] for each in everyone] == [0] * ranks


def nothing_is_left(torture: Facts) -> None:
    assert min(torture["calls"].values()) >= 10, "a seed that calls everything"
    assert not any(torture["leaks"].values()), torture["leaks"]
    reasons = {completion.finish_reason for completion in torture["completions"].values()}
    assert reasons == set(FinishReason)


def like_alone(torture: Facts) -> None:
    completions, alone = torture["completions"], torture["alone"]
    sampled = [name for name, completion in completions.items() if len(completion.token_ids)]
    assert len(alone) >= SAME_VERSION_SHARE * len(sampled) and len(alone) < len(sampled)
    for name, again in alone.items():
        completion = completions[name]
        count = len(completion.token_ids)
        if completion.finish_reason is not FinishReason.ABORT:
            assert (count, completion.finish_reason) == (len(again.token_ids), again.finish_reason), name
        assert completion.token_ids.tolist() == again.token_ids[:count].tolist(), name
        np.testing.assert_allclose(completion.logprobs, again.logprobs[:count], atol=TOLERANCE, err_msg=name)
