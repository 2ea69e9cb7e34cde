"""One real vLLM engine on CPU, in a process of its own, about 35 s on two free cores, most of it building engines. Then
its sampling: noise is a function of seed, position and token id, and its tokens follow softmax(logits).
"""

from __future__ import annotations

import hashlib
import inspect
import pkgutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from loop_harness import LONG_PROMPT, SWAPS, SWAPS_OF_CI, make_request
from rank_processes import run_on_ranks
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.platforms import current_platform

from titan_rl.generation.config import GeneratorConfig
from titan_rl.generation.engine import RunningRequest
from titan_rl.generation.vllm.adaptation import kernel_norm, linear_of
from titan_rl.generation.vllm.steps import SeededSampling, noise_keys
from titan_rl.types import NO_VERSION, FinishReason

Facts = dict[str, Any]
Swap = tuple[str, str, str]


@pytest.fixture(scope="module")
def facts(tiny_models: dict[str, str]) -> Facts:
    return run_on_ranks("vllm_engine_scenario:everything", 1, models=tiny_models)[0]


@pytest.fixture(scope="module")
def other_swaps(tiny_models: dict[str, str]) -> Facts:
    return run_on_ranks("vllm_engine_scenario:other_swaps", 1, models=tiny_models)[0]


@pytest.fixture
def of(swap: Swap, request: pytest.FixtureRequest) -> Facts:
    """What was found of this swap."""
    return request.getfixturevalue("facts" if swap in SWAPS_OF_CI else "other_swaps")["-".join(swap)]


@pytest.fixture(scope="module")
def engine(facts: Facts) -> Facts:
    return facts["one_engine"]


@pytest.mark.parametrize(
    "swap",
    [pytest.param(swap, marks=() if swap in SWAPS_OF_CI else pytest.mark.acceptance) for swap in SWAPS],
    ids="-".join,
)
class TestNewWeights:
    def test_an_engine_with_new_weights_is_exactly_a_fresh_engine(self, of: Facts) -> None:
        assert of["swapped"] == of["fresh"], "tokens, their logprobs and prompt logprobs, to the last bit"
        assert of["before"]["prompt"] != of["fresh"]["prompt"], "otherwise this compares nothing"

    def test_every_served_tensor_is_what_was_loaded(self, of: Facts) -> None:
        assert of["wrong_after_load"] == []

    def test_every_fault_in_the_memory_that_it_computes_with_is_seen(self, of: Facts) -> None:
        """A flipped bit, exchanged rows, the weights before, other weights: in each shard of each tensor."""
        assert of["refused_without_fault"] == ""
        assert of["unseen_faults"] == []
        unused = {name.rpartition("experts.")[2] for name in of["not_computed_with"]}
        assert len(unused) < 8 * 3 and all(name[0].isdecimal() for name in unused), "no token was sent to these experts"


def test_every_fault_in_packed_memory_of_a_rank_is_seen(tiny_models: dict[str, str]) -> None:
    models = Path(tiny_models["tied_a"]), Path(tiny_models["tied_b"])
    for of in run_on_ranks("vllm_engine_scenario:faults_of_two_ranks", 2, model=models[0], other=models[1]):
        assert (of["refused_without_fault"], of["unseen_faults"]) == ("", [])
        assert of["not_computed_with"] == ["model.norm.weight"], "the second rank's head is all padding"


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.self_attn.k_proj.weight"])
def test_a_tensor_that_a_load_skips_is_visible(facts: Facts, name: str) -> None:
    assert facts["skipped"][name] == [name]


def test_a_tied_head_that_lost_its_tie_is_refused(engine: Facts) -> None:
    assert engine["untied_head"] == "vLLM's own loader puts lm_head.weight elsewhere than here is known"


def test_a_layer_that_computes_with_something_else_is_refused(engine: Facts) -> None:
    assert engine["hidden_copy"].startswith("lm_head computes with a copy of its weight")


@pytest.mark.parametrize(
    "name", ["hot", "cold", "top3", "greedy", "repeated", "counted", "kept-going", "nucleus", "likely", "late"]
)
def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(engine: Facts, name: str) -> None:
    sampled, reference = engine["convention"][name]
    np.testing.assert_allclose(sampled, reference, atol=2e-5)


def test_what_was_possible_is_what_truncation_and_masks_have_left(engine: Facts) -> None:
    possible, probabilities, tokens = engine["nucleus"]
    assert possible[np.arange(24), tokens].all()
    highest = np.argsort(-probabilities, axis=-1)
    assert not np.take_along_axis(possible, highest[:, 9:], 1).any()
    for row, share in zip(possible, probabilities, strict=True):
        nine = np.sort(share)[-9:]
        kept = np.sort(share[row]) / nine.sum()
        assert kept.sum() >= 0.8 - 1e-5 and kept[1:].sum() < 0.8 + 1e-5
    possible, probabilities, _ = engine["likely"]
    share = probabilities / probabilities.max(-1, keepdims=True)
    assert (possible | (share < 0.2 + 1e-5)).all() and (~possible | (share > 0.2 - 1e-5)).all()
    possible, _, tokens = engine["late"]
    assert (possible == [True] * 2 + [False] * 11).all() and set(tokens) <= {0, 1}, "no stop token was"
    recorded, sampled = engine["unasked"]
    assert recorded is None and sampled.tolist() == engine["nucleus"][2].tolist(), "recording changes no token"


@pytest.mark.parametrize("name", ["top3", "nucleus", "greedy", "repeated"])
def test_the_likeliest_tokens_are_those_of_the_distribution_that_was_sampled_from(engine: Facts, name: str) -> None:
    top, reference, sampled = engine["top"][name]
    assert top.shape == (24, 5)
    np.testing.assert_allclose(top["logprob"], -np.sort(-reference)[:, :5], atol=2e-5)
    np.testing.assert_allclose(top["logprob"], np.take_along_axis(reference, top["token"], 1), atol=2e-5)
    drawn = top["token"] == engine["tokens"][name][:, None]
    assert np.array_equal(top["logprob"][drawn], sampled[drawn.any(1)]), "a token has one logprob, to the last bit"
    assert np.isneginf(top["logprob"]).any() == (name == "top3"), "impossible tokens are told as such"


def test_who_does_not_ask_is_told_of_no_other_tokens_and_many_are_all_there_are(engine: Facts) -> None:
    assert engine["top"]["unasked"] is None
    assert engine["top"]["all"].shape == (4, 13) and np.allclose(np.exp(engine["top"]["all"]["logprob"]).sum(1), 1)


def test_the_tokens_of_a_prompt_have_the_logprobs_that_the_policy_itself_gives_them(engine: Facts) -> None:
    """However the next token is drawn, and although the cache has the beginning."""
    scored = engine["scored"]
    told, reference = scored["prompt"]["scored"], scored["reference"]
    assert told.shape == (39, 5) and told["token"][:, 0].tolist() == list(LONG_PROMPT[1:])
    np.testing.assert_allclose(told["logprob"], np.take_along_axis(reference, told["token"], 1), atol=2e-5)
    np.testing.assert_allclose(told["logprob"][:, 1:], -np.sort(-reference)[:, :4], atol=2e-5)
    assert scored["cached"] == 0 and scored["tokens"][0] == scored["tokens"][1], "scoring changes no token"
    assert scored["prompt"]["beside"] is None
    assert scored["prompt"]["one token"].shape == (0, 1), "nothing precedes it"


def test_no_stop_token_comes_before_its_time(engine: Facts) -> None:
    tokens, reason = engine["kept_going"]
    assert not set(tokens[:9]) & set(range(2, 13))
    assert 1 in tokens[:9], "the model's own end of sequence is no stop token here"
    assert (
        reason is FinishReason.STOP
        and len(tokens) == 9 + [token in range(2, 13) for token in tokens[9:]].index(True) + 1
    )


def test_a_completion_names_its_weights_and_its_metrics_are_plain_numbers(engine: Facts) -> None:
    assert engine["one"].versions.tolist() == [NO_VERSION] * 2, "weights that no version names"
    metrics = engine["one"].metrics
    of_request = {"seconds_in_engine", "seconds_to_first_token", "prompt_tokens", "cached_tokens"}
    of_step = {"requests_running", "requests_waiting", "kv_use"}
    assert {f"generation/{name}" for name in of_request | of_step} == metrics.keys()
    assert all(type(value) is float for value in metrics.values())
    assert metrics["generation/requests_running"] == 1 and metrics["generation/requests_waiting"] == 0
    assert 0 < metrics["generation/kv_use"] < 1


def test_what_the_cache_had_no_room_for_counts_as_preempted_and_what_a_new_version_dropped_does_not(
    engine: Facts,
) -> None:
    assert engine["slept"] == 0, "on CPU nothing is freed"
    assert engine["preemptions"] == {"dropped": 1.0, "preempted": 1.0}


def test_vllm_still_drops_weights_when_it_packs_them(facts: Facts) -> None:
    assert facts["upstream"]["weight_left_after_packing"] == 0, "adapt_linear is no longer needed"


def test_vllm_still_stumbles_over_other_libraries_in_its_search_for_kernels(facts: Facts) -> None:
    assert facts["upstream"]["kernel_search_stumbled_over"], "_rebind_own_kernels is no longer needed"


def test_vllm_still_names_the_shared_memory_of_all_groups_alike(facts: Facts, engine: Facts) -> None:
    assert engine["identity"] == "//", "the rendezvous port names the group: _group_name_of_process is no longer needed"
    assert facts["upstream"]["group_name"] == "//-tp:0-[0-1]-cpushm"
    assert engine["adapted_group_name"] != facts["upstream"]["group_name"]


def test_norms_are_computed_by_vllms_kernel_which_vllm_still_leaves_unused(engine: Facts) -> None:
    assert engine["norms"] == {"kernel_norm"}
    assert RMSNorm.forward_cpu is CustomOp.forward_cpu, "kernel_norm is no longer needed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strided", [False, True])
def test_a_norm_by_the_kernel_is_vllms_and_a_row_does_not_depend_on_others(dtype: torch.dtype, strided: bool) -> None:
    with set_current_vllm_config(VllmConfig()):
        norm = RMSNorm(48, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    norm.weight.data = torch.randn(48, generator=generator).to(dtype)
    x, residual = torch.randn(2, 37, 4, 96, generator=generator).to(dtype).unbind()
    x, residual = (each[..., :48] if strided else each[..., :48].contiguous() for each in (x, residual))
    tolerance = 1e-5 if dtype is torch.float32 else 0
    expected = norm.forward_native(x.clone(), residual.clone())
    alone = torch.stack([kernel_norm(norm, x[row].clone(), residual[row].clone())[0] for row in range(len(x))])
    plain = kernel_norm(norm, x)
    assert torch.allclose(plain, norm.forward_native(x), rtol=0, atol=tolerance)
    assert torch.equal(plain[3:4], kernel_norm(norm, x[3:4]))
    normed, added = kernel_norm(norm, x, residual)
    assert torch.allclose(normed, expected[0], rtol=0, atol=tolerance) and torch.equal(added, expected[1])
    assert strided or torch.equal(normed, alone)


@pytest.mark.parametrize(("hidden_size", "auto"), [(191, "plain"), (192, "packed")])
def test_linear_layers_of_a_large_policy_are_packed(tmp_path: Path, hidden_size: int, auto: str) -> None:
    (tmp_path / "config.json").write_text(f'{{"hidden_size": {hidden_size}}}')
    assert linear_of(GeneratorConfig(), tmp_path) == auto
    assert linear_of(GeneratorConfig(linear="plain"), tmp_path) == "plain"
    assert linear_of(GeneratorConfig(linear="packed"), tmp_path) == "packed"
    assert linear_of(GeneratorConfig(deterministic=True), tmp_path) == "deterministic"


def test_a_step_without_vllms_runner_leaves_everything_as_vllm_does(facts: Facts) -> None:
    found = facts["decode"]
    assert len(set(found["steps"].values())) == 1
    assert found["different"] == [], "tokens, or what scheduler and batch hold after the step"
    assert found["different_ends"] == [], "to the last bit of each logprob"
    assert set(found["ended"].values()) == {40} and found["reasons"] == set(FinishReason)
    # Otherwise this compares nothing.
    steps, changes, with_new_blocks = found["short"][1.0]
    assert steps > 40 and 10 < changes < steps - 10 and with_new_blocks > 1
    assert 20 < found["short"][0.6][0] < steps and found["short"][0.0][0] == 0
    for name in ("from_cache", "preempted", "two_versions"):
        assert found[name] > 1, name


@pytest.mark.acceptance
def test_a_step_without_vllms_runner_is_vllms_with_two_ranks_too(tiny_models: dict[str, str]) -> None:
    models = {"model": Path(tiny_models["tied_a"]), "other": Path(tiny_models["tied_b"])}
    ours, stock = (run_on_ranks("vllm_engine_scenario:mixed_life", 2, ours=share, **models) for share in (1.0, 0.0))
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine["short"][0] > 40 and theirs["short"][0] == 0
        assert mine["states"] == theirs["states"] and mine["ends"] == theirs["ends"]


def test_vllm_does_not_write_to_sampling_options_that_requests_share(facts: Facts) -> None:
    assert facts["decode"]["params_kept"]


REPLACED = {
    "vllm.v1.engine.core:EngineCore.preprocess_add_request": "a8b386db3f85",
    "vllm.v1.engine.core:EngineCore.add_request": "e1292d26930e",
    "vllm.v1.engine.core:EngineCore.step": "a02d17986fb7",
    "vllm.v1.core.sched.scheduler:Scheduler.schedule": "da4f2cf2fc39",
    "vllm.v1.core.sched.scheduler:Scheduler._update_after_schedule": "2b527eb8070d",
    "vllm.v1.core.sched.scheduler:Scheduler._make_cached_request_data": "8aeb1dc3ba93",
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": "85b29db96051",
    "vllm.v1.core.sched.scheduler:Scheduler._update_request_with_output": "ff6e3f664c99",
    "vllm.v1.request:Request.append_output_token_ids": "8ff2924a5d87",
    "vllm.v1.core.sched.utils:check_stop": "5149b60c92d2",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states": "326599f31b27",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model": "e058bf791a29",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens": "047e6a4738de",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs": "c31a77c123a0",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_input_ids": "9971f6aca2dd",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._preprocess": "c9dda92faeb3",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._init_model_kwargs": "b3aa3514030a",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_slot_mappings": "a7830268c258",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._build_attention_metadata": "6015ffa2b3ec",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._model_forward": "a8f98588a465",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample": "5cb5c1da02cf",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states_after_model_execute": "4675c48e4f11",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync": "13c3e81003a7",
    "vllm.v1.worker.block_table:BlockTable.compute_slot_mapping": "1090515a52c5",
    "vllm.v1.sample.sampler:Sampler.forward": "586fe802add4",
    "vllm.v1.sample.sampler:Sampler.gather_logprobs": "ca39ba3c4e61",
}
"""Functions of vLLM whose work `generation.vllm` does in its own way, and the hash of their source. If one changes,
read it, bring `generation.vllm.steps` up to it, and write the new hash down."""


@pytest.mark.parametrize("name", REPLACED)
def test_vllm_does_what_is_replaced_as_it_did(name: str) -> None:
    source = inspect.getsource(pkgutil.resolve_name(name)).encode()
    assert hashlib.sha256(source).hexdigest()[:12] == REPLACED[name]


current_platform.import_kernels()  # an engine does so when it is built

ROWS, VOCAB = 200_000, 37
DEGREES_OF_FREEDOM = VOCAB - 1
MOST = DEGREES_OF_FREEDOM + 5 * (2 * DEGREES_OF_FREEDOM) ** 0.5
"""Chi-squared beyond five standard deviations. The draws are fixed, so this test has no luck."""

WAYS = {
    "one request over its positions": (np.full(ROWS, 77), np.arange(ROWS)),
    "neighbouring seeds at one position": (np.arange(ROWS), np.full(ROWS, 3)),
    "both at once": (np.arange(ROWS), np.arange(ROWS)),
}


def forward_of(batch: SimpleNamespace, seeds: dict[str, int]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The sampler of random rows, for requests of these seeds."""
    runner = SimpleNamespace(
        input_batch=batch, sampler=SimpleNamespace(topk_topp_sampler=SimpleNamespace(), sample=None)
    )
    running = {name: RunningRequest(make_request(name, seed=seed), 0.0, []) for name, seed in seeds.items()}
    SeededSampling(runner, running, {})
    return runner.sampler.topk_topp_sampler.forward


@pytest.mark.parametrize("way", WAYS)
def test_tokens_follow_the_distribution_and_are_independent(way: str) -> None:
    probabilities = torch.softmax(torch.randn(VOCAB, generator=torch.Generator().manual_seed(0)) * 2, 0)
    seeds, positions = WAYS[way]
    keys = torch.from_numpy(noise_keys(seeds, positions))
    drawn = torch.ops._C.fused_gumbel_argmax(probabilities.log().repeat(ROWS, 1), keys)
    expected = probabilities.double() * ROWS
    found = torch.bincount(drawn, minlength=VOCAB)
    assert float(((found - expected) ** 2 / expected).sum()) < MOST
    # Pairs of neighbours are as often equal as independent draws are.
    equal = float((drawn[1:] == drawn[:-1]).double().mean())
    chance = float((probabilities.double() ** 2).sum())
    assert abs(equal - chance) < 5 * (chance * (1 - chance) / ROWS) ** 0.5


def test_a_token_that_is_cut_off_is_never_drawn() -> None:
    logits = torch.full((1000, VOCAB), -torch.inf)
    logits[:, 5] = 0.0
    keys = torch.from_numpy(noise_keys(np.arange(1000), np.arange(1000)))
    assert torch.ops._C.fused_gumbel_argmax(logits, keys).tolist() == [5] * 1000


def test_a_row_depends_on_its_own_request_alone() -> None:
    batch = SimpleNamespace(req_ids=["a", "b", "c"], num_tokens_no_spec=np.array([7, 900, 7]))
    forward = forward_of(batch, {"a": 2**63 - 1, "b": 0, "c": 2**63 - 1})
    logits = torch.randn(3, 5000)
    logits[2] = logits[0]
    tokens, logprobs = forward(logits.clone(), {}, None, None)
    assert tokens[0] == tokens[2]
    assert torch.equal(logprobs, logits.log_softmax(-1))
    batch.req_ids, batch.num_tokens_no_spec = ["b", "a"], np.array([900, 7])
    turned, _ = forward(logits[[1, 0]], {}, None, None)
    assert turned.tolist() == [tokens[1], tokens[0]]
    batch.num_tokens_no_spec = np.array([901, 8])
    assert forward(logits[[1, 0]], {}, None, None)[0].tolist() != turned.tolist()
