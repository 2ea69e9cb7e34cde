"""The trainer on 1, 2 and 4 ranks against each other, and against transformers. About 30 s on two free cores."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import policy_scenarios as scenario
import pytest
import torch
from policy_scenarios import (
    BATCHES,
    assemble,
    by_expert,
    gradients,
    mixed_batch,
    on_layout,
    relative_error,
    transformer,
)
from safetensors.numpy import load_file, save_file
from support.ranks import Results, Scenario, cells
from support.supports import impossible
from transformers import AutoModelForCausalLM

from titan_rl.errors import ConfigError, TrainingError
from titan_rl.policy.config import TinyPolicyConfig
from titan_rl.policy.models.tiny import make_tiny_policy

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]
TEMPERATURE = 0.7
TIED, UNTIED, LLAMA, MOE, OWN = "tied", "untied", "llama", "moe", "own"
CASES = [(policy, *ranks) for policy in (TIED, LLAMA) for ranks in LAYOUTS]
CASES += [(policy, *ranks) for policy in (UNTIED, OWN) for ranks in ((1, 1), (2, 2))]
CASES += [(MOE, 1, 1), (MOE, 2, 1)]
SHARED_OTHERWISE: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "replicas of shards": ((4, 1), {"replicas": 2}),
    "replicas, sequence": ((2, 2), {"replicas": 2, "sequence_parallel": True, "activation_checkpointing": "selective"}),
}
BOTH_WAYS = [(policy, *ranks) for policy in (TIED, UNTIED, LLAMA) for ranks in ((1, 1), (2, 2))]
BOTH_WAYS += [(OWN, 1, 1), (MOE, 1, 1), (MOE, 2, 1)]
"""What CI runs."""
every_case = pytest.mark.parametrize("case", cells(CASES, ci=BOTH_WAYS), ids=str)
spoilt_layouts = pytest.mark.parametrize("layout", cells(LAYOUTS[1:], ci=[(2, 1), (2, 2)]), ids=str)


def batches_of(policy: str) -> list[str]:
    return list(BATCHES) if policy == TIED else ["mixed", "truncated"]


USER_LOSSES = """
def reinforce(tokens):
    return tokens.advantages * tokens.logprobs, tokens.advantages > 0


def careless(tokens, calls=[]):
    calls.append(1)
    return tokens.logprobs.sum() if len(calls) > 1 else tokens.logprobs, tokens.none()


def spiky(tokens):
    return (tokens.logprobs - tokens.logprobs.detach()).sqrt(), tokens.none()
"""


def broken_checkpoints(source: Path, directory: Path) -> dict[str, str]:
    weights = load_file(source / "model.safetensors")
    norm, embedding = "model.norm.weight", "model.embed_tokens.weight"
    changed = {
        "missing": {name: data for name, data in weights.items() if name != norm},
        "unexpected": weights | {"model.layers.0.self_attn.q_proj.bias": np.zeros(128, np.float32)},
        "wrong shape": weights | {embedding: np.zeros((14, 64), np.float32)},
    }
    for name, tensors in changed.items():
        shutil.copytree(source, directory / name)
        save_file(tensors, directory / name / "model.safetensors")
    return {name: str(directory / name) for name in changed}


@pytest.fixture(scope="module")
def own_family(tmp_path_factory) -> str:
    """The one that the README adds."""
    file = tmp_path_factory.mktemp("own") / "qwen2.py"
    readme = (Path(__file__).parents[2] / "titan_rl/policy/README.md").read_text()
    file.write_text(readme.partition("Save this as `qwen2.py`:")[2].partition("```python\n")[2].partition("```")[0])
    return f"{file}:Qwen2"


@pytest.fixture(scope="module")
def paths(tmp_path_factory, own_family) -> dict[str, Path]:
    cache = tmp_path_factory.mktemp("cache")
    return {
        TIED: make_tiny_policy(TinyPolicyConfig(), cache),
        UNTIED: make_tiny_policy(TinyPolicyConfig(tied_embeddings=False, seed=1), cache),
        LLAMA: make_tiny_policy(TinyPolicyConfig(architecture="llama3", tied_embeddings=False, seed=2), cache),
        MOE: make_tiny_policy(TinyPolicyConfig(architecture="qwen3_moe", seed=3), cache),
        OWN: make_tiny_policy(TinyPolicyConfig(architecture=own_family, tied_embeddings=False), cache),
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def results(paths, directory, own_family) -> Results:
    """Everything that ranks do in this file."""
    loss_file = directory / "user_losses.py"
    loss_file.write_text(USER_LOSSES)
    tied = {"model_path": str(paths[TIED])}
    scenarios: dict[Any, Scenario] = {}
    for policy, data, tensor in CASES:
        scenarios[policy, data, tensor] = on_layout(
            scenario.layout,
            (data, tensor),
            model_path=str(paths[policy]),
            save_to=str(directory / f"{policy}-{data}-{tensor}"),
            batches=batches_of(policy),
            architecture=own_family if policy == OWN else "",
            replay_routes=False,  # no engine has sampled them
        )
    for name, (layout, settings) in SHARED_OTHERWISE.items():
        scenarios[name] = on_layout(
            scenario.layout, layout, **tied, save_to=str(directory / name), batches=["mixed"], **settings
        )
    for layout in LAYOUTS[1:]:
        scenarios["spoilt", *layout] = on_layout(scenario.spoilt_batch, layout, **tied)
        if layout != (1, 2):
            scenarios["bfloat16", *layout] = on_layout(scenario.bfloat16, layout, **tied)
    scenarios["one rank"] = Scenario(
        scenario.one_rank, 1, tied | {"broken": broken_checkpoints(paths[TIED], directory), "loss_file": str(loss_file)}
    )
    scenarios["without plain sums"] = Scenario(scenario.without_plain_sums, 2, tied)
    scenarios["default backend"] = Scenario(scenario.with_default_backend, 2, tied)
    left_out = {*CASES} - {*BOTH_WAYS} | {("spoilt", 1, 2), ("bfloat16", 2, 1)}
    return Results(scenarios, scenarios.keys() - left_out, directory)


@pytest.fixture(scope="module")
def alone(results) -> dict[str, Any]:
    return results["one rank"][0]


def gradients_on(ranks: list[Any], batch: str) -> dict[str, np.ndarray]:
    return gradients([rank["loaded"] for rank in ranks], [rank[batch, "weights"] for rank in ranks])


def reference(path: Path, batch) -> tuple[torch.nn.Module, list[torch.Tensor], list[torch.Tensor]]:
    """transformers' model, and per sample the logprobs [L - 1] and entropies of what follows each token, each over what
    that was drawn from."""
    model = transformer(path)
    logprobs, entropies = [], []
    for entry in batch.samples:
        tokens = torch.from_numpy(entry.token_ids.astype(np.int64))
        logits = model(tokens[None]).logits[0, :-1]
        nowhere = torch.from_numpy(impossible(entry.supports, (len(tokens), logits.shape[-1]))[1:])
        every = torch.log_softmax((logits / TEMPERATURE).masked_fill(nowhere, -1e9), -1)
        logprobs.append(every.gather(1, tokens[1:, None])[:, 0])
        entropies.append(-(every.exp() * every).sum(-1))
    return model, logprobs, entropies


@every_case
def test_every_layout_loads_exactly_the_checkpoint(results, paths, case):
    stored = load_file(paths[case[0]] / "model.safetensors")
    loaded = assemble([rank["loaded"] for rank in results[case]])
    assert loaded.keys() == stored.keys()
    for name in stored:
        np.testing.assert_array_equal(loaded[name], stored[name])


def test_a_tied_head_is_an_alias_and_not_a_shard(results):
    assert results[TIED, 2, 2][0]["aliases"] == (("lm_head.weight", "model.embed_tokens.weight"),)
    assert "lm_head.weight" not in assemble([rank["loaded"] for rank in results[TIED, 2, 2]])
    assert results[UNTIED, 2, 2][0]["aliases"] == ()
    assert "lm_head.weight" in assemble([rank["loaded"] for rank in results[UNTIED, 2, 2]])


@pytest.mark.parametrize("case", cells([case for case in CASES if case[1:] != (1, 1)], ci=BOTH_WAYS), ids=str)
def test_gradients_do_not_depend_on_the_ranks(results, case):
    for batch in batches_of(case[0]):
        error = relative_error(gradients_on(results[case], batch), gradients_on(results[case[0], 1, 1], batch))
        assert error < 1e-5, batch


@pytest.mark.parametrize("name", SHARED_OTHERWISE)
def test_replicas_and_shared_sequences_have_the_gradients_of_one_rank(results, name):
    error = relative_error(gradients_on(results[name], "mixed"), gradients_on(results[TIED, 1, 1], "mixed"))
    assert error < 1e-5
    assert results[name][-1]["mixed", "metrics"]["loss"] == pytest.approx(
        results[TIED, 1, 1][0]["mixed", "metrics"]["loss"], rel=1e-4
    )


@every_case
def test_metrics_are_the_same_plain_floats_on_all_ranks(results, case):
    for batch in batches_of(case[0]):
        first, *others = [rank[batch, "metrics"] for rank in results[case]]
        assert all(type(value) is float for value in first.values())
        assert all(other == first for other in others)
        one = results[case[0], 1, 1][0][batch, "metrics"]
        assert first == pytest.approx(one | {"imbalance": first["imbalance"]}, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("case", [(TIED, 1, 1), (UNTIED, 2, 2), (LLAMA, 1, 1), (MOE, 2, 1)], ids=str)
@pytest.mark.parametrize("batch_name", ["mixed", "truncated"])
def test_the_clipped_gradient_is_the_one_derived_by_hand(results, paths, case, batch_name):
    """The clip leaves or removes a token's gradient: d loss = -A r d logprob where it leaves it."""
    batch = BATCHES[batch_name]()
    model, logprobs, entropies = reference(paths[case[0]], batch)
    loss = torch.zeros(())
    sides = set()
    for entry, logprob, entropy in zip(batch.samples, logprobs, entropies, strict=True):
        for position in np.flatnonzero(entry.loss_mask):
            new, advantage = logprob[position - 1], entry.advantage
            ratio = float(new.detach().exp()) / float(np.exp(entry.logprobs[position]))
            removed = ratio > 1.2 if advantage > 0 else ratio < 0.8
            sides.add((advantage > 0, ratio > 1, removed))
            if not removed:
                loss = loss - advantage * ratio * new
            loss = loss - 0.01 * entropy[position - 1]
    (loss / batch.trained_tokens).backward()
    assert {(True, True, True), (False, False, True), (True, False, False), (False, True, False)} <= sides
    gradients_of = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    wanted = {name: each.astype(np.float64) for name, each in by_expert(gradients_of).items()}
    assert relative_error(gradients_on(results[case], batch_name), wanted) < 2e-5
    norm = np.sqrt(sum(np.sum(gradient**2) for gradient in wanted.values()))
    assert results[case][0][batch_name, "metrics"]["grad_norm"] == pytest.approx(norm, rel=1e-5)


@every_case
@pytest.mark.parametrize("batch_name", ["mixed", "truncated"])
def test_logprobs_equal_those_of_transformers(results, paths, case, batch_name):
    batch = BATCHES[batch_name]()
    _, wanted, _ = reference(paths[case[0]], batch)
    got: dict = {}
    for rank in results[case]:
        got |= rank[batch_name, "logprobs"]
    assert len(got) == len(batch)
    for entry, logprobs in zip(batch.samples, wanted, strict=True):
        array = got[entry.group_id, entry.sample]
        assert array.dtype == np.float32
        np.testing.assert_allclose(array, logprobs.detach().numpy()[entry.loss_mask[1:]], atol=3e-6)


@every_case
def test_a_saved_checkpoint_is_loaded_by_transformers_and_is_the_trained_policy(results, directory, case):
    saved = directory / "-".join(map(str, case))
    assert all("others holds notes, which would be deleted" in rank["refused"] for rank in results[case])
    trained = assemble([rank[batches_of(case[0])[-1], "weights"] for rank in results[case]])
    model = AutoModelForCausalLM.from_pretrained(saved)
    assert model.config.tie_word_embeddings == (case[0] in (TIED, MOE))
    parameters = by_expert({name: parameter.detach().numpy() for name, parameter in model.named_parameters()})
    assert parameters.keys() == trained.keys()
    for name in trained:
        np.testing.assert_array_equal(parameters[name], trained[name])
    assert json.loads((saved / "config.json").read_text())["dtype"] == "float32"
    assert (saved / "tokenizer.json").exists()
    assert not [entry for entry in saved.parent.iterdir() if entry.name.startswith(".")]


@spoilt_layouts
def test_nan_stops_all_ranks_by_name_and_leaves_the_weights(results, layout):
    ranks = results["spoilt", *layout]
    errors = {rank["error"] for rank in ranks}
    assert len(errors) == 1
    error = errors.pop()
    assert "step 1" in error and "rank" in error and "loss is nan" in error
    for rank in ranks:
        assert rank["step"] == 1
        for before, after in zip(rank["before"], rank["after"], strict=True):
            np.testing.assert_array_equal(before[1], after[1])
        assert np.isfinite(rank["next"]["loss"])


@spoilt_layouts
def test_replicated_weights_stay_equal_through_clipped_steps(results, layout):
    assemble([rank["before"] for rank in results["spoilt", *layout]])  # compares the replicas


def test_only_the_rank_that_computed_the_nan_is_blamed(results):
    error = results["spoilt", 2, 1][0]["error"]
    assert ("rank 0" in error) != ("rank 1" in error)


def test_a_finite_loss_with_an_infinite_gradient_is_stopped_too(alone):
    assert isinstance(alone["spike"], TrainingError)
    assert "step 0: rank 0: gradient norm is" in str(alone["spike"])
    for before, after in zip(alone["before spike"], alone["after spike"], strict=True):
        np.testing.assert_array_equal(before[1], after[1])


@pytest.mark.parametrize("layout", cells([(2, 1), (2, 2)], ci=[(2, 2)]), ids=str)
def test_bfloat16_trains(results, layout):
    for steps in results["bfloat16", *layout]:
        assert all(np.isfinite(value) for step in steps for value in step.values())
        assert steps[-1]["loss"] < steps[0]["loss"]


def test_fsdp_still_reduces_with_what_gloo_lacks(results):
    """When this fails, `reduce_gradients_by_plain_sums` can go."""
    assert all("PREMUL_SUM" in text for text in results["without plain sums"])


def test_the_default_spmd_backend_still_fails_on_two_ranks(results):
    """When this fails, `SPMD_BACKEND` can go."""
    assert all(results["default backend"])


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("missing", ConfigError, ["model.norm.weight", "missing"]),
        ("unexpected", ConfigError, ["q_proj.bias"]),
        ("wrong shape", ConfigError, ["embed_tokens", "(14, 64)", "(13, 64)"]),
        ("too many ranks", ConfigError, []),
        ("compiled", ConfigError, ["trainer.compile", "CUDA"]),
        ("undivided heads", ConfigError, ["kv heads"]),
        ("nothing to train", TrainingError, ["trained token"]),
        ("over the budget", TrainingError, ["max_tokens_per_microbatch"]),
        ("over the positions", TrainingError, ["positions"]),
        ("sum instead of tokens", TrainingError, ["the loss returned []"]),
    ],
)
def test_what_cannot_be_is_refused_by_name_before_anything_changes(alone, name, kind, words):
    assert isinstance(alone[name], kind)
    assert all(word in str(alone[name]) for word in words)
    assert alone["steps after errors"] == 0 and not alone["gradients after errors"]


@pytest.mark.parametrize("other", ["checkpointed", "one micro-batch"])
def test_memory_settings_do_not_change_the_update(alone, other):
    assert relative_error(gradients_on([alone], other), gradients_on([alone], "plain")) < 1e-5


def test_a_custom_loss_is_named_by_its_file(alone):
    batch = mixed_batch()
    good = sum((entry.advantage > 0) * entry.loss_mask.sum() for entry in batch.samples) / batch.trained_tokens
    assert alone["custom loss", "metrics"]["clip_share"] == pytest.approx(good)
    before = assemble([alone["loaded"]])
    after = assemble([alone["custom loss", "weights"]])
    assert any((before[name] != after[name]).any() for name in before)


def test_the_learning_rate_warms_up_decays_and_stays(alone):
    lr = alone["lr"]
    assert lr[:5] == pytest.approx([0.5, 1, 1, 1, 1])
    assert lr[5] < lr[4] and lr[7] < lr[6]
    assert lr[8] == lr[9] == lr[7]


def test_only_tokens_of_this_very_version_are_compared_with_the_engine(alone):
    first, second = alone["on-policy"]
    assert first["on_policy_tokens"] == first["trained_tokens"]
    assert first["logprob_difference_max"] < 2e-5
    assert first["logprob_outside_share"] == 0
    assert first["weight_max"] == pytest.approx(1, abs=2e-5)
    assert second["on_policy_tokens"] == 0
    assert second["logprob_difference_max"] == 0
    assert abs(second["weight_max"] - 1) > 1e-3


@every_case
def test_how_far_the_samples_are_off_policy_is_measured_over_all_tokens_once(results, paths, case):
    batch = mixed_batch()
    _, logprobs, _ = reference(paths[case[0]], batch)
    log_ratio = np.concatenate(
        [
            logprob.detach().double().numpy()[entry.loss_mask[1:]] - entry.logprobs[entry.loss_mask]
            for entry, logprob in zip(batch.samples, logprobs, strict=True)
        ]
    )
    weight = np.exp(log_ratio)
    wanted = {
        "kl_k3": np.mean(weight - 1 - log_ratio),
        "weight_mean": weight.mean(),
        "weight_max": weight.max(),
        "effective_sample_size": weight.sum() ** 2 / np.sum(weight**2) / batch.trained_tokens,
        "logprob_difference_mean": np.mean(np.abs(log_ratio)),
        "logprob_difference_max": np.max(np.abs(log_ratio)),
        "logprob_outside_share": np.mean((weight < 0.9) | (weight > 1.1)),
        "on_policy_tokens": batch.trained_tokens,
    }
    for rank in results[case]:
        got = rank["mixed", "metrics"]
        assert {name: got[name] for name in wanted} == pytest.approx(wanted, rel=1e-5)
