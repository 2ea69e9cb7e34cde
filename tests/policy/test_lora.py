"""LoRA in the trainer: torchtitan's adapters against a float64 oracle, on one rank and on several (40 s)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import lora_scenarios as scenario
import numpy as np
import pytest
import torch
from lora_scenarios import LORA
from policy_scenarios import assemble, gradient_of, mixed_batch, on_layout, relative_error
from safetensors.numpy import load_file
from support.ranks import Results, cells
from transformers import AutoModelForCausalLM

from titan_rl.errors import ConfigError
from titan_rl.policy.config import LoraConfig, LoraTarget, TinyPolicyConfig
from titan_rl.policy.models.tiny import make_tiny_policy
from titan_rl.policy.training_state import WEIGHTS, read_tensors

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]
OF_CI = [(1, 1), (2, 2)]
every_layout = pytest.mark.parametrize("layout", cells(LAYOUTS, ci=OF_CI), ids=str)
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def base(tmp_path_factory: Any) -> Path:
    return make_tiny_policy(TinyPolicyConfig(), tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def results(base: Path, saved: Path, tmp_path_factory: Any) -> Results:
    scenarios = {
        each: on_layout(scenario.layout, each, model_path=str(base), save_to=str(saved / f"{each}")) for each in LAYOUTS
    }
    other = make_tiny_policy(TinyPolicyConfig(seed=1), base.parent)
    paths = {"model_path": str(base), "other": str(other), "directory": str(saved / "state")}
    scenarios["resumed"] = on_layout(scenario.resumed, (1, 2), **paths)
    return Results(scenarios, [*OF_CI, "resumed"], tmp_path_factory.mktemp("ranks"))


class Unmerged(torch.nn.Module):
    """base x + (alpha / r) B A x, in float64."""

    def __init__(self, linear: torch.nn.Linear, a: np.ndarray, b: np.ndarray) -> None:
        super().__init__()
        self.linear = linear
        self.a, self.b = (torch.nn.Parameter(torch.from_numpy(each).double()) for each in (a, b))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + LORA.lora_alpha / LORA.r * ((x @ self.a.T) @ self.b.T)


def oracle(base: Path, adapters: dict[str, np.ndarray], *, merged: bool) -> torch.nn.Module:
    """transformers' model in float64 with adapters, unmerged or merged by a matrix product."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64, attn_implementation="eager")
    for name in {name.rsplit(".", 2)[0] for name in adapters}:
        parent, last = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        a, b = adapters[f"{name}.lora_A.weight"], adapters[f"{name}.lora_B.weight"]
        linear = getattr(parent, last)
        if merged:
            linear.weight.data += LORA.lora_alpha / LORA.r * torch.from_numpy(b.astype(np.float64) @ a)
        else:
            setattr(parent, last, Unmerged(linear, a, b))
    return model


def logprobs_of(model: torch.nn.Module, entry: Any) -> torch.Tensor:
    tokens = torch.from_numpy(entry.token_ids.astype(np.int64))
    every = torch.log_softmax(model(tokens[None]).logits[0, :-1] / TEMPERATURE, -1)
    return every.gather(1, tokens[1:, None])[:, 0][torch.from_numpy(entry.loss_mask[1:])]


def gradients_of(rank: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: gradient_of(rank["filled"][name], rank["after"][name]) for name in rank["filled"]}


def test_every_matrix_of_every_layer_has_an_adapter_and_nothing_else_has(results: Results) -> None:
    names = {name.removeprefix("model.layers.") for name in results[1, 1][0]["start"]}
    assert {tuple(name.split(".")[i] for i in (0, 2, 3)) for name in names} == {
        (layer, module, kind) for layer in "01" for module in get_args(LoraTarget) for kind in ("lora_A", "lora_B")
    }


@every_layout
def test_adapters_begin_as_peft_has_them_and_alike_in_every_layout(results: Results, layout: tuple[int, int]) -> None:
    for rank in results[layout]:
        for name, tensor in rank["start"].items():
            np.testing.assert_array_equal(tensor, results[1, 1][0]["start"][name])
            if "lora_B" in name:
                assert not tensor.any()
            else:
                bound = tensor.shape[1] ** -0.5
                assert 0.8 * bound < abs(tensor).max() <= bound
                assert tensor.std() == pytest.approx(bound / 3**0.5, rel=0.2)


def test_merged_equals_unmerged_in_float64_and_both_the_trainer(results: Results, base: Path) -> None:
    rank = results[1, 1][0]
    merged, unmerged = (oracle(base, rank["filled"], merged=merged) for merged in (True, False))
    plain = oracle(base, {}, merged=True)
    moved = 0.0
    with torch.no_grad():
        for entry in mixed_batch().samples:
            one, other, before = (logprobs_of(model, entry).numpy() for model in (merged, unmerged, plain))
            np.testing.assert_allclose(one, other, atol=1e-12)
            np.testing.assert_allclose(rank["logprobs"][entry.group_id, entry.sample], one, atol=1e-5)
            moved = max(moved, abs(one - before).max(initial=0))
    assert moved > 0.1  # else adapters that do nothing would pass


@every_layout
def test_gradients_of_a_and_b_are_those_of_the_oracle(results: Results, base: Path, layout: tuple[int, int]) -> None:
    rank = results[layout][0]
    model, batch = oracle(base, results[1, 1][0]["filled"], merged=False), mixed_batch()
    loss = torch.zeros((), dtype=torch.float64)
    for entry in batch.samples:
        new = logprobs_of(model, entry)
        ratio = (new - torch.from_numpy(entry.logprobs[entry.loss_mask]).double()).exp()
        clipped = ratio.clamp(0.8, 1.2)
        loss = loss - torch.minimum(entry.advantage * ratio, entry.advantage * clipped).sum()
    (loss / batch.trained_tokens).backward()
    wanted = {
        name.replace(".a", ".lora_A.weight").replace(".b", ".lora_B.weight"): parameter.grad.numpy()
        for name, parameter in model.named_parameters()
        if isinstance(model.get_submodule(name.rpartition(".")[0]), Unmerged)
    }
    assert relative_error(gradients_of(rank), wanted) < 5e-5


@every_layout
def test_the_base_stays_bit_for_bit_and_replicas_of_adapters_too(results: Results, layout: tuple[int, int]) -> None:
    ranks = results[layout]
    before, after = (assemble([rank[name] for rank in ranks]) for name in ("base", "base after"))
    for name in before:
        np.testing.assert_array_equal(before[name], after[name])
    for rank in ranks:
        for name, tensor in rank["after"].items():
            np.testing.assert_array_equal(tensor, ranks[0]["after"][name])
            assert (tensor != rank["filled"][name]).any()


def test_state_and_moments_are_of_the_adapters_alone(results: Results) -> None:
    rank = results[1, 1][0]
    assert {name.removeprefix("model.") for name in rank["state"] if name.startswith("model.")} == rank["start"].keys()
    moments = {name.removesuffix(".exp_avg") for name in rank["state"] if name.endswith(".exp_avg")}
    assert len(moments) == len(rank["start"]) and all("lora_" in name for name in moments)


@every_layout
def test_what_is_saved_is_an_adapter_as_peft_has_it_and_the_merged_weights(
    results: Results, base: Path, saved: Path, layout: tuple[int, int]
) -> None:
    after, directory = results[layout][0]["after"], saved / f"{layout}"
    config = json.loads((directory / "adapter/adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", LORA.r, LORA.lora_alpha)
    assert sorted(config["target_modules"]) == sorted(get_args(LoraTarget))
    adapters = load_file(directory / "adapter/adapter_model.safetensors")
    assert adapters.keys() == {f"base_model.model.{name}" for name in after}
    for name, tensor in after.items():
        np.testing.assert_array_equal(adapters[f"base_model.model.{name}"], tensor)
    merged, wanted = AutoModelForCausalLM.from_pretrained(directory), oracle(base, after, merged=True)
    for (name, one), other in zip(merged.state_dict().items(), wanted.state_dict().values(), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=1e-6 * float(abs(other).max()), msg=name)


def test_a_checkpoint_goes_on_bit_for_bit_on_its_base_and_is_refused_on_another(results: Results, saved: Path) -> None:
    for rank in results["resumed"]:
        for name, tensor in rank["saved"].items():
            np.testing.assert_array_equal(rank["restored"][name], tensor)
        assert rank["next again"] == rank["next"] and rank["next"]["reference_kl_k3"] > 0
        for what, alpha in (("base", 6), ("alpha", 12)):
            assert re.search(f"it lacks 1 elements of adapters of base .* with lora_alpha {alpha}", rank[what])
    stored = read_tensors(saved / "state", WEIGHTS)
    for name, tensor in results["resumed"][0]["saved"].items():
        np.testing.assert_array_equal(stored.pop(name).numpy(), tensor)
    assert not stored, "the base is in no checkpoint"


@pytest.mark.parametrize("targets", [(), ("q_proj", "v_proj")], ids=str)
def test_targets_that_cannot_be_are_refused_by_name(targets: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="trainer.lora.target_modules"):
        LoraConfig(r=4, target_modules=targets)
