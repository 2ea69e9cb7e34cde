"""Engine loops and tiny checkpoints for the tests of generation."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count

import pytest
from loop_harness import BOUND, MADE, VOCAB, Collector, Turnstile, make_loop, make_publication, sharper_policy
from support.timed_engine import TimedEngine

from titan_rl.generation.engine_loop import EngineLoop
from titan_rl.policy.config import TinyPolicyConfig


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Checkpoint directories tied_a, tied_b, …: two sets of weights, embeddings tied or not, or of another family."""
    cache = tmp_path_factory.mktemp("policies")
    models = {}
    families = {"llama": {"architecture": "llama3"}, "moe": {"architecture": "qwen3_moe"}}
    for kind, settings in {"tied": {}, "untied": {"tied_embeddings": False}, **families}.items():
        for seed, letter in enumerate("ab"):
            config = TinyPolicyConfig(**settings, seed=seed)
            models[f"{kind}_{letter}"] = sharper_policy(config, cache / f"{kind}_{letter}")
    return models


@pytest.fixture(autouse=True)
def no_engine_thread_is_left() -> Iterator[None]:
    """It would go on to write into the timeline of this process, also while other tests look at that."""
    yield
    for loop in MADE:
        loop.close()
    MADE.clear()
    for thread in threading.enumerate():
        if thread.name.startswith("engine-loop"):
            thread.join(timeout=2.0)


@pytest.fixture
def collector() -> Collector:
    return Collector()


@pytest.fixture
def turnstile() -> Turnstile:
    return Turnstile()


@pytest.fixture
def loop(collector: Collector, turnstile: Turnstile) -> Iterator[EngineLoop]:
    """Started and serving v0; every engine step waits at the turnstile, and takes a second."""

    def engine() -> TimedEngine:
        return TimedEngine(vocab_size=VOCAB, seconds_per_step=1.0, sleep=turnstile, clock=count().__next__)

    loop = make_loop(collector, engine=engine)
    loop.start().result(timeout=BOUND)
    loop.pull(make_publication(0)).result(timeout=BOUND)
    yield loop
    turnstile.open()
    loop.close()
