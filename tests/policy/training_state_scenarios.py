"""What ranks do in test_training_state: train, save in the middle, go on from there in the same and other layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bitwise_scenarios import batch_of
from policy_scenarios import shards_of, train, trainer, updater

from titan_rl.policy.config import KLConfig, OptimizerConfig, TrainerConfig

SAVED_AT, STEPS = 2, 4


def config(data_parallel: int, tensor_parallel: int) -> TrainerConfig:
    rates = OptimizerConfig(lr=1e-3, warmup_steps=3, decay_ratio=0.5, min_lr_factor=0.1)
    return trainer(data_parallel, tensor_parallel, optimizer=rates, kl=KLConfig(coefficient=0.1))


def steps(policy: Any, first: int) -> list[dict[str, float]]:
    reports = [train(policy, batch_of(step)) for step in range(first, STEPS)]
    for report in reports:
        del report["seconds"]
    return reports


def saved(model_path: str, directory: str, data_parallel: int, tensor_parallel: int) -> dict[str, Any]:
    """Train on while the state is being written, for the second time."""
    policy = updater(model_path, config(data_parallel, tensor_parallel))
    policy.freeze_reference()
    for step in range(SAVED_AT):
        train(policy, batch_of(step))
        if not step:
            policy.begin_save(Path(f"{directory}, before"))
    before = shards_of(policy)
    policy.begin_save(Path(directory))
    reports = steps(policy, SAVED_AT)
    policy.finish_save()
    return {"saved": before, "end": shards_of(policy), "reports": reports}


def restored(model_path: str, directory: str, data_parallel: int, tensor_parallel: int) -> dict[str, Any]:
    policy = updater(model_path, config(data_parallel, tensor_parallel))
    policy.restore(Path(directory), 1)
    where = (policy.incarnation, policy.step)
    before = shards_of(policy)
    reports = steps(policy, SAVED_AT)
    return {"saved": before, "end": shards_of(policy), "reports": reports, "where": where}
