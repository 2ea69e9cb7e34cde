"""Engine loops over real vLLM at TP 1 and TP 2, each rank a process. About 45 s on two free cores, which
test_vllm_hot_swap shares."""

from __future__ import annotations

from typing import Any

import numpy as np

from titan_rl.generation.decisions import ServingState
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
    assert ends[0] == ends[1], "decisions, and the digest of them and of what came of them"
    assert ends[0][0] > 100
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
    assert facts["stale"] == (ServingState.STALE, None)
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
