"""A generator over real vLLM at TP 2 that pulls LoRA's adapters (about 15 s on two free cores)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rank_processes import run_on_ranks

Facts = dict[str, Any]


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.acceptance), 2])
def facts(tiny_models: dict[str, str], request: pytest.FixtureRequest) -> Facts:
    ranks: list[Facts] = run_on_ranks("vllm_lora_scenario:life", request.param, models=tiny_models)
    assert [each["errors"] for each in ranks] == [0] * request.param
    return ranks[0]


def test_adapters_are_served_as_the_merged_weights_are_to_the_last_bit(facts: Facts) -> None:
    second, merged = facts["second"], facts["merged"]
    assert second.token_ids.tolist() == merged.token_ids.tolist()
    assert second.logprobs.tobytes() == merged.logprobs.tobytes()
    assert facts["first"].token_ids.tolist() != second.token_ids.tolist(), "otherwise this compares nothing"
    assert max(facts["bytes"]) < facts["bytes of all"] / 5


def test_a_hot_swap_of_adapters_has_versions_per_token_and_their_logprobs(facts: Facts) -> None:
    completion, tokens, logprobs = facts["through"]
    assert len(np.unique(completion.versions)) == 2
    assert completion.token_ids.tolist() == tokens.tolist()
    np.testing.assert_allclose(completion.logprobs, logprobs, atol=2e-5)


@pytest.mark.parametrize("damage", ["doubled scale", "missing module", "stale adapter", "changed base"])
def test_other_effective_weights_are_refused_before_a_token_is_served(facts: Facts, damage: str) -> None:
    several = damage in ("doubled scale", "stale adapter")  # every adapted matrix is another; some are named
    module = "model.layers.0." if several else "model.layers.1.self_attn.k_proj.weight"
    assert module in facts["refused", damage] and "is not what was published" in facts["refused", damage]
    after = facts["after", damage]
    assert after.token_ids.tolist() == facts["second"].token_ids.tolist(), "the next good version is served"
    assert after.logprobs.tobytes() == facts["second"].logprobs.tobytes()
