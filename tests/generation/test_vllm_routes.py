"""Which experts computed each token, as a real engine tells it, against transformers' routers (about 30 s)."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from loop_harness import LONG_PROMPT, PROMPT
from rank_processes import run_on_ranks
from transformers import AutoModelForCausalLM
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

from titan_rl.types import Completion

Facts = dict[str, Any]


@pytest.fixture(scope="module")
def models(tiny_models: dict[str, str]) -> dict[str, str]:
    return {f"tied_{letter}": tiny_models[f"moe_{letter}"] for letter in "ab"}


@pytest.fixture(scope="module")
def facts(models: dict[str, str]) -> Facts:
    (found,) = run_on_ranks("vllm_routes_scenario:life", 1, models=models)
    return found


def chosen(path: str, prompt: tuple[int, ...], completion: Completion) -> np.ndarray:
    """[T, layers, k] of all tokens but the last, by a router in transformers, in order."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokens = torch.tensor([[*prompt, *completion.token_ids[:-1].tolist()]])
    with torch.no_grad():
        logits = model(tokens, output_router_logits=True).router_logits
    return torch.stack([each.topk(2).indices.sort().values for each in logits], 1).numpy()


def told(completion: Completion) -> np.ndarray:
    assert completion.routes.dtype == completion.prompt_routes.dtype == np.int16
    return np.sort(np.concatenate([completion.prompt_routes, completion.routes]))


@pytest.mark.parametrize(
    ("name", "prompt"), [("cold", LONG_PROMPT), ("warm", (*LONG_PROMPT, 3)), ("beside", PROMPT), ("after", PROMPT)]
)
def test_the_experts_of_every_token_are_told_those_of_a_cached_prefix_too(
    facts: Facts, models: dict[str, str], name: str, prompt: tuple[int, ...]
) -> None:
    assert (facts[name].metrics["generation/cached_tokens"] > 0) == (name == "warm")
    assert np.array_equal(told(facts[name]), chosen(models["tied_a"], prompt, facts[name]))


def test_those_of_a_prompts_first_tokens_are_not_told_again(facts: Facts) -> None:
    warm, later = facts["warm"], facts["later"]
    assert later.prompt_routes.tolist() == warm.prompt_routes[5:].tolist()
    assert later.routes.tolist() == warm.routes.tolist()


def test_who_does_not_ask_is_not_told_and_draws_the_same_tokens(facts: Facts) -> None:
    assert facts["unasked"].routes is facts["unasked"].prompt_routes is None
    assert facts["unasked"].token_ids.tolist() == facts["beside"].token_ids.tolist()


@pytest.mark.parametrize(("name", "prompt"), [("through", LONG_PROMPT), ("continued", PROMPT)])
def test_each_token_has_the_experts_that_the_version_chose_which_sampled_it(
    facts: Facts, models: dict[str, str], name: str, prompt: tuple[int, ...]
) -> None:
    """Also if later weights computed its KV again, and would have chosen others."""
    completion = facts[name]
    by_weights = {each: chosen(models[each], prompt, completion) for each in models}
    weights = [facts["weights"][version] for version in completion.versions.tolist()]
    assert set(weights) == models.keys()
    weights = [weights[0]] * (len(prompt) - 1) + weights
    wanted = np.stack([by_weights[each][place] for place, each in enumerate(weights)])
    assert np.array_equal(told(completion), wanted)
    assert not np.array_equal(*by_weights.values())


@pytest.mark.parametrize(
    ("wire", "tensor"),
    [
        ("without_an_expert", "model.layers.1.mlp.experts.3.up_proj.weight"),
        ("router_in_bfloat16", "model.layers.0.mlp.gate.weight"),
    ],
)
def test_an_expert_that_is_not_delivered_or_a_rounded_router_is_refused_before_a_token_is_served(
    facts: Facts, wire: str, tensor: str
) -> None:
    pull, request = facts["refused", wire]
    assert f"{tensor} is not what was published" in pull
    assert request, "a generator without verified weights serves nothing"
    assert facts["after"].logprobs.tobytes() == facts["unasked"].logprobs.tobytes(), "the next good version is served"


def test_vllm_still_packs_experts_on_cpu_and_tells_no_routes_there() -> None:
    packs = inspect.getsource(CPUUnquantizedExperts.process_weights_after_loading)
    assert "cpu_prepack_moe_weight" in packs, "adapt_experts is no longer needed"
    assert "use_v2_model_runner" in inspect.getsource(VllmConfig), "RouteTable is no longer needed"
