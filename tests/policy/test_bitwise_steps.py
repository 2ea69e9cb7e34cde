"""Six optimizer steps again: what is bitwise the same, and how near the rest is. About 20 s on two free cores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
from policy_scenarios import assemble, batch_of, names_of, shards_of, train, trainer, updater
from support.ranks import Results, Scenario, cells
from torch.distributed.tensor import DTensor

from titan_rl.policy.config import OptimizerConfig, TinyPolicyConfig
from titan_rl.policy.models.tiny import make_tiny_policy
from titan_rl.policy.token_score_recorder import TokenScoreRecorder

STEPS = 6

WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "one again, tokens kept": (1, {"kept": True}),
    "one, torch's deterministic operations only": (1, {"deterministic": True}),
    "one, samples in another order": (1, {"shuffled": True}),
    "two": (2, {}),
    "two again, tokens kept": (2, {"kept": True}),
}
"""Ranks and arguments."""
NEAR = {"float32": 1e-3, "bfloat16": 0.1}
"""Root mean square of the weights' differences ÷ that of their changes by the steps. Seen: 3e-6 and 0.03."""


@contextmanager
def sharded_by_fsdp() -> Iterator[None]:
    """Models are sharded that would not be."""
    from titan_rl.policy.models.titan_adaptation import choose_device

    choose_device("cpu")
    import titan_rl.policy.models.model as model

    parallelize = model.parallelize_qwen3

    def always(module: Any, *, skip_dp: bool, **arguments: Any) -> Any:
        assert skip_dp
        return parallelize(module, **arguments)

    with mock.patch.object(model, "parallelize_qwen3", always):
        yield


def train_steps(
    model_path: str,
    data_parallel: int,
    dtype: str,
    steps: int = STEPS,
    shuffled: bool = False,
    deterministic: bool = False,
    kept: bool = False,
    sharded: bool = False,
) -> dict[str, Any]:
    """Weights after so many steps of AdamW, what the steps reported apart from times, and the names of the state that a
    checkpoint holds. `kept`: also the scores of every other sample of the first step.
    `sharded`: by FSDP in any case."""
    config = trainer(data_parallel, 1, dtype=dtype, optimizer=OptimizerConfig(lr=1e-3), deterministic=deterministic)
    with sharded_by_fsdp() if sharded else nullcontext():
        policy = updater(model_path, config)
    reports = []
    scores: dict[str, Any] = {}
    for step in range(steps):
        batch = batch_of(step)
        if shuffled:
            batch = batch.select(np.random.default_rng(step).permutation(len(batch)).tolist())
        tokens = TokenScoreRecorder(names_of(batch)[::2]) if kept else None
        report = train(policy, batch, tokens)
        if tokens is not None and not step:
            scores["kept"] = tokens.scores
        reports.append(report)
    return {
        "weights": shards_of(policy),
        "reports": reports,
        "state": sorted(shard.name for shard in policy._state),
        "shards": any(isinstance(each, DTensor) for each in policy._policy.tensors.values()),
        **scores,
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """By dtype and way: `weights` before any step ("start") or after all, and the `reports` of each rank."""
    directory = tmp_path_factory.mktemp("steps")
    model = str(make_tiny_policy(TinyPolicyConfig(), directory / "policy"))
    scenarios = {
        (dtype, way): Scenario(
            train_steps, ranks, {"model_path": model, "data_parallel": ranks, "dtype": dtype, **kwargs}
        )
        for dtype in NEAR
        for way, (ranks, kwargs) in {"start": (1, {"steps": 0}), **WAYS}.items()
    }
    alone = {"model_path": model, "data_parallel": 1, "dtype": "float32", "sharded": True}
    scenarios["float32", "one, sharded"] = Scenario(train_steps, 1, alone)
    return Results(scenarios, {name for name in scenarios if name[0] == "float32"}, directory)


def flat(ranks: list[dict[str, Any]]) -> np.ndarray:
    weights = assemble([rank["weights"] for rank in ranks])
    return np.concatenate([weights[name].ravel() for name in sorted(weights)])


every_dtype = pytest.mark.parametrize("dtype", cells(NEAR, ci=["float32"]))


@every_dtype
@pytest.mark.parametrize(
    ("way", "same"),
    [
        ("one again, tokens kept", "one"),
        ("one, torch's deterministic operations only", "one"),
        ("two again, tokens kept", "two"),
    ],
)
def test_the_same_batches_give_bitwise_the_same_weights_and_reports(
    found: Results, dtype: str, way: str, same: str
) -> None:
    again, first = found[dtype, way], found[dtype, same]
    np.testing.assert_array_equal(flat(again), flat(first))
    assert again[0]["reports"] == first[0]["reports"] and len(first[0]["reports"]) == STEPS
    assert not np.array_equal(flat(first), flat(found[dtype, "start"]))


def test_one_rank_has_the_bits_and_the_names_that_fsdp_would_give_it(found: Results) -> None:
    """A trainer of one float32 rank is not sharded. Its checkpoints are read in every layout."""
    ours, sharded = found["float32", "one"], found["float32", "one, sharded"]
    assert sharded[0]["shards"] and not ours[0]["shards"]
    np.testing.assert_array_equal(flat(ours), flat(sharded))
    assert ours[0]["reports"] == sharded[0]["reports"]
    assert ours[0]["state"] == sharded[0]["state"]


@every_dtype
@pytest.mark.parametrize("way", ["two", "one, samples in another order"])
def test_another_order_of_additions_stays_near(found: Results, dtype: str, way: str) -> None:
    one = flat(found[dtype, "one"])
    change = one - flat(found[dtype, "start"])
    difference = flat(found[dtype, way]) - one
    assert np.sqrt(np.mean(difference**2)) < NEAR[dtype] * np.sqrt(np.mean(change**2))


@pytest.mark.parametrize("way", ["one again, tokens kept", "two again, tokens kept"])
def test_recorded_scores_have_the_derivatives_of_the_loss(found: Results, way: str) -> None:
    """test_updater_ranks compares their logprobs."""
    ranks, batch = found["float32", way], batch_of(0)
    kept = {name: scores for rank in ranks for name, scores in rank["kept"].items()}
    assert kept.keys() == set(names_of(batch)[::2])
    for sample in batch.samples[::2]:
        scores, mask = kept[sample.group_id, sample.sample], sample.loss_mask
        ratio = np.exp(scores.logprobs - sample.logprobs[mask])  # of GRPO, which clips at 0.8 and 1.2
        clipped = ratio > 1.2 if sample.advantage > 0 else ratio < 0.8
        weights = np.where(clipped, 0, ratio * sample.advantage) / batch.trained_tokens
        np.testing.assert_allclose(scores.weights, weights, rtol=1e-4, atol=1e-9)
