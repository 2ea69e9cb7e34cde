"""What ranks do in test_bitwise_steps: the same steps from the same weights, in several ways."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import numpy as np
from policy_scenarios import mixed_batch, shards_of, trainer, updater
from torch.distributed.tensor import DTensor

from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.policy.config import OptimizerConfig
from titan_rl.policy.kept_tokens import KeptTokens

STEPS = 6


def batch_of(step: int) -> SampleBatch:
    """Another batch in every step: other advantages and behaviour logprobs on the same tokens."""
    rng = np.random.default_rng(step)
    return SampleBatch.of(
        dataclasses.replace(
            sample,
            advantage=float(rng.standard_normal()),
            logprobs=np.where(sample.loss_mask, sample.logprobs + 0.1 * rng.standard_normal(), 0).astype(np.float32),
        )
        for sample in mixed_batch().samples
    )


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
    checkpoint holds. `kept`: also the scores of every other sample of the first step, and the logprobs before it.
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
        tokens = KeptTokens((sample.group_id, sample.sample) for sample in batch.samples[::2]) if kept else None
        if kept and not step:
            scores["logprobs"] = policy.logprobs(batch)
        report = policy.train_step(batch, policy.plan(batch), tokens)
        if tokens is not None and not step:
            scores["kept"] = tokens.scores
        del report["seconds"]
        reports.append(report)
    state = policy._state()
    return {
        "weights": shards_of(policy),
        "reports": reports,
        "state": sorted(state),
        "shards": any(isinstance(each, DTensor) for each in state.values()),
        **scores,
    }
