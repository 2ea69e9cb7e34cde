"""Engine loops and tiny checkpoints for the tests of generation."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from loop_harness import BOUND, VOCAB, Collector, Turnstile, make_loop, make_publication
from safetensors.numpy import load_file, save_file

from titan_rl.generation.engine_loop import EngineLoop
from titan_rl.generation.simulated_engine import SimulatedEngine
from titan_rl.policy.config import TinyPolicyConfig
from titan_rl.policy.models.tiny import make_tiny_policy

SHARPER = 8.0
"""Factor on the matrices of a fresh policy, whose next-token distribution would be almost uniform otherwise."""


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Checkpoint directories tied_a, tied_b, untied_a, untied_b: two sets of weights, embeddings tied or not."""
    cache = tmp_path_factory.mktemp("policies")
    models = {}
    for tying, tied in (("tied", True), ("untied", False)):
        for seed, letter in enumerate("ab"):
            made = make_tiny_policy(TinyPolicyConfig(tied_embeddings=tied, seed=seed), cache)
            model = Path(shutil.copytree(made, cache / f"{tying}_{letter}"))
            tensors = load_file(model / "model.safetensors")
            sharper = {name: tensor * SHARPER if tensor.ndim == 2 else tensor for name, tensor in tensors.items()}
            save_file(sharper, model / "model.safetensors", metadata={"format": "pt"})
            models[f"{tying}_{letter}"] = str(model)
    return models


@pytest.fixture
def collector() -> Collector:
    return Collector()


@pytest.fixture
def turnstile() -> Turnstile:
    return Turnstile()


@pytest.fixture
def loop(collector: Collector, turnstile: Turnstile) -> Iterator[EngineLoop]:
    """Started and serving v0; every engine step waits at the turnstile."""
    loop = make_loop(collector, engine=lambda: SimulatedEngine(vocab_size=VOCAB, seconds_per_step=1.0, sleep=turnstile))
    loop.start().result(timeout=BOUND)
    loop.pull(make_publication(0)).result(timeout=BOUND)
    yield loop
    turnstile.open()
    loop.close()
