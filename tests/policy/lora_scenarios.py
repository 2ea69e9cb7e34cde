"""What ranks do in the tests of LoRA."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import policy_scenarios as scenario
import torch

from titan_rl.errors import CheckpointError
from titan_rl.policy.config import KLConfig, LoraConfig, LossConfig

LORA = LoraConfig(r=4, lora_alpha=6.0)


def adapters_of(updater: Any) -> dict[str, np.ndarray]:
    """Whole, as every rank has them."""
    from titan_rl.policy.models.checkpoint import whole_tensor

    return {name: whole_tensor(tensor).numpy().copy() for name, tensor in updater._policy.trained.items()}


def fill(updater: Any) -> None:
    """Adapters at random: at the start B is 0, and then A has no gradient."""
    from titan_rl.policy.models.checkpoint import local_shard

    random = torch.Generator().manual_seed(7)
    for name, tensor in updater._policy.trained.items():
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
    result["state"] = [shard.name for shard in updater._state]
    updater.save_hf(Path(save_to))
    return result


def resumed(model_path: str, other: str, directory: str, data_parallel: int, tensor_parallel: int) -> dict[str, Any]:
    """A state that was saved, read on the same base, on another one and with another alpha."""
    config = scenario.trainer(data_parallel, tensor_parallel, lora=LORA, kl=KLConfig(coefficient=0.1))
    updater = scenario.updater(model_path, config)
    updater.freeze_reference()
    scenario.train(updater, scenario.mixed_batch())
    updater.begin_save(Path(directory))
    updater.finish_save()
    result: dict[str, Any] = {"saved": adapters_of(updater), "next": scenario.train(updater, scenario.batch_of(1))}
    again = scenario.updater(model_path, config, seed=5)
    again.restore(Path(directory), 1)
    result["restored"] = adapters_of(again)
    result["next again"] = scenario.train(again, scenario.batch_of(1))
    doubled = replace(config, lora=replace(LORA, lora_alpha=2 * LORA.lora_alpha))
    for name, path, changed in (("base", other, config), ("alpha", model_path, doubled)):
        try:
            scenario.updater(path, changed).restore(Path(directory), 1)
        except CheckpointError as error:
            result[name] = str(error)
    return result
