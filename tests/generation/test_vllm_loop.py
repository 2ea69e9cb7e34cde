"""Engine loops over real vLLM at TP 1 and TP 2, each rank a process. About 45 s on two free cores.

Under a change of weights every token is exactly what its version gives, a damaged publication is never served, and
random calls in any order leave nothing behind.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rank_processes import run_on_ranks

from titan_rl.generation.lockstep import RunningDigest
from titan_rl.types import FinishReason, PolicyVersion

Facts = dict[str, Any]


def test_two_ranks_give_the_tokens_of_one(one_rank: Facts, two_ranks: list[Facts]) -> None:
    one, both = one_rank["first"], two_ranks[0]["first"]
    for name, alone in one["early"].items():
        assert alone.token_ids.tolist() == both["early"][name].token_ids.tolist(), name
        np.testing.assert_allclose(alone.logprobs, both["early"][name].logprobs, atol=2e-5)
    for name in ("whole", "joined", "oracle", "repaired"):
        if name != "oracle":  # its prompt depends on when the pull came
            assert one[name].token_ids.tolist() == both[name].token_ids.tolist(), name


def test_all_ranks_end_with_one_digest(two_ranks: list[Facts]) -> None:
    ends = [facts["first"]["end"] for facts in two_ranks]
    assert ends[0] == ends[1] != RunningDigest().value, "the digest of all decisions and their results"
    assert [facts["first"]["errors"] for facts in two_ranks] == [0, 0]


def test_nothing_is_served_before_the_first_verified_pull(facts: Facts) -> None:
    assert facts["answered_before_pull"] == []
    assert facts["first_pull"].requests_in_flight == 0
    assert facts["first_pull"].bytes > 400_000
    for completion in facts["early"].values():
        assert set(completion.versions.tolist()) == {PolicyVersion(0, 0).encode()}


def test_a_request_that_joins_others_gets_what_it_gets_alone(facts: Facts) -> None:
    assert facts["joined"].token_ids.tolist() == facts["early"]["joined-alone"].token_ids.tolist()
    assert facts["decoding"].token_ids.tolist() == facts["whole"].token_ids.tolist()
    np.testing.assert_allclose(facts["decoding"].logprobs, facts["whole"].logprobs, atol=1e-5)


def test_pulling_the_same_weights_changes_the_versions_and_nothing_else(facts: Facts) -> None:
    versions = facts["same_weights"].versions.tolist()
    assert sorted(versions) == versions and set(versions) == {0, 1}
    assert versions.count(0) >= 10
    assert facts["same_pull"].requests_in_flight == 1
    assert facts["same_weights"].token_ids.tolist() == facts["whole"].token_ids.tolist()
    np.testing.assert_allclose(facts["same_weights"].logprobs, facts["whole"].logprobs, atol=1e-5)


def test_a_request_that_sees_a_swap_goes_on_as_if_its_tokens_were_a_prompt(facts: Facts) -> None:
    swapped, oracle = facts["swapped"], facts["oracle"]
    new = swapped.versions == 2
    assert swapped.versions.tolist() == [1] * int((~new).sum()) + [2] * int(new.sum())
    assert new.sum() >= 20 and (~new).sum() >= 10
    assert swapped.token_ids[new].tolist() == oracle.token_ids.tolist()
    np.testing.assert_allclose(swapped.logprobs[new], oracle.logprobs, atol=2e-5)
    assert set(oracle.versions.tolist()) == {2}


def test_an_aborted_request_comes_back_with_the_tokens_so_far(facts: Facts) -> None:
    aborted = facts["aborted"]
    assert aborted.finish_reason is FinishReason.ABORT
    assert 10 <= len(aborted.token_ids) < 40
    assert set(aborted.versions[:10].tolist()) == {1}
    known = facts["whole"].token_ids[:10].tolist()
    assert aborted.token_ids[:10].tolist() == known


def test_a_load_that_skipped_a_tensor_on_one_rank_is_served_by_none(facts: Facts) -> None:
    assert "cannot be served" in facts["bad_pull"]
    assert "model.layers.1.mlp.down_proj.weight is not what was published" in facts["bad_pull"]
    assert "down_proj" in facts["refused"]
    assert facts["flying"].finish_reason is FinishReason.ABORT
    assert 4 <= len(facts["flying"].token_ids) < 40


def test_a_good_pull_after_a_bad_one_serves_again(facts: Facts) -> None:
    assert facts["repaired_pull"].version == PolicyVersion(0, 3)
    assert facts["repaired"].token_ids.tolist() == facts["whole"].token_ids.tolist(), "the weights of before"
    assert set(facts["repaired"].versions.tolist()) == {3}


def test_one_stray_draw_on_a_follower_is_seen_and_ends_the_generator(two_ranks: list[Facts]) -> None:
    leader, follower = (facts["stray"] for facts in two_ranks)
    assert follower["fatal"].startswith("LockstepError('rank 1 differs from rank 0 before decision ")
    assert follower["steps"] <= 8, "seen at the end of the burst in which it happened"
    assert leader["fatal"], "rank 0 notices that its follower is gone"
    assert leader["answered"] == []
    assert "the engine loop of rank 0 died" in leader["late"]


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
    assert "preemptions" not in cache["through"][0].metrics, "the cache was not full"
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
