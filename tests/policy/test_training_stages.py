"""Warm-up, the KL term's reference policy and the logprob alarm on 1, 2 and 4 ranks (about 70 s on two free cores)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from policy_ranks import Results, Scenario, cells
from policy_scenarios import assemble, gradient_of, mixed_batch
from stage_scenarios import COEFFICIENT, TEMPERATURE, WARMUP, demonstrations
from transformers import AutoModelForCausalLM

from titan_rl.errors import TrainingError
from titan_rl.policy.config import TinyPolicyConfig
from titan_rl.policy.models.tiny import make_tiny_policy

REFERENCE_LAYOUTS = [(1, 1), (2, 1), (1, 2)]
LAYOUTS = [*REFERENCE_LAYOUTS, (2, 2)]
ESTIMATES = [(1, 1, "k1"), (1, 1, "k2"), *((*layout, "k3") for layout in REFERENCE_LAYOUTS)]
LEFT_OUT = [("reference", 1, 2), ("warm-up", 2, 1), ("warm-up", 1, 2)]
"""By CI; (2, 2) goes both ways."""
reference_layouts = pytest.mark.parametrize("layout", cells(REFERENCE_LAYOUTS, ci=[(1, 1), (2, 1)]), ids=str)
layouts = pytest.mark.parametrize("layout", cells(LAYOUTS, ci=[(1, 1), (2, 2)]), ids=str)


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, Path]:
    cache = tmp_path_factory.mktemp("cache")
    return {name: make_tiny_policy(TinyPolicyConfig(seed=seed), cache) for seed, name in enumerate(["start", "other"])}


@pytest.fixture(scope="module")
def results(paths, tmp_path_factory) -> Results:
    """Everything that ranks do in this file."""
    directory = tmp_path_factory.mktemp("ranks")
    start = {"model_path": str(paths["start"])}
    scenarios: dict[Any, Scenario] = {}
    for data, tensor in LAYOUTS:
        sizes = {"data_parallel": data, "tensor_parallel": tensor}
        if (data, tensor) in REFERENCE_LAYOUTS:
            estimators = [estimator for *layout, estimator in ESTIMATES if layout == [data, tensor]]
            other = {"other_path": str(paths["other"]), "estimators": estimators}
            scenarios["reference", data, tensor] = Scenario("reference", data * tensor, start | sizes | other)
        saved = {"save_to": str(directory / f"warm-{data}-{tensor}")}
        scenarios["warm-up", data, tensor] = Scenario("warm_up", data * tensor, start | sizes | saved)
    for adapted in (True, False):
        scenarios["uneven", adapted] = Scenario(
            "tied_and_uneven", 4, start | {"save_to": str(directory / f"uneven-{adapted}"), "adapted": adapted}
        )
    scenarios["one rank"] = Scenario("one_rank", 1, start)
    for scenario in scenarios.values():
        scenario.module, scenario.keep_world = "stage_scenarios", True
    by_ranks = dict(sorted(scenarios.items(), key=lambda entry: entry[1].ranks))
    return Results(by_ranks, by_ranks.keys() - set(LEFT_OUT), directory)


def gradients(before: list[Any], after: list[Any]) -> dict[str, np.ndarray]:
    old, new = assemble(before), assemble(after)
    return {name: gradient_of(old[name], new[name]) for name in old}


def relative(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> float:
    """The largest relative error (2-norm) of any tensor."""
    assert got.keys() == wanted.keys()
    return max(np.linalg.norm(got[name] - wanted[name]) / np.linalg.norm(wanted[name]) for name in wanted)


def transformer(path: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


def trained_logprobs(model: torch.nn.Module, sample: Any, temperature: float = TEMPERATURE) -> torch.Tensor:
    """Of a sample's trained tokens."""
    tokens = torch.from_numpy(sample.token_ids.astype(np.int64))
    every = torch.log_softmax(model(tokens[None]).logits[0, :-1] / temperature, -1)
    return every.gather(1, tokens[1:, None])[:, 0][torch.from_numpy(sample.loss_mask[1:])]


def gradients_of(model: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: parameter.grad.numpy().astype(np.float64) for name, parameter in model.named_parameters()}


@reference_layouts
def test_the_kl_to_the_start_is_nothing_at_the_start_and_grows(results, layout):
    for rank in results["reference", *layout]:
        kl = [step["reference_kl_k3"] for step in rank["steps"]]
        assert kl[0] == 0.0
        assert 0 < kl[1] < kl[2] < kl[3]
        assert rank["against itself"] == 0.0


@pytest.mark.parametrize("case", cells(ESTIMATES, ci=ESTIMATES[:-1]), ids=str)
def test_the_gradient_with_a_kl_term_is_the_naive_one(results, paths, case):
    *layout, estimator = case
    ranks = results["reference", *layout]
    model, frozen = transformer(paths["start"]), transformer(paths["other"])
    batch = mixed_batch()
    loss, values = torch.zeros(()), {"k1": 0.0, "k3": 0.0}
    for sample in batch.samples:
        new = trained_logprobs(model, sample)
        with torch.no_grad():
            difference = new - trained_logprobs(frozen, sample)
        # d/dx of x^2 / 2 and of exp(-x) - 1 + x; k1 has the gradient of k2.
        slope = difference if estimator != "k3" else 1 - (-difference).exp()
        loss = loss - (sample.advantage * new).sum() + COEFFICIENT * (slope * new).sum()
        values["k1"] += difference.sum().item()
        values["k3"] += ((-difference).exp() - 1 + difference).sum().item()
    (loss / batch.trained_tokens).backward()
    got = gradients([rank["loaded"] for rank in ranks], [rank[estimator, "weights"] for rank in ranks])
    assert relative(got, gradients_of(model)) < 2e-5
    for rank in ranks:
        metrics = rank[estimator, "metrics"]
        for name, value in values.items():
            assert metrics[f"reference_kl_{name}"] == pytest.approx(value / batch.trained_tokens, rel=1e-4)


@reference_layouts
def test_a_step_without_a_reference_is_refused(results, layout):
    for rank in results["reference", *layout]:
        assert isinstance(rank["without a reference"], TrainingError)
        assert "freeze_reference" in str(rank["without a reference"])
        assert rank["untouched"]


@layouts
def test_the_warm_up_is_adamw_on_the_cross_entropy_of_the_responses(results, paths, layout):
    ranks = results["warm-up", *layout]
    model = transformer(paths["start"])
    batch = demonstrations()
    adamw = torch.optim.AdamW(model.parameters(), lr=1.0, betas=WARMUP.betas, weight_decay=0.0)
    for number, step in enumerate(ranks[0]["steps"]):
        loss = -sum(trained_logprobs(model, sample, 1.0).sum() for sample in batch.samples) / batch.trained_tokens
        adamw.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), WARMUP.max_grad_norm).item()
        assert (step["loss"], step["grad_norm"]) == pytest.approx((loss.item(), norm), rel=1e-3), number
        adamw.param_groups[0]["lr"] = step["lr"]
        adamw.step()
    warmed, loaded = (assemble([rank[key] for rank in ranks]) for key in ("warmed", "loaded"))
    wanted = {name: parameter.detach().numpy() - loaded[name] for name, parameter in model.named_parameters()}
    assert relative({name: warmed[name] - loaded[name] for name in loaded}, wanted) < 0.02
    assert all(rank["steps"] == ranks[0]["steps"] for rank in ranks)


def test_the_warm_up_has_its_own_rates(results):
    """Two steps up, then linearly towards a tenth."""
    lr = [step["lr"] / WARMUP.lr for step in results["warm-up", 1, 1][0]["steps"]]
    assert lr[:3] == pytest.approx([0.5, 1.0, 1.0])
    assert np.diff(lr[2:]) == pytest.approx([-0.9 / 4] * 3)
    assert 0.1 <= lr[-1]


@layouts
def test_rl_begins_after_the_warm_up_as_if_from_a_checkpoint(results, layout):
    """At version 0, with an empty optimizer and its own schedule."""
    for rank in results["warm-up", *layout]:
        assert rank["version"] == 0
        for mine, fresh in zip(rank["trained"], rank["fresh trained"], strict=True):
            np.testing.assert_array_equal(mine[1], fresh[1])
        assert rank["first"]["lr"] == rank["fresh first"]["lr"] == 1e-3


@layouts
def test_a_stage_out_of_place_is_refused(results, layout):
    for rank in results["warm-up", *layout]:
        for name, word in (
            ("too late", "after 1 RL steps"),
            ("not configured", "trainer.warmup.steps"),
            ("no reference configured", "trainer.kl.coefficient"),
        ):
            assert isinstance(rank[name], TrainingError)
            assert word in str(rank[name])


def test_a_tied_weight_of_uneven_shards_is_gathered_as_it_is_now(results):
    assert max(results["uneven", True]) < 2e-6


def test_fsdp_still_gathers_a_tied_weight_of_uneven_shards_as_it_was(results):
    """When this fails, `share_padding_of_tied_shards` can go."""
    assert max(results["uneven", False]) > 1e-2


def test_the_decoupled_loss_has_the_gradient_of_decoupled_ppo(results, paths):
    """With logprobs recomputed over the batch before the step, as the paper does."""
    alone = results["one rank"][0]
    model, batch = transformer(paths["start"]), mixed_batch()
    loss, dropped = torch.zeros(()), 0
    for sample in batch.samples:
        mask = sample.loss_mask
        weight = np.exp(alone["scored"][sample.group_id, sample.sample][mask] - sample.logprobs[mask])
        dropped += int((weight > 2.0).sum())
        weight = torch.from_numpy(np.where(weight > 2.0, 0, weight))
        loss = loss - (weight * sample.advantage * trained_logprobs(model, sample)).sum()
    (loss / batch.trained_tokens).backward()
    got = gradients([alone["loaded"]], [alone["decoupled", "weights"]])
    assert relative(got, gradients_of(model)) < 2e-5
    assert dropped
    assert alone["decoupled", "metrics"]["clip_share"] == pytest.approx(dropped / batch.trained_tokens)


def test_the_alarm_warns_in_the_metrics_and_stops_at_the_limit(results):
    alone = results["one rank"][0]
    assert (alone["equal"]["logprob_alarm"], alone["off"]["logprob_alarm"]) == (0.0, 1.0)
    assert alone["equal"]["logprob_outside_share"] == 0.0 and alone["off"]["logprob_outside_share"] == 1.0
    assert alone["off"]["logprob_difference_mean"] == pytest.approx(0.2, abs=1e-4)
    assert isinstance(alone["far off"], TrainingError)
    assert "stop_mean" in str(alone["far off"]) and "weights were not changed" in str(alone["far off"])
    before, after = assemble([alone["loaded"]]), assemble([alone["far off", "weights"]])
    assert all((before[name] == after[name]).all() for name in before)
    assert math.isfinite(alone["off"]["loss"])
