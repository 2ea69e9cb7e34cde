"""`deterministic = true` reaches every part that it is about."""

from __future__ import annotations

from dataclasses import replace

import pytest

from titan_rl import train
from titan_rl.config import RunConfig
from titan_rl.config_registry import copy4
from titan_rl.errors import ConfigError
from titan_rl.generation.config import GeneratorConfig, refuse_more_ranks
from titan_rl.hosts.facts import HostFacts
from titan_rl.supervision.placement import plan

HOST = HostFacts(cpus=8, cuda_devices=tuple(range(8)))


def environment(config: RunConfig, mesh: str) -> dict[str, str]:
    return plan(config, HOST).meshes[mesh].env[0]


def test_the_run_decides_for_generators_and_trainer():
    plain, exact = copy4(), replace(copy4(), deterministic=True)
    assert not plain.generator_settings().deterministic and not plain.trainer_settings().deterministic
    assert exact.generator_settings().deterministic and exact.trainer_settings().deterministic
    assert replace(exact.generator_settings(), deterministic=False) == plain.generator_settings()


def test_a_generator_can_be_deterministic_by_itself():
    config = replace(copy4(), generator=GeneratorConfig(deterministic=True))
    assert config.generator_settings().deterministic and not config.trainer_settings().deterministic


@pytest.mark.parametrize(
    ("device", "mesh", "variable"),
    [
        ("cpu", "generator1", "VLLM_CPU_ATTN_SPLIT_KV"),
        ("cuda", "generator1", "VLLM_BATCH_INVARIANT"),
        ("cuda", "trainer", "CUBLAS_WORKSPACE_CONFIG"),
        ("cuda", "trainer", "NCCL_ALGO"),
    ],
)
def test_processes_start_in_the_environment_of_the_mode(device, mesh, variable):
    config = copy4()
    config = replace(config, placement=replace(config.placement, device=device))
    assert variable in environment(replace(config, deterministic=True), mesh)
    assert variable not in environment(config, mesh)


def test_a_cache_of_older_weights_does_not_go_with_it():
    with pytest.raises(ConfigError, match="deterministic needs generator.keep_prefix_cache = false"):
        replace(copy4(), deterministic=True, generator=GeneratorConfig(keep_prefix_cache=True))


def test_more_tensor_parallel_ranks_than_two_are_refused_on_cpu(capsys):
    refuse_more_ranks(2)
    with pytest.raises(ConfigError, match="generator.tensor_parallel is 4"):
        refuse_more_ranks(4)
    line = "--recipe copy4 --deterministic true --generator.tensor-parallel 4 --policy.tiny.kv-heads 4 --dry-run"
    assert train.main(line.split()) == 2
    assert "on CPU deterministic = true holds for 1 and 2 ranks only" in capsys.readouterr().err
    assert train.main(line.replace("true", "false").split()) == 0


def test_parity_makes_generators_deterministic_and_nothing_else():
    plain = copy4()
    config = replace(plain, trainer=replace(plain.trainer, parity="bitwise"))
    assert config.generator_settings() == replace(plain.generator_settings(), deterministic=True)
    assert not config.trainer_settings().deterministic and not config.staleness_limits().deterministic
    assert "VLLM_CPU_ATTN_SPLIT_KV" in environment(config, "generator1")


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ("--placement.device cuda", "placement.device cpu: on CUDA no run of it was ever made"),
        ("--trainer.tensor-parallel 2", "trainer.tensor_parallel 1 (generators may have 1 or 2 ranks)"),
        ("--trainer.dtype bfloat16", "trainer.dtype float32, which generators compute in"),
        ("--generator.engine simulated", "generator.engine vllm"),
        ("--trainer.activation-checkpointing selective", "another trainer.activation_checkpointing"),
        (
            "--trainer.lora.r 4 --trainer.dtype bfloat16 --generator.dtype bfloat16",
            "trainer.dtype float32 beside trainer.lora",
        ),
    ],
)
def test_what_parity_does_not_hold_for_is_refused_by_name(capsys, settings, needed):
    line = f"--recipe copy4 --trainer.parity bitwise --dry-run {settings}"
    assert train.main(line.split()) == 2
    assert f"trainer.parity bitwise needs {needed}" in capsys.readouterr().err


def test_parity_is_not_refused_where_it_holds():
    line = "--recipe copy4_async --trainer.parity bitwise --generator.tensor-parallel 2 --trainer.data-parallel 2 "
    line += "--trainer.lora.r 4"
    assert train.main([*line.split(), "--dry-run"]) == 0
