"""Engine loops and tiny checkpoints for the tests of generation, and the lives of generators that several look at."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loop_harness import BOUND, VOCAB, Collector, Turnstile, make_loop, make_publication
from rank_processes import run_on_ranks
from safetensors.numpy import load_file, save_file

from titan_rl.generation.engine import SimulatedEngine
from titan_rl.generation.engine_loop import EngineLoop
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


@pytest.fixture(scope="session")
def one_rank(tiny_models: dict[str, str]) -> dict[str, Any]:
    """A generator at TP 1."""
    return run_on_ranks("vllm_loop_scenario:lives", 1, models=tiny_models)[0]


@pytest.fixture(scope="session")
def two_ranks(tiny_models: dict[str, str]) -> list[dict[str, Any]]:
    """A generator at TP 2, by rank."""
    return run_on_ranks("vllm_loop_scenario:lives", 2, models=tiny_models)


@pytest.fixture(scope="session", params=[1, 2], ids=["tp1", "tp2"])
def facts(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Of rank 0, at TP 1 and at TP 2."""
    ranks = [request.getfixturevalue("one_rank")] if request.param == 1 else request.getfixturevalue("two_ranks")
    return ranks[0]["first"]


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
