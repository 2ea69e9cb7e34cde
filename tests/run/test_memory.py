"""The estimate of what ranks hold on CUDA: against torch's tracker, and what it refuses (20 s, nearly all of which a
process takes to import the trainer and to make one step of 0.6B on fake tensors)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from titan_rl import train
from titan_rl.config import ServeConfig
from titan_rl.gateway.config import GatewayConfig
from titan_rl.overrides import variant
from titan_rl.policy.config import TrainerConfig
from titan_rl.run.memory import (
    GIB,
    describe_memory,
    learning,
    parameters,
    published_shape,
    shape_of,
    shared_memory,
    too_large,
    trainer_memory,
)

ROOT = Path(__file__).resolve().parents[2]
TRACKED = {
    ("8B", 4, 1, 8192, False): 105.0,
    ("8B", 4, 2, 8192, False): 64.9,
    ("0.6B", 4, 1, 8192, False): 23.0,
    ("0.6B", 4, 2, 8192, False): 14.9,
    ("8B", 4, 1, 16384, True): 43.1,
    ("32B", 4, 2, 8192, True): 72.9,
}
"""GiB by `scripts/fake_step.py`: size, FSDP, TP, tokens, recompute."""


def recipe(name: str):
    return train.resolve(train.VERB.read(["--config", str(ROOT / "rl_configs" / f"{name}.toml")]))


@pytest.mark.parametrize("case", TRACKED)
def test_the_estimate_of_a_trainer_rank_is_near_what_torch_tracks(case):
    size, data, tensor, tokens, recompute = case
    layout = TrainerConfig(data_parallel=data, tensor_parallel=tensor, dtype="bfloat16")
    config = replace(layout, max_tokens_per_microbatch=tokens, activation_checkpointing="full" if recompute else "none")
    estimated = sum(trainer_memory(config, published_shape(f"Qwen3-{size}")).values()) / GIB
    assert 0.98 < estimated / TRACKED[case] < (1.12 if recompute else 1.05)


@pytest.mark.parametrize("name", ["qwen3_0_6b_gsm8k", "qwen3_8b_math_8gpu", "qwen3_32b_2x8gpu"])
def test_the_recipes_fit_on_devices_of_80_gib(name, monkeypatch):
    monkeypatch.setattr("titan_rl.run.memory.shutil.disk_usage", lambda place: type("Disk", (), {"free": 1 << 42}))
    config = recipe(name)
    assert [*too_large(config, shape_of(config), 80 * GIB)] == []
    lines = "\n".join(describe_memory(config, shape_of(config), 80 * GIB))
    assert "a trainer rank: " in lines and "KV cache of a generator: " in lines


def test_with_lora_gradients_moments_and_publications_are_of_the_adapters():
    config = recipe("qwen3_8b_math_8gpu")
    adapted, shape = variant(config, {"trainer.lora.r": 16}), shape_of(config)
    before, after = (trainer_memory(each.trainer, shape) for each in (config, adapted))
    trained = 43_646_976  # 16 for every row and every column of the seven matrices of 36 layers
    assert learning(adapted.trainer, shape) == trained and learning(config.trainer, shape) == parameters(shape)
    assert after["moments"] == 8 * trained / config.trainer.ranks and after["gradients"] == after["moments"] / 2
    assert after["weights"] - before["weights"] == 4 * trained / config.trainer.ranks
    assert shared_memory(adapted, shape)["publications"] == adapted.weights_settings().max_live * 4 * trained
    lines = "\n".join(describe_memory(adapted, shape, 80 * GIB))
    assert "page cache of a generator's host: 15.3 GiB (base 15.3)" in lines


def test_torch_still_tracks_a_step_on_fake_tensors_and_it_takes_what_is_estimated():
    """As `cuda_wheels.py` does with builds for CUDA, where 8B and 32B are tracked, too."""
    script = [sys.executable, str(ROOT / "scripts" / "fake_step.py"), "0.6B", "--tokens", "4096"]
    done = subprocess.run(script, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert 0 < sum(found["estimated"].values()) / found["tracked"]["Total"] - 1 < 0.2


def test_what_cannot_fit_is_refused_with_what_to_change(monkeypatch):
    monkeypatch.setattr("titan_rl.run.memory.shutil.disk_usage", lambda place: type("Disk", (), {"free": GIB}))
    config = variant(recipe("qwen3_8b_math_8gpu"), {"trainer.activation_checkpointing": "none"})
    trainer, shared = too_large(config, shape_of(config), 80 * GIB)
    assert "(activations: 67)" in trainer and "trainer.activation_checkpointing" in trainer
    assert "/dev/shm has 1.0 GiB free, and weights.max_live publications take 45.8" in shared
    small = variant(recipe("qwen3_32b_2x8gpu"), {"trainer.data_parallel": 4, "trainer.tensor_parallel": 1})
    trainer, engine, _ = too_large(small, shape_of(small), 24 * GIB)
    assert "more trainer.data_parallel" in trainer and "more generator.tensor_parallel" in engine
    served = ServeConfig.of(small, GatewayConfig())
    assert len([*too_large(served, shape_of(small), 24 * GIB)]) == 2
