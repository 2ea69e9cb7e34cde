"""Generators of several groups in one fleet: which is of which, what may differ, where they are (2 s)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.config import PlacementConfig, RunConfig
from titan_rl.config_registry import copy4
from titan_rl.errors import ConfigError
from titan_rl.generation.config import MAY_DIFFER, GeneratorConfig, refuse_unequal
from titan_rl.launch.hosts.facts import HostFacts
from titan_rl.launch.placement import describe, devices_needed, plan
from titan_rl.launch.resume import check_differences, differences
from titan_rl.overrides import apply, option_overrides, split_options, to_toml, toml_overrides

HOST = HostFacts(cpus=8, cuda_devices=tuple(range(8)))

small = st.integers(1, 3)
configs = st.builds(
    RunConfig,
    generator=st.builds(GeneratorConfig, count=small, tensor_parallel=small),
    more_generators=st.dictionaries(
        st.sampled_from(["a", "b", "c"]), st.fixed_dictionaries({}, optional={"count": small, "tensor_parallel": small})
    ),
    placement=st.builds(PlacementConfig, spares=st.integers(0, 2), device=st.just("cuda")),
)


def mixed(**large: Any) -> RunConfig:
    """Two generators of one rank and one of two."""
    return replace(copy4(), more_generators={"large": {"tensor_parallel": 2, **large}})


def given_options(config: RunConfig, line: str) -> RunConfig:
    words = [(option, option.removeprefix("--"), words) for option, words in split_options(line.split())]
    return apply(config, [option_overrides(words, Path.cwd())])


# --- which is of which -----------------------------------------------------------------------------------------------


@given(configs)
def test_every_generator_is_of_one_group_and_spares_and_later_ones_are_of_the_first(config: RunConfig) -> None:
    groups = {name: config.generator_group(name) for name in config.generator_names()}
    in_order = [group for group, settings in config.generator_groups().items() for _ in range(settings.count)]
    assert list(groups.values()) == in_order + ["generator"] * config.placement.spares
    assert config.generator_group(f"generator{len(groups) + 5}") == "generator"
    assert config.other_generators().keys() == {name for name, group in groups.items() if group != "generator"}


@given(configs)
def test_a_group_has_the_settings_of_the_first_apart_from_its_own(config: RunConfig) -> None:
    for name, settings in config.more_generators.items():
        group = config.generator_groups()[f"more_generators.{name}"]
        assert group == replace(config.generator, **{"count": 1, **settings})


def test_what_the_command_line_changes_in_the_first_group_changes_in_all() -> None:
    config = given_options(mixed(), "--generator.burst-steps 7 --deterministic true --more-generators.large.count 2")
    for name in config.generator_names():
        assert config.generator_settings(name).burst_steps == 7 and config.generator_settings(name).deterministic
    assert len(config.generator_names()) == 4


def test_groups_come_back_from_the_toml_of_a_run() -> None:
    line = (
        "--more-generators.large.tensor-parallel 2 --more-generators.old.max-num-seqs 8 --more-generators.old.count 2"
    )
    config = given_options(
        copy4(), line + " --placement.more-generators.old host0 --placement.more-generators.large a b"
    )
    again = apply(copy4(), [toml_overrides(tomli.loads(to_toml(config)), Path("/config.toml"))])
    assert again == config
    assert again.placement.more_generators == {"old": ["host0"], "large": ["a", "b"]}
    assert list(again.generator_groups()) == ["generator", "more_generators.large", "more_generators.old"]


def test_a_run_may_go_on_with_other_groups() -> None:
    found = differences(copy4(), mixed())
    assert [each.setting for each in found] == ["more_generators.large.tensor_parallel"]
    check_differences(found, Path("run"))


# --- what may differ -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("large 2", "more_generators.large: is a group of settings, set more_generators.large.NAME"),
        (
            "large.dtype bfloat16",
            "more_generators.large.dtype: must be as in generator; generators may differ in count",
        ),
        ("large.max-model-len 32", "more_generators.large.max_model_len: must be as in generator"),
        ("large.engine simulated", "more_generators.large.engine: must be as in generator"),
        ("large.keep-prefix-cache", "more_generators.large.keep_prefix_cache: must be as in generator"),
        ("large.tensor-paralel 2", "more_generators.large.tensor_paralel: there is no such setting"),
        ("large.count two", "more_generators.large.count: expected int, got 'two'"),
        ("large.count true", "more_generators.large.count: expected int, got True"),
        ("large.prefix-caching 1", "more_generators.large.prefix_caching: expected bool, got 1"),
        ("large.count 0", "more_generators.large: generator.count must be at least 1, got 0"),
        (
            "large.max-num-batched-tokens 8",
            "more_generators.large: generator.max_num_batched_tokens (8) must be at least",
        ),
    ],
)
def test_what_must_be_the_same_or_is_wrong_is_refused_by_name(line: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        given_options(copy4(), f"--more-generators.{line}")
    assert str(refusal.value).startswith(sentence)


def test_a_whole_number_passes_for_a_float() -> None:
    mixed(heartbeat_seconds=2)


def test_the_settings_that_may_differ_are_settings() -> None:
    assert {*MAY_DIFFER} <= {*GeneratorConfig.__dataclass_fields__}


@pytest.mark.parametrize(
    ("device", "settings", "sentence"),
    [
        ("cpu", {"tensor_parallel": 4}, "more_generators.large.tensor_parallel is 4, and on CPU"),
        ("cpu", {"tensor_parallel": 2, "block_size": 64, "max_num_seqs": 3}, ""),
        ("cuda", {"tensor_parallel": 2}, "more_generators.large.tensor_parallel is 2 and generator.tensor_parallel 1"),
        ("cuda", {"block_size": 16}, "more_generators.large.block_size is 16 and generator.block_size 32"),
        ("cuda", {"max_num_seqs": 3, "gpu_memory_utilization": 0.5}, ""),
    ],
)
def test_a_deterministic_run_takes_only_generators_that_give_the_same_bits(device, settings, sentence) -> None:
    groups = replace(copy4(), more_generators={"large": settings}).generator_groups()
    if not sentence:
        return refuse_unequal(groups, device)
    with pytest.raises(ConfigError) as refusal:
        refuse_unequal(groups, device)
    assert str(refusal.value).startswith(sentence)


def test_deterministic_does_not_go_with_a_cache_of_older_weights() -> None:
    with pytest.raises(ConfigError, match="deterministic needs generator.keep_prefix_cache = false"):
        replace(copy4(), deterministic=True, generator=GeneratorConfig(keep_prefix_cache=True))


# --- where they are --------------------------------------------------------------------------------------------------


@given(configs, st.integers(1, 3))
def test_every_generator_has_the_ranks_and_devices_of_its_group(config: RunConfig, hosts: int) -> None:
    devices = tuple(range(devices_needed(config)))
    facts = [HostFacts(cpus=4, cuda_devices=devices, name=f"host{number}") for number in range(hosts)]
    placement = plan(config, *facts)
    names = [name for name in placement.names if name.startswith("generator")]
    assert names == config.generator_names()
    for name in names:
        mesh = placement.mesh(name)
        assert mesh.ranks == config.generator_settings(name).tensor_parallel
        assert len({*mesh.hosts}) == 1 and None not in mesh.devices
    taken = [each for mesh in placement.meshes for each in zip(mesh.hosts, mesh.devices, strict=True) if mesh.computes]
    assert len({*taken}) == len(taken) == devices_needed(config)


def test_a_large_generator_gets_its_host_before_small_ones_fill_all() -> None:
    config = replace(copy4(), generator=GeneratorConfig(count=3), more_generators={"large": {"tensor_parallel": 4}})
    hosts = [HostFacts(cpus=8, cuda_devices=(0, 1, 2, 3), name=f"host{number}") for number in range(2)]
    placement = plan(replace(config, placement=PlacementConfig(device="cuda")), *hosts)
    assert len({*placement.mesh("generator3").hosts} & {*placement.mesh("generator0").hosts}) == 0


def test_a_group_can_have_hosts_of_its_own() -> None:
    hosts = [HostFacts(cpus=8, name=f"host{number}") for number in range(3)]
    where = PlacementConfig(generators=("host0", "host1"), more_generators={"large": "host2"})
    placement = plan(replace(mixed(), placement=where), *hosts)
    assert {*placement.mesh("generator2").hosts} == {"host2"}
    assert {host for name in ("generator0", "generator1") for host in placement.mesh(name).hosts} == {"host0", "host1"}
    nowhere = replace(where, more_generators={"large": ["host7"]})
    with pytest.raises(ConfigError, match="placement.more_generators.large: there is no host7; there are host0, host1"):
        plan(replace(mixed(), placement=nowhere), *hosts)


def test_a_generator_that_is_placed_again_is_of_its_kind_and_may_leave_the_hosts_of_its_group() -> None:
    hosts = [HostFacts(cpus=8, name=f"host{number}") for number in range(3)]
    config = replace(mixed(), placement=PlacementConfig(more_generators={"large": "host2"}))
    after = plan(config, *hosts[:2], kept=plan(config, *hosts))
    assert after.mesh("generator2").positions == ("large, tp 0/2", "large, tp 1/2")
    assert {*after.mesh("generator2").hosts} <= {"host0", "host1"}


@pytest.mark.parametrize("hosts", [3, [3], {"a": 1}])
def test_hosts_of_a_group_are_names(hosts: Any) -> None:
    with pytest.raises(ConfigError, match="placement.more_generators.large: expected names of hosts, got "):
        PlacementConfig(more_generators={"large": hosts})


def test_hosts_of_a_group_that_there_is_not_are_refused() -> None:
    with pytest.raises(ConfigError, match="placement.more_generators.huge: there is no such group in more_generators"):
        replace(mixed(), placement=PlacementConfig(more_generators={"huge": "host0"}))


def test_the_table_names_the_group() -> None:
    config = replace(mixed(), placement=PlacementConfig(device="cpu", spares=1))
    lines = [line.split(maxsplit=4)[-1] for line in describe(plan(config, HOST), HOST) if line.startswith("generator")]
    assert lines == ["tp 0/1", "tp 0/1", "large, tp 0/2", "large, tp 1/2", "spare, tp 0/1"]


def test_the_sum_that_does_not_fit_is_over_all_groups() -> None:
    config = replace(mixed(count=2), placement=PlacementConfig(device="cuda", spares=1))
    with pytest.raises(
        ConfigError, match=r"needs 8 CUDA devices \(trainer 1, generators 3 x 1 \+ 2 x 2\) and this host"
    ):
        plan(config, replace(HOST, cuda_devices=(0, 1)))
