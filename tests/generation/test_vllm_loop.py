"""Engine loops over real vLLM at TP 1 and TP 2, each rank a process. About 25 s on two free cores.

Under a change of weights every token is exactly what its version gives, a damaged publication is never served, and
random calls in any order leave nothing behind.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from loop_harness import LONG_PROMPT
from rank_processes import run_on_ranks

from titan_rl.types import FinishReason

Facts = dict[str, Any]
TOLERANCE = 2e-5
SAME_VERSION_SHARE = 0.25
"""Of the tortured requests: fewer that saw one version would mean that little was compared."""


@pytest.fixture(scope="module")
def one_rank(tiny_models: dict[str, str]) -> list[Facts]:
    """A generator at TP 1, as far as one at TP 2 does not show the same."""
    return run_on_ranks("vllm_loop_scenario:short_life", 1, models=tiny_models)


@pytest.fixture(scope="module")
def one_rank_in_full(tiny_models: dict[str, str]) -> list[Facts]:
    return run_on_ranks("vllm_loop_scenario:life", 1, models=tiny_models)


@pytest.fixture(scope="module")
def two_ranks(tiny_models: dict[str, str]) -> list[Facts]:
    """A generator at TP 2, by rank."""
    return run_on_ranks("vllm_loop_scenario:life", 2, models=tiny_models)


@pytest.fixture(scope="module", params=[pytest.param("one_rank_in_full", marks=pytest.mark.acceptance), "two_ranks"])
def facts(request: pytest.FixtureRequest) -> Facts:
    """Of rank 0, at TP 1 and at TP 2."""
    return request.getfixturevalue(request.param)[0]


def test_two_ranks_give_the_tokens_of_one_and_agree_to_the_end(one_rank: list[Facts], two_ranks: list[Facts]) -> None:
    assert [facts["errors"] for facts in one_rank + two_ranks] == [0, 0, 0], "the last decision compares all digests"
    for name, alone in one_rank[0]["served"].items():
        both = two_ranks[0]["served"][name]
        assert alone.token_ids.tolist() == both.token_ids.tolist(), name
        np.testing.assert_allclose(alone.logprobs, both.logprobs, atol=TOLERANCE)
    tops = [facts["served"]["whole"].top_logprobs for facts in (one_rank[0], two_ranks[0])]
    np.testing.assert_allclose(*(top["logprob"] for top in tops), atol=TOLERANCE)
    assert tops[0].shape == (40, 3)


def test_two_ranks_score_a_prompt_as_one_does_also_where_it_is_in_the_cache(
    one_rank: list[Facts], two_ranks: list[Facts]
) -> None:
    scored = [facts["served"][name] for facts in (one_rank[0], two_ranks[0]) for name in ("scored", "scored again")]
    assert [each.metrics["generation/cached_tokens"] for each in scored] == [0.0] * 4, "it is computed again"
    first, *others = (each.prompt_logprobs for each in scored)
    assert first["token"][:, 0].tolist() == list(LONG_PROMPT[-2::-1]) and first.shape == (39, 4)
    for other in others:
        np.testing.assert_allclose(other["logprob"], first["logprob"], atol=TOLERANCE)
        assert other["token"][:, 0].tolist() == list(LONG_PROMPT[-2::-1])


def spans(versions: np.ndarray) -> int:
    return 1 + int(np.count_nonzero(np.diff(versions)))


def test_every_span_of_a_swapped_completion_is_what_a_prefill_under_its_version_gives(facts: Facts) -> None:
    assert len(facts["swaps"]) == 3
    for completion, tokens, logprobs in facts["swaps"]:
        assert spans(completion.versions) == 5 and np.all(np.diff(completion.versions) >= 0)
        assert np.unique(completion.versions, return_counts=True)[1].min() >= 3
        assert completion.token_ids.tolist() == tokens.tolist()
        np.testing.assert_allclose(completion.logprobs, logprobs, atol=TOLERANCE)


def test_the_prefix_cache_is_never_reused_across_versions(facts: Facts) -> None:
    cache = facts["cache"]
    assert cache["before"] == [0.0, 32.0]
    assert cache["preemptions"] == 1, "the running request computed its KV again"
    assert "generation/preemptions" not in cache["through"][0].metrics, "the cache was not full"
    assert cache["after"] == 0.0
    completion, tokens, logprobs = cache["through"]
    assert spans(completion.versions) == 2
    assert completion.token_ids.tolist() == tokens.tolist()
    np.testing.assert_allclose(completion.logprobs, logprobs, atol=TOLERANCE)


def test_a_kept_prefix_cache_is_reused_across_versions_and_logprobs_are_of_no_single_one(one_rank: list[Facts]) -> None:
    cache = one_rank[0]["kept_cache"]
    assert cache["before"] == [0.0, 32.0]
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
        ("skipped", "model.layers.1.mlp.down_proj.weight is not what was published"),
    ],
)
def test_damaged_weights_are_never_served(facts: Facts, damage: str, reason: str) -> None:
    found = facts["damaged"][damage]
    assert " cannot be served: " in found["error"] and reason in found["error"]
    assert reason in found["refused"]
    assert found["flying"].finish_reason is FinishReason.ABORT
    assert set(found["flying"].versions.tolist()) == {found["good"]} and 4 <= len(found["flying"].token_ids) < 40
    assert (found["waiting"].finish_reason, len(found["waiting"].token_ids)) == (FinishReason.ABORT, 0)
    assert set(found["served"].versions.tolist()) == {found["next"]}
    whole = facts["served"]["whole"]
    assert found["served"].token_ids.tolist() == whole.token_ids.tolist(), "as before the damage"
    np.testing.assert_allclose(found["served"].logprobs, whole.logprobs, atol=TOLERANCE)


def test_random_calls_leave_nothing_behind_and_change_no_token(facts: Facts) -> None:
    check_torture(facts["torture"])


@pytest.mark.acceptance
@pytest.mark.parametrize("ranks", [1, 2], ids=["tp1", "tp2"])
def test_random_calls_of_many_seeds(tiny_models: dict[str, str], ranks: int) -> None:
    everyone = run_on_ranks("vllm_loop_scenario:tortures", ranks, models=tiny_models, seeds=list(range(1, 9)))
    for torture in everyone[0]["tortures"]:
        check_torture(torture)
    assert [each["errors"] for each in everyone] == [0] * ranks


def check_torture(torture: Facts) -> None:
    """Nothing is left, and a request that saw one version got what it gets alone."""
    assert min(torture["calls"].values()) >= 10, "a seed that calls everything"
    assert not any(torture["leaks"].values()), torture["leaks"]
    completions, alone = torture["completions"], torture["alone"]
    assert {completion.finish_reason for completion in completions.values()} == set(FinishReason)
    sampled = [name for name, completion in completions.items() if len(completion.token_ids)]
    assert len(alone) >= SAME_VERSION_SHARE * len(sampled) and len(alone) < len(sampled)
    for name, again in alone.items():
        completion = completions[name]
        count = len(completion.token_ids)
        if completion.finish_reason is not FinishReason.ABORT:
            assert (count, completion.finish_reason) == (len(again.token_ids), again.finish_reason), name
        assert completion.token_ids.tolist() == again.token_ids[:count].tolist(), name
        np.testing.assert_allclose(completion.logprobs, again.logprobs[:count], atol=TOLERANCE, err_msg=name)
        if (told := completion.prompt_logprobs) is not None:
            np.testing.assert_allclose(told["logprob"], again.prompt_logprobs["logprob"], atol=TOLERANCE, err_msg=name)
