"""`trainer.parity = "bitwise"`: the trainer's logprobs are those of real engines to the last bit.

Both dtypes of one tiny policy take about 20 s on two free cores. The matrix adds shapes, layouts and engines.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loop_harness import sharper_policy
from rank_processes import run_on_ranks
from vllm.v1.attention.backends import cpu_attn

from titan_rl.generation.vllm import rows
from titan_rl.policy.config import LoraConfig, LossConfig, OptimizerConfig, TinyPolicyConfig

DTYPES = ["float32", "bfloat16"]
LENGTH = 512
COUNT, LONGEST = 64, 120

SHAPES = {
    "tied": TinyPolicyConfig(max_length=LENGTH, seed=0),
    "untied": TinyPolicyConfig(max_length=LENGTH, seed=1, tied_embeddings=False, layers=3),
    "wide heads": TinyPolicyConfig(max_length=LENGTH, seed=2, head_dim=128, dim=96, heads=2, ffn=320),
    "llama": TinyPolicyConfig(max_length=LENGTH, seed=4, architecture="llama3"),
}
ENGINES: dict[str, dict[str, Any]] = {
    "one rank": {},
    "two ranks": {"tensor_parallel": 2},
    "large blocks": {"block_size": 128, "prefix_caching": False},
}


def on_ranks(function: str, ranks: int = 1, **arguments: Any) -> list[Any]:
    return run_on_ranks(f"parity_scenario:{function}", ranks, deterministic=True, **arguments)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return sharper_policy(SHAPES["tied"], tmp_path_factory.mktemp("policy") / "sharper")


@pytest.fixture(scope="module")
def samples(model: str) -> list[Any]:
    (found,) = on_ranks("sampled", model=model, engine={}, count=COUNT, longest=LONGEST)
    return found


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [*((dtype, {}) for dtype in DTYPES), ("float32", {"lora": LoraConfig(r=4), "optimizer": OptimizerConfig(lr=1e-2)})],
    ids=[*DTYPES, "float32, LoRA"],
)
def test_logprobs_are_equal_through_swaps_of_weights_and_truncated_sampling(
    model: str, dtype: str, settings: dict[str, Any]
) -> None:
    """From the second step on, half of the samples began under the weights before."""
    numbers = {"count": COUNT, "longest": LONGEST, "steps": 3}
    trainer = {"dtype": dtype, **settings}
    (reports,) = on_ranks("rounds", model=model, engine={"dtype": dtype}, trainer=trainer, **numbers)
    for report in reports:
        assert (report["logprob_difference_max"], report["logprob_difference_mean"]) == (0.0, 0.0)
    first, *others = reports
    assert first["on_policy_tokens"] == first["trained_tokens"] > 1000
    assert (first["weight_max"], first["effective_sample_size"], first["kl_k3"]) == (1.0, 1.0, 0.0)
    for report in others:
        assert 1000 < report["on_policy_tokens"] < report["trained_tokens"] - 100
        assert report["weight_max"] > 1  # of tokens that older weights sampled


def test_without_it_they_differ_and_with_it_a_difference_ends_the_run(model: str, samples: list[Any]) -> None:
    (found,) = on_ranks("trained", model=model, samples=samples, trainers={"auto": {"parity": "auto"}})
    metrics, _ = found["auto"]
    assert 0 < metrics["logprob_difference_max"] < 1e-4
    place = int(np.flatnonzero(samples[5].loss_mask)[3])
    logprobs = samples[5].logprobs.copy()
    logprobs[place] = np.nextafter(logprobs[place], np.float32(-np.inf))
    spoilt = [*samples[:5], replace(samples[5], logprobs=logprobs), *samples[6:]]
    (found,) = on_ranks("trained", model=model, samples=spoilt, trainers={"bitwise": {}})
    assert "step 0: trainer.parity is bitwise, and tokens that this very version sampled have other" in found["bitwise"]


def test_on_policy_a_clipped_loss_trains_the_weights_of_its_on_policy_form(model: str, samples: list[Any]) -> None:
    """GRPO's ratios are exactly 1, so its gradient is REINFORCE's bit for bit; with ratios near 1 it is not."""
    trainers = {
        f"{parity} {loss}": {"parity": parity, "loss": LossConfig(name=loss)}
        for parity in ("bitwise", "auto")
        for loss in ("grpo", "reinforce")
    }
    (found,) = on_ranks("trained", model=model, samples=samples, trainers=trainers)

    def equal(parity: str) -> bool:
        (_, clipped), (_, plain) = found[f"{parity} grpo"], found[f"{parity} reinforce"]
        return all(np.array_equal(clipped[name], plain[name]) for name in clipped)

    metrics, _ = found["bitwise grpo"]
    trained = np.concatenate([each.advantages[each.loss_mask] for each in samples]).astype(np.float64)
    assert metrics["loss"] == pytest.approx(-trained.mean(), rel=1e-6)  # every ratio is 1
    assert metrics["clip_share"] == 0.0
    assert equal("bitwise")
    assert not equal("auto")


@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-5), ("bfloat16", 0.1)])
def test_the_gradient_is_the_ordinary_one_up_to_rounding(
    model: str, samples: list[Any], dtype: str, error: float
) -> None:
    (found,) = on_ranks("gradients", model=model, samples=samples[:32], dtype=dtype)
    assert found["bitwise"] < max(error, 2 * found["auto"])
    assert math.isfinite(found["bitwise"])


def test_the_gradient_of_adapters_is_the_ordinary_one_up_to_rounding(model: str, samples: list[Any]) -> None:
    (difference,) = on_ranks("adapters_gradients", model=model, samples=samples[:32])
    assert 0 < difference < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_operation_is_that_of_the_engines_own_layer(model: str, dtype: str) -> None:
    (found,) = on_ranks("operations", model=model, dtype=dtype)
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
    assert len(found) == 12


def test_the_first_layer_and_operation_that_differ_are_named(model: str) -> None:
    (found,) = on_ranks("first_differences", model=model, longest=LONGEST)
    assert found["bitwise"] == ""
    assert found["auto"].startswith("layer 0, ")
    assert found["another weight"].startswith("layer 1, feed-forward: 119 of 119 rows, the first 0, by up to ")


@pytest.mark.acceptance
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shape", SHAPES)
def test_all_shapes_and_layouts_agree(shape: str, engine: str, dtype: str, tmp_path: Path) -> None:
    model = sharper_policy(SHAPES[shape], tmp_path / "sharper")
    settings = {**ENGINES[engine], "dtype": dtype}
    found = on_ranks(
        "sampled", settings.get("tensor_parallel", 1), model=model, engine=settings, count=COUNT, longest=300
    )
    trainers = {
        "plain": {"dtype": dtype},
        "small": {"dtype": dtype, "max_tokens_per_microbatch": LENGTH},
        "checkpointed": {"dtype": dtype, "activation_checkpointing": "full"},
    }
    (one,) = on_ranks("trained", model=model, samples=found[0], trainers=trainers)
    two = on_ranks(
        "trained", 2, model=model, samples=found[0], trainers={"sharded": {"dtype": dtype, "data_parallel": 2}}
    )
    for result in (one, *two):
        for name, (metrics, _) in result.items():
            assert (name, metrics["logprob_difference_max"]) == (name, 0.0)
            assert metrics["on_policy_tokens"] == metrics["trained_tokens"] > 1000


def test_the_attention_kernel_is_told_to_use_the_engines_instructions() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for size in (32, 64, 80, 96, 112, 128, 160, 192, 224, 256):
            assert rows.attention_isa(dtype, size) == cpu_attn._get_attn_isa(dtype, rows.BLOCK, size, "auto")


def test_keys_lie_in_blocks_of_their_segment() -> None:
    """Two segments of 3 tokens, and one of 2 after 33 shared ones."""
    where = rows.places(((2, 3, 0), (1, 2, 33)))
    assert where.blocks == 4
    assert where.slots.tolist() == [0, 1, 2, 32, 33, 34, *range(64, 64 + 35)]
    assert where.seen.tolist() == [1, 2, 3, 1, 2, 3, 34, 35]
    assert where.table.tolist() == [[0, 1]] * 3 + [[1, 2]] * 3 + [[2, 3]] * 2
