"""Several optimizer steps on one batch, against float64 and on one and two ranks. About 20 s on two free cores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from policy_scenarios import (
    assemble,
    mixed_batch,
    on_layout,
    sampled_with,
    shards_of,
    train,
    trainer,
    transformer,
    updater,
)
from support.ranks import Results

from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.errors import SampleError, SamplesLost, TrainingError
from titan_rl.policy.config import LossConfig, OptimizerConfig, TinyPolicyConfig
from titan_rl.policy.models.tiny import make_tiny_policy
from titan_rl.policy.packing import plan_step, split_by_group
from titan_rl.policy.token_score_recorder import TokenScoreRecorder

TEMPERATURE = 0.7
LR, EPS = 0.1, 1.0
BY_GRADIENT = OptimizerConfig(lr=LR, betas=(0.0, 0.0), eps=EPS, max_grad_norm=0.0)
"""A step changes a weight by -LR g / (|g| + EPS), whatever came before."""
WAYS = {"epochs": (2, 1), "mini-batches": (1, 3), "both": (2, 3)}
CASES = [("epochs", "decoupled_ppo"), ("mini-batches", "decoupled_ppo"), ("both", "decoupled_ppo"), ("both", "grpo")]
LAYOUTS = {"one": (1, 1), "two": (2, 1)}


class Failing:
    """Loses a group that the first mini-batch does not have."""

    def __init__(self, group_id: int) -> None:
        self._group_id = group_id

    def fetch(self, batch: SampleBatch) -> Any:
        if self._group_id in batch.group_ids:
            raise SampleError("not here", self._group_id, 0)
        return batch.samples


def later_group(batch: SampleBatch, count: int) -> int:
    return batch.group_ids[split_by_group(batch, count)[-1][0]]


def spoilt_later(batch: SampleBatch, count: int) -> SampleBatch:
    samples = list(batch.samples)
    place = next(place for place in split_by_group(batch, count)[-1] if samples[place].loss_mask.any())
    samples[place] = replace(samples[place], advantages=np.full_like(samples[place].advantages, np.nan))
    return SampleBatch.of(samples)


def several_steps(model_path: str, data_parallel: int, tensor_parallel: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    batch = mixed_batch()

    def policy_of(epochs: int, minibatches: int, loss: str = "decoupled_ppo", **kwargs: Any) -> Any:
        kwargs.setdefault("optimizer", BY_GRADIENT)
        config = trainer(
            data_parallel,
            tensor_parallel,
            epochs=epochs,
            minibatches=minibatches,
            loss=LossConfig(name=loss, kwargs={"weight_cap": 1.5} if loss == "decoupled_ppo" else {}),
            **kwargs,
        )
        return updater(model_path, config, temperature=TEMPERATURE)

    for name, loss in CASES:
        policy = policy_of(*WAYS[name], loss)
        result.setdefault("loaded", shards_of(policy))
        metrics = train(policy, batch)
        result[name, loss] = shards_of(policy), metrics, policy.step
    again = policy_of(*WAYS["both"])
    train(again, batch)
    result["again"] = shards_of(again)

    kept = TokenScoreRecorder([(sample.group_id, sample.sample) for sample in batch.samples])
    train(policy_of(1, 1), batch, kept)
    result["logprobs"] = {name: scores.logprobs for name, scores in kept.scores.items()}

    missing = policy_of(1, 3)
    missing.samples = Failing(later_group(batch, 3))
    try:
        train(missing, batch)
    except SamplesLost as error:
        result["lost"] = str(error), shards_of(missing), missing.step

    torn, errors = policy_of(1, 3), []
    for each in (spoilt_later(batch, 3), batch):
        try:
            train(torn, each)
        except TrainingError as error:
            errors.append(str(error))
    try:
        torn.save_hf(Path("never"))
    except TrainingError as error:
        errors.append(str(error))
    result["torn"] = errors, torn.step

    return result


def on_policy(model_path: str, logprobs: dict[Any, np.ndarray]) -> dict[str, float]:
    """Metrics of a batch that these very weights sampled, in steps that change them much; and two steps' rates."""
    several = {"epochs": 2, "minibatches": 4}
    policy = updater(model_path, trainer(1, 1, optimizer=BY_GRADIENT, **several), temperature=TEMPERATURE)
    scheduled = updater(model_path, trainer(1, 1, optimizer=OptimizerConfig(lr=1.0, warmup_steps=2), **several))
    metrics = train(policy, sampled_with(mixed_batch(), logprobs))
    return metrics | {f"lr of step {step}": train(scheduled, mixed_batch())["lr"] for step in range(2)}


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return make_tiny_policy(TinyPolicyConfig(), tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def results(path, tmp_path_factory) -> Results:
    scenarios: dict[Any, Any] = {
        name: on_layout(several_steps, layout, model_path=str(path)) for name, layout in LAYOUTS.items()
    }
    return Results(scenarios, scenarios.keys(), tmp_path_factory.mktemp("ranks"))


def token_logprobs(model: torch.nn.Module, sample: Any) -> torch.Tensor:
    tokens = torch.from_numpy(sample.token_ids.astype(np.int64))
    every = torch.log_softmax(model(tokens[None]).logits[0, :-1] / TEMPERATURE, -1)
    return every.gather(1, tokens[1:, None])[:, 0][torch.from_numpy(sample.loss_mask[1:])]


def by_hand(path: Path, epochs: int, minibatches: int, loss: str) -> tuple[dict[str, np.ndarray], set[str]]:
    """The weights after a batch in float64, and what happened to its tokens, one sample and one step at a time."""
    model = transformer(path).double()
    batch = mixed_batch()
    with torch.no_grad():
        before = [token_logprobs(model, sample) for sample in batch.samples]
    seen = set()
    for _ in range(epochs):
        for places in split_by_group(batch, minibatches):
            total = torch.zeros((), dtype=torch.float64)
            for place in places:
                sample = batch.samples[place]
                for new, old, behaviour in zip(
                    token_logprobs(model, sample), before[place], sample.logprobs[sample.loss_mask], strict=True
                ):
                    advantage = float(sample.advantages[sample.loss_mask][0])
                    behaviour = torch.tensor(float(behaviour), dtype=torch.float64)
                    weight = (old - behaviour).exp().item() if loss == "decoupled_ppo" else 1.0
                    ratio = (new - (old if loss == "decoupled_ppo" else behaviour)).exp()
                    held = ratio.item() > 1.2 if advantage > 0 else ratio.item() < 0.8
                    over = loss == "decoupled_ppo" and weight > 1.5
                    seen |= {"clipped"} if held else {"dropped"} if over else {"free"}
                    if not held and not over:
                        total = total - weight * ratio * advantage
            model.zero_grad()
            (total / sum(int(batch.samples[place].loss_mask.sum()) for place in places)).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= LR * parameter.grad / (parameter.grad.abs() + EPS)
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}, seen


@pytest.mark.parametrize(("way", "loss"), CASES)
def test_the_weights_after_a_batch_are_those_of_float64_on_one_rank_and_on_two(results, path, way, loss):
    wanted, seen = by_hand(path, *WAYS[way], loss)
    assert {"clipped", "free"} <= seen and ("dropped" in seen) == (loss == "decoupled_ppo")
    for layout in LAYOUTS:
        ranks = results[layout]
        loaded = assemble([rank["loaded"] for rank in ranks])
        trained = assemble([rank[way, loss][0] for rank in ranks])
        assert trained.keys() == wanted.keys()
        for name, exact in wanted.items():
            rounding = 2e-7 * np.linalg.norm(exact)  # of the weights, which are float32
            error, change = np.linalg.norm(trained[name] - exact), np.linalg.norm(exact - loaded[name])
            assert error < 1e-5 * change + rounding < 0.01 * change, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_is_one_step_and_gives_the_same_bits_and_numbers_every_time(results, layout):
    for rank in results[layout]:
        shards, metrics, step = rank["both", "decoupled_ppo"]
        for one, other in zip(shards, rank["again"], strict=True):
            np.testing.assert_array_equal(one[1], other[1])
        assert step == 1
        batch = mixed_batch()
        assert metrics["trained_tokens"] == metrics["on_policy_tokens"] == batch.trained_tokens
        alone = results["one"][0]["both", "decoupled_ppo"][1]
        assert metrics == pytest.approx(alone | {"imbalance": metrics["imbalance"]}, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_that_a_later_optimizer_step_would_miss_are_missed_before_the_first(results, layout):
    for rank in results[layout]:
        message, shards, step = rank["lost"]
        assert f"group {later_group(mixed_batch(), 3)} lost" in message and step == 0
        for before, after in zip(rank["loaded"], shards, strict=True):
            np.testing.assert_array_equal(before[1], after[1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_within_a_batch_are_never_trained_again_nor_saved(results, layout):
    for rank in results[layout]:
        (first, second, third), step = rank["torn"]
        assert "loss is nan" in first and "2 optimizer steps of its batch were made" in first
        assert "failed in its middle" in second
        assert "its weights are not saved" in third
        assert step == 0


def test_the_engine_is_compared_with_the_weights_before_the_batch_and_the_schedule_counts_batches(
    results, path, tmp_path
):
    scenario = on_layout(on_policy, (1, 1), model_path=str(path), logprobs=results["one"][0]["logprobs"])
    scenario.kwargs = {name: scenario.kwargs[name] for name in ("model_path", "logprobs")}
    metrics = Results({"on-policy": scenario}, {"on-policy"}, tmp_path)["on-policy"][0]
    assert metrics["on_policy_tokens"] == metrics["trained_tokens"]
    assert metrics["logprob_difference_max"] < 2e-5
    assert metrics["weight_max"] > 1.01
    assert (metrics["lr of step 0"], metrics["lr of step 1"]) == pytest.approx((0.5, 1.0))


@pytest.mark.parametrize("count", [1, 2, 5, 50])
def test_mini_batches_are_whole_groups_whatever_the_order_of_the_samples(count):
    batch = mixed_batch()
    groups = [[batch.group_ids[place] for place in places] for places in split_by_group(batch, count)]
    assert sorted(sum(groups, [])) == sorted(batch.group_ids)
    assert sum(len(set(each)) for each in groups) == len(set(batch.group_ids)) and len(groups) == min(count, 11)
    order = np.random.default_rng(1).permutation(len(batch)).tolist()
    shuffled = batch.select(order)
    assert [
        sorted(shuffled.group_ids[place] for place in places) for places in split_by_group(shuffled, count)
    ] == list(map(sorted, groups))
    plan = plan_step(batch, trainer(2, 1, minibatches=count))
    start = 0
    for places, each in zip(split_by_group(batch, count), plan.minibatches, strict=True):
        rounds = [
            index
            for rank in plan.microbatches
            for microbatch in rank[start : start + each.rounds]
            for index in microbatch
        ]
        assert sorted(rounds) == places
        assert (each.samples, each.trained_tokens) == (len(places), batch.select(places).trained_tokens)
        assert each.trained_tokens
        start += each.rounds
    assert start == plan.rounds
