"""What ranks do in the tests of reference policy, warm-up and alarm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from policy_scenarios import REVEALING, mixed_batch, shards_of, train, trainer, updater

from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.errors import TitanError
from titan_rl.policy.config import KLConfig, LogprobAlarmConfig, LossConfig, OptimizerConfig, WarmupConfig
from titan_rl.policy.models.checkpoint import load_weights
from titan_rl.types import NO_VERSION

TEMPERATURE = 0.7
COEFFICIENT = 0.5
WARMUP = WarmupConfig(steps=6, batch=8, lr=1e-2, lr_warmup_steps=2)


def outcome(action: Any) -> Any:
    try:
        return action()
    except TitanError as error:
        return error


def reference(
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
            loss=LossConfig(name="policy_gradient"),
            kl=KLConfig(coefficient=COEFFICIENT, estimator=estimator),
        )
        policy = updater(other_path, config, temperature=TEMPERATURE)
        policy.freeze_reference()
        load_weights(policy._policy, Path(model_path))
        result["loaded"] = shards_of(policy)
        result[estimator, "metrics"] = train(policy, batch)
        result[estimator, "weights"] = shards_of(policy)
    return result


def demonstrations() -> SampleBatch:
    """Samples as a warm-up gets them: nothing of them was sampled by a policy."""
    return SampleBatch.of(
        replace(
            sample,
            logprobs=np.zeros_like(sample.logprobs),
            versions=np.full_like(sample.versions, NO_VERSION),
            advantage=0.0,
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
        mine = policy.logprobs(batch)
        policy.save_hf(Path(save_to))
        saved = updater(save_to, trainer(2, 2)).logprobs(batch)
    return max(float(np.abs(mine[key] - saved[key]).max()) for key in mine)


def one_rank(model_path: str) -> dict[str, Any]:
    """The alarm, and the decoupled loss."""
    result: dict[str, Any] = {}
    batch = mixed_batch()
    config = trainer(1, 1, optimizer=REVEALING, loss=LossConfig(name="decoupled_ppo", kwargs={"weight_cap": 2.0}))
    policy = updater(model_path, config, temperature=TEMPERATURE)
    result["loaded"] = shards_of(policy)
    result["scored"] = policy.logprobs(batch)
    result["decoupled", "metrics"] = train(policy, batch)
    result["decoupled", "weights"] = shards_of(policy)

    def shifted(by: float) -> SampleBatch:
        """The batch as if this version's engine had sampled it with logprobs that are `by` too high."""
        true = updater(model_path, trainer(1, 1)).logprobs(batch)
        return SampleBatch.of(
            replace(
                sample,
                logprobs=np.where(sample.loss_mask, true[sample.group_id, sample.sample] + by, 0).astype(np.float32),
            )
            for sample in batch.samples
        )

    for name, by, alarm in (
        ("equal", 0.0, LogprobAlarmConfig(stop_mean=0.5)),
        ("off", 0.2, LogprobAlarmConfig(stop_mean=0.5)),
        ("far off", 0.6, LogprobAlarmConfig(stop_mean=0.5)),
    ):
        policy = updater(model_path, trainer(1, 1, logprob_alarm=alarm))
        result[name] = outcome(lambda policy=policy, by=by: train(policy, shifted(by)))
        result[name, "weights"] = shards_of(policy)
    return result
