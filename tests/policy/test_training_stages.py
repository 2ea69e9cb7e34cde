"""Warm-up, the KL term's reference policy and the logprob alarm on 1, 2 and 4 ranks (about 70 s on two free cores)."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from policy_scenarios import (
    REVEALING,
    assemble,
    gradients,
    logprobs_of,
    mixed_batch,
    on_layout,
    relative_error,
    sampled_with,
    shards_of,
    train,
    trainer,
    transformer,
    updater,
)
from support.ranks import Results, Scenario, cells

from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.errors import TitanError, TrainingError
from titan_rl.policy.config import (
    KLConfig,
    LogprobAlarmConfig,
    LossConfig,
    OptimizerConfig,
    TinyPolicyConfig,
    WarmupConfig,
)
from titan_rl.policy.models.checkpoint import load_weights
from titan_rl.policy.models.tiny import make_tiny_policy
from titan_rl.types import NO_VERSION

TEMPERATURE = 0.7
COEFFICIENT = 0.5
WARMUP = WarmupConfig(steps=6, batch=8, lr=1e-2, lr_warmup_steps=2)
BETA = 0.3

REFERENCE_LAYOUTS = [(1, 1), (2, 1), (1, 2)]
LAYOUTS = [*REFERENCE_LAYOUTS, (2, 2)]
IN_REWARD = " in reward"
ESTIMATES = [(1, 1, "k1"), (1, 1, "k2"), *((*layout, "k3") for layout in REFERENCE_LAYOUTS)]
ESTIMATES[:0] = [(1, 1, "k1" + IN_REWARD), (2, 1, "k3" + IN_REWARD)]
LEFT_OUT = [("reference", 1, 2), ("warm-up", 2, 1), ("warm-up", 1, 2), *(("pairs", *each) for each in LAYOUTS[1:])]
"""By CI; (2, 2) goes both ways."""
reference_layouts = pytest.mark.parametrize("layout", cells(REFERENCE_LAYOUTS, ci=[(1, 1), (2, 1)]), ids=str)
layouts = pytest.mark.parametrize("layout", cells(LAYOUTS, ci=[(1, 1), (2, 2)]), ids=str)


def outcome(action: Any) -> Any:
    try:
        return action()
    except TitanError as error:
        return error


def against_reference(
    model_path: str, other_path: str, data_parallel: int, tensor_parallel: int, estimators: list[str]
) -> dict[str, Any]:
    """Steps against a frozen copy of the start, and gradients against another policy."""
    result: dict[str, Any] = {}
    batch = mixed_batch()
    plain = trainer(data_parallel, tensor_parallel, kl=KLConfig(coefficient=COEFFICIENT))

    free = replace(plain, optimizer=OptimizerConfig(lr=1e-4), kl=KLConfig(coefficient=1e-3))
    policy = updater(model_path, free, temperature=TEMPERATURE)
    before = shards_of(policy)
    result["without a reference"] = outcome(lambda: train(policy, batch))
    result["untouched"] = all((old[1] == new[1]).all() for old, new in zip(before, shards_of(policy), strict=True))
    policy.freeze_reference()
    result["steps"] = [train(policy, batch) for _ in range(4)]
    policy.freeze_reference()
    result["against itself"] = train(policy, batch)["reference_kl_k3"]

    for estimator in estimators:
        config = replace(
            plain,
            optimizer=REVEALING,
            loss=LossConfig(name="reinforce"),
            kl=KLConfig(
                coefficient=COEFFICIENT,
                estimator=estimator.removesuffix(IN_REWARD),
                in_reward=estimator.endswith(IN_REWARD),
            ),
        )
        policy = updater(other_path, config, temperature=TEMPERATURE)
        policy.freeze_reference()
        load_weights(policy._policy, Path(model_path))
        result["loaded"] = shards_of(policy)
        result[estimator, "metrics"] = train(policy, batch)
        result[estimator, "weights"] = shards_of(policy)
    taught = updater(model_path, replace(config, kl=replace(config.kl, teacher=other_path)), temperature=TEMPERATURE)
    taught.freeze_reference()
    train(taught, batch)
    result["taught"] = shards_of(taught)
    return result


def demonstrations() -> SampleBatch:
    """Samples as a warm-up gets them: nothing of them was sampled by a policy."""
    return SampleBatch.of(
        replace(
            sample,
            logprobs=np.zeros_like(sample.logprobs),
            versions=np.full_like(sample.versions, NO_VERSION),
            advantages=0.0,
        )
        for sample in mixed_batch().samples
    )


def warm_up(model_path: str, save_to: str, data_parallel: int, tensor_parallel: int) -> dict[str, Any]:
    """The whole warm-up, then one RL step; the same RL step from the weights that the warm-up saved."""
    batch = demonstrations()
    config = trainer(data_parallel, tensor_parallel, warmup=WARMUP, optimizer=OptimizerConfig(lr=1e-3))
    policy = updater(model_path, config, temperature=TEMPERATURE)
    result: dict[str, Any] = {"loaded": shards_of(policy)}
    result["steps"] = [policy.warm_up_step(batch, policy.plan(batch)) for _ in range(WARMUP.steps)]
    result["version"] = policy.step
    result["warmed"] = shards_of(policy)
    policy.save_hf(Path(save_to))
    result["first"] = train(policy, mixed_batch())
    result["trained"] = shards_of(policy)
    result["too late"] = outcome(lambda: policy.warm_up_step(batch, policy.plan(batch)))
    fresh = updater(save_to, config, temperature=TEMPERATURE)
    result["fresh first"] = train(fresh, mixed_batch())
    result["fresh trained"] = shards_of(fresh)
    cold = updater(model_path, trainer(data_parallel, tensor_parallel))
    result["not configured"] = outcome(lambda: cold.warm_up_step(batch, cold.plan(batch)))
    result["no reference configured"] = outcome(cold.freeze_reference)
    return result


def pairs() -> SampleBatch:
    """Two answers of each pair, the first one preferred; three pairs to a group."""
    trained = [sample for sample in demonstrations().samples if sample.loss_mask.any()]
    return SampleBatch.of(
        replace(sample, group_id=number // 6, sample=number % 6, advantages=(-1.0) ** number * sample.loss_mask)
        for number, sample in enumerate(trained[: len(trained) // 2 * 2])
    )


def from_pairs(model_path: str, data_parallel: int, tensor_parallel: int) -> dict[str, Any]:
    """The whole warm-up on pairs, then an RL step and a refused warm-up step."""
    batch = pairs()
    config = trainer(data_parallel, tensor_parallel, warmup=replace(WARMUP, dpo_beta=BETA))
    policy = updater(model_path, config, temperature=TEMPERATURE)
    result: dict[str, Any] = {"loaded": shards_of(policy)}
    result["steps"] = [policy.warm_up_step(batch, policy.plan(batch)) for _ in range(WARMUP.steps)]
    result["warmed"] = shards_of(policy)
    result["first"] = train(policy, mixed_batch())
    return result


def tied_and_uneven(model_path: str, save_to: str, adapted: bool) -> float:
    """The largest difference between this rank's logprobs after a step and those of the checkpoint saved then."""
    from titan_rl.policy.models.titan_adaptation import choose_device

    choose_device("cpu")
    import titan_rl.policy.models.model as model

    batch = mixed_batch()
    original = model.share_padding_of_tied_shards
    with mock.patch.object(model, "share_padding_of_tied_shards", original if adapted else lambda module: None):
        policy = updater(model_path, trainer(2, 2, optimizer=OptimizerConfig(lr=1e-2)))
        train(policy, batch)
        policy.save_hf(Path(save_to))
        mine = logprobs_of(policy, batch)
        saved = logprobs_of(updater(save_to, trainer(2, 2)), batch)
    return max(float(np.abs(mine[key] - saved[key]).max()) for key in mine if mine[key].size)


def one_rank(model_path: str) -> dict[str, Any]:
    """The alarm."""
    batch = mixed_batch()
    policy = updater(model_path, trainer(1, 1))
    result: dict[str, Any] = {"loaded": shards_of(policy)}
    logprobs = logprobs_of(policy, batch)
    for name, shift in (("equal", 0.0), ("off", 0.2), ("far off", 0.6)):
        policy = updater(model_path, trainer(1, 1, logprob_alarm=LogprobAlarmConfig(stop_mean=0.5)))
        shifted = sampled_with(batch, logprobs, shift)
        result[name] = outcome(lambda policy=policy, shifted=shifted: train(policy, shifted))
        result[name, "weights"] = shards_of(policy)
    return result


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
    for layout in LAYOUTS:
        if layout in REFERENCE_LAYOUTS:
            estimators = [estimator for *each, estimator in ESTIMATES if tuple(each) == layout]
            scenarios["reference", *layout] = on_layout(
                against_reference, layout, **start, other_path=str(paths["other"]), estimators=estimators
            )
        scenarios["pairs", *layout] = on_layout(from_pairs, layout, **start)
        scenarios["warm-up", *layout] = on_layout(warm_up, layout, **start, save_to=f"{directory}/warm-{layout}")
    for adapted in (True, False):
        scenarios["uneven", adapted] = Scenario(
            tied_and_uneven, 4, start | {"save_to": str(directory / f"uneven-{adapted}"), "adapted": adapted}
        )
    scenarios["one rank"] = Scenario(one_rank, 1, start)
    return Results(scenarios, scenarios.keys() - set(LEFT_OUT), directory)


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
    loss, divergence = torch.zeros(()), 0.0
    for sample in batch.samples:
        new = trained_logprobs(model, sample)
        with torch.no_grad():
            difference = new - trained_logprobs(frozen, sample)
        k3 = (-difference).exp() - 1 + difference
        if estimator.endswith(IN_REWARD):
            costs = difference if estimator.startswith("k1") else k3
            slope = costs.flip(0).cumsum(0).flip(0)  # of each token, what it and the later ones cost
        else:
            # d/dx of x^2 / 2 and of exp(-x) - 1 + x; k1 has the gradient of k2.
            slope = difference if estimator != "k3" else 1 - (-difference).exp()
        loss = loss - (sample.advantage * new).sum() + COEFFICIENT * (slope * new).sum()
        divergence += k3.sum().item()
    (loss / batch.trained_tokens).backward()
    got = gradients([rank["loaded"] for rank in ranks], [rank[estimator, "weights"] for rank in ranks])
    assert relative_error(got, gradients_of(model)) < 2e-5
    for rank in ranks:
        found = rank[estimator, "metrics"]["reference_kl_k3"]
        assert found == pytest.approx(divergence / batch.trained_tokens, rel=1e-4)


@reference_layouts
def test_a_teacher_is_a_reference_that_is_read_from_its_checkpoint(results, layout):
    estimator = [each for *its, each in ESTIMATES if tuple(its) == layout][-1]
    for rank in results["reference", *layout]:
        for mine, frozen in zip(rank["taught"], rank[estimator, "weights"], strict=True):
            np.testing.assert_array_equal(mine[1], frozen[1])


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
    adamw = torch.optim.AdamW(model.parameters(), lr=1.0, betas=OptimizerConfig().betas, weight_decay=0.0)
    for number, step in enumerate(ranks[0]["steps"]):
        loss = -sum(trained_logprobs(model, sample, 1.0).sum() for sample in batch.samples) / batch.trained_tokens
        adamw.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OptimizerConfig().max_grad_norm).item()
        assert (step["loss"], step["grad_norm"]) == pytest.approx((loss.item(), norm), rel=1e-3), number
        adamw.param_groups[0]["lr"] = step["lr"]
        adamw.step()
    warmed, loaded = (assemble([rank[key] for rank in ranks]) for key in ("warmed", "loaded"))
    wanted = {name: parameter.detach().numpy() - loaded[name] for name, parameter in model.named_parameters()}
    assert relative_error({name: warmed[name] - loaded[name] for name in loaded}, wanted) < 0.02
    assert all(rank["steps"] == ranks[0]["steps"] for rank in ranks)


@pytest.mark.parametrize("layout", cells(LAYOUTS, ci=[(1, 1)]), ids=str)
def test_a_warm_up_on_pairs_is_adamw_on_the_loss_of_direct_preference_optimization(results, paths, layout):
    """-log sigmoid(beta ((log pi - log pi_ref)(chosen) - (log pi - log pi_ref)(rejected))), in the mean over pairs."""
    ranks = results["pairs", *layout]
    model, begun = transformer(paths["start"]), transformer(paths["start"])
    samples = pairs().samples
    couples = list(zip(samples[::2], samples[1::2], strict=True))
    with torch.no_grad():
        before = [[trained_logprobs(begun, answer, 1.0).sum() for answer in couple] for couple in couples]
    adamw = torch.optim.AdamW(model.parameters(), lr=1.0, betas=OptimizerConfig().betas, weight_decay=0.0)
    for number, step in enumerate(ranks[0]["steps"]):
        away = [
            [trained_logprobs(model, answer, 1.0).sum() - old for answer, old in zip(couple, olds, strict=True)]
            for couple, olds in zip(couples, before, strict=True)
        ]
        margins = torch.stack([BETA * (chosen - rejected) for chosen, rejected in away])
        loss = -torch.nn.functional.logsigmoid(margins).mean()
        adamw.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OptimizerConfig().max_grad_norm).item()
        assert (step["loss"], step["grad_norm"]) == pytest.approx((loss.item(), norm), rel=1e-3), number
        if number:
            assert step["preferred"] == pytest.approx((margins > 0).double().mean().item())
        adamw.param_groups[0]["lr"] = step["lr"]
        adamw.step()
    assert ranks[0]["steps"][-1]["loss"] < math.log(2) < ranks[0]["steps"][0]["loss"] + 1e-6
    warmed, loaded = (assemble([rank[key] for rank in ranks]) for key in ("warmed", "loaded"))
    wanted = {name: parameter.detach().numpy() - loaded[name] for name, parameter in model.named_parameters()}
    assert relative_error({name: warmed[name] - loaded[name] for name in loaded}, wanted) < 0.02
    assert all(rank["steps"] == ranks[0]["steps"] for rank in ranks)
    assert "preferred" not in ranks[0]["first"] and math.isfinite(ranks[0]["first"]["loss"])


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
