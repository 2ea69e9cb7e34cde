"""What ranks do in the tests of LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import policy_scenarios as scenario
import torch

from titan_rl.policy.config import LoraConfig, LossConfig

LORA = LoraConfig(r=4, lora_alpha=6.0)


def adapters_of(updater: Any) -> dict[str, np.ndarray]:
    """Whole, as every rank has them."""
    return {name: tensor.numpy().copy() for name, tensor in updater.adapters().tensors.items()}


def fill(updater: Any) -> None:
    """Adapters at random: at the start B is 0, and then A has no gradient."""
    from titan_rl.policy.models.checkpoint import local_shard

    random = torch.Generator().manual_seed(7)
    for name, tensor in updater._policy.adapters.items():
        shard = local_shard(name, tensor)
        shard.data.copy_((0.2 * torch.randn(tensor.shape, generator=random))[shard.slices])


def layout(model_path: str, save_to: str, data_parallel: int, tensor_parallel: int, **settings: Any) -> dict[str, Any]:
    """One parallel layout: adapters at the start, filled, and after a step that tells their gradients."""
    config = scenario.trainer(
        data_parallel, tensor_parallel, optimizer=scenario.REVEALING, loss=LossConfig(), lora=LORA, **settings
    )
    updater = scenario.updater(model_path, config, temperature=0.7)
    result: dict[str, Any] = {"start": adapters_of(updater), "base": scenario.shards_of(updater)}
    fill(updater)
    result["filled"] = adapters_of(updater)
    batch = scenario.mixed_batch()
    kept = scenario.TokenScoreRecorder(scenario.names_of(batch))
    result["metrics"] = scenario.train(updater, batch, kept)
    result["logprobs"] = {name: scores.logprobs for name, scores in kept.scores.items()}
    result["after"] = adapters_of(updater)
    result["base after"] = scenario.shards_of(updater)
    result["state"] = {name: getattr(value, "shape", value) for name, value in updater._state().items()}
    updater.save_hf(Path(save_to))
    return result
