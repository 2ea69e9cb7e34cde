"""One real vLLM engine on CPU, in a process of its own. About 35 s on two free cores, most of it building engines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from loop_harness import SWAPS
from rank_processes import run_on_ranks

from titan_rl.types import NO_VERSION, Completion, FinishReason

Facts = dict[str, Any]
Swap = tuple[str, str, str]


@pytest.fixture(scope="module")
def facts(tiny_models: dict[str, str]) -> Facts:
    return run_on_ranks("vllm_engine_scenario:everything", 1, models=tiny_models)[0]


@pytest.fixture(scope="module")
def engine(facts: Facts) -> Facts:
    return facts["one_engine"]


@pytest.mark.parametrize("swap", SWAPS, ids="-".join)
class TestNewWeights:
    def test_an_engine_with_new_weights_is_exactly_a_fresh_engine(self, facts: Facts, swap: Swap) -> None:
        of = facts["-".join(swap)]
        assert of["swapped"] == of["fresh"], "tokens, their logprobs and prompt logprobs, to the last bit"
        assert of["before"]["prompt"] != of["fresh"]["prompt"], "otherwise this compares nothing"

    def test_every_served_tensor_is_what_was_loaded(self, facts: Facts, swap: Swap) -> None:
        assert facts["-".join(swap)]["wrong_after_load"] == []

    def test_a_cache_that_is_not_dropped_mixes_old_kv_in(self, facts: Facts, swap: Swap) -> None:
        of = facts["-".join(swap)]
        assert of["stale_logprobs"] != of["fresh"]["logprobs"]["long"]


@pytest.mark.parametrize(
    "name", ["lm_head.weight", "model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight"]
)
def test_a_tensor_that_a_load_skips_is_visible(facts: Facts, name: str) -> None:
    assert facts["skipped"][name] == [name]


def test_a_tied_head_that_lost_its_tie_is_visible(engine: Facts) -> None:
    assert engine["stale_head"] == ["lm_head.weight"]


def test_a_layer_that_computes_with_something_else_is_refused(engine: Facts) -> None:
    assert engine["hidden_copy"].startswith("lm_head computes with a copy of its weight")


def test_a_packed_copy_that_new_weights_did_not_reach_is_refused(facts: Facts) -> None:
    assert facts["stale_copy"] == "lm_head computes with a packed copy of other weights than its own"


def test_seeded_requests_get_the_same_tokens_alone_and_in_a_batch(engine: Facts) -> None:
    for name, together in engine["together"].items():
        alone: Completion = engine["alone"][f"{name}-alone"]
        assert np.array_equal(together.token_ids, alone.token_ids)
        np.testing.assert_allclose(together.logprobs, alone.logprobs, atol=1e-5)
    distinct = {tuple(engine["together"][f"seeded{index}"].token_ids) for index in range(4)}
    assert len(distinct) == 4


@pytest.mark.parametrize("name", ["hot", "cold", "top3", "greedy", "repeated", "counted", "kept-going"])
def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(engine: Facts, name: str) -> None:
    sampled, reference = engine["convention"][name]
    np.testing.assert_allclose(sampled, reference, atol=2e-5)


def test_no_stop_token_comes_before_its_time(engine: Facts) -> None:
    tokens, reason = engine["kept_going"]
    assert not set(tokens[:9]) & set(range(2, 13))
    assert 1 in tokens[:9], "the model's own end of sequence is no stop token here"
    assert (
        reason is FinishReason.STOP
        and len(tokens) == 9 + [token in range(2, 13) for token in tokens[9:]].index(True) + 1
    )


def test_a_stop_token_ends_a_completion_and_is_its_last_token(engine: Facts) -> None:
    stopped: Completion = engine["stopped"]
    whole = engine["together"]["seeded0"].token_ids.tolist()
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.token_ids.tolist() == whole[: whole.index(engine["stop_token"]) + 1]


def test_equal_prefixes_are_reused_until_the_cache_is_dropped(engine: Facts) -> None:
    assert engine["cached"] == [0.0, 32.0, 0.0]


def test_metrics_are_plain_numbers(engine: Facts) -> None:
    metrics = engine["metrics"]
    assert {"seconds_in_engine", "seconds_to_first_token", "prompt_tokens", "cached_tokens"} == metrics.keys()
    assert all(type(value) is float for value in metrics.values())


def test_an_aborted_request_keeps_its_tokens_and_disturbs_nobody(engine: Facts) -> None:
    whole = engine["together"]["seeded0"]
    (aborted,) = engine["aborted"]
    assert aborted.finish_reason is FinishReason.ABORT
    assert aborted.token_ids.tolist() == whole.token_ids[:7].tolist()
    assert len(aborted.logprobs) == len(aborted.versions) == 7
    assert engine["after_abort"].token_ids.tolist() == whole.token_ids.tolist()


def test_a_running_request_goes_on_with_its_own_draws_when_its_kv_is_dropped(engine: Facts) -> None:
    whole = engine["together"]["seeded0"]
    assert engine["kept"].token_ids.tolist() == whole.token_ids.tolist()
    np.testing.assert_allclose(engine["kept"].logprobs, whole.logprobs, atol=1e-5)


def test_tokens_of_weights_that_no_version_names_say_so(engine: Facts) -> None:
    assert set(engine["together"]["greedy"].versions.tolist()) == {NO_VERSION}


def test_sleep_says_that_nothing_is_freed_on_cpu(engine: Facts) -> None:
    assert engine["slept"] == 0


def test_more_prompts_than_one_step_may_prefill_are_not_cut(facts: Facts) -> None:
    assert len(facts["skipped"]["crowd"]) == 10


def test_a_linear_function_of_the_users_own_is_used(facts: Facts) -> None:
    assert facts["skipped"]["linear_calls"] > 0


def test_vllm_still_drops_weights_when_it_packs_them(facts: Facts) -> None:
    assert facts["upstream"]["weight_left_after_packing"] == 0, "adapt_linear is no longer needed"


def test_vllm_still_stumbles_over_other_libraries_in_its_search_for_kernels(facts: Facts) -> None:
    assert facts["upstream"]["kernel_search_stumbled_over"], "adapt_kernel_search is no longer needed"


def test_vllm_still_names_the_shared_memory_of_all_groups_alike(facts: Facts, engine: Facts) -> None:
    assert engine["identity"] == "//", "the rendezvous port names the group: adapt_group_names is no longer needed"
    assert facts["upstream"]["group_name"] == "//-tp:0-[0-1]-cpushm"
    assert engine["adapted_group_name"] != facts["upstream"]["group_name"]
