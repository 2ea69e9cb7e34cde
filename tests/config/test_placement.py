"""Which process runs where, and what the libraries that this is made for say about it (1 s)."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.config import PlacementConfig, RunConfig
from titan_rl.config_registry import RECIPES
from titan_rl.errors import ConfigError
from titan_rl.generation.config import GeneratorConfig
from titan_rl.hosts import facts
from titan_rl.hosts.facts import HostFacts, detect_host, visible_devices
from titan_rl.policy.config import TrainerConfig
from titan_rl.rollout.config import AgentsConfig, EnvironmentConfig, RolloutConfig
from titan_rl.run.checks import CPU_BLOCK, CPU_HEAD_DIMS
from titan_rl.supervision.fork_server import READ_AT_START, Stage
from titan_rl.supervision.fork_stages import fork_stages
from titan_rl.supervision.mesh_kinds import TrainerKind
from titan_rl.supervision.placement import TORCHRUN_VARIABLES, Kind, describe, devices_needed, plan
from titan_rl.supervision.proxy import CORES, cores

TOOL_SUM = Path(__file__).resolve().parents[2] / "rl_configs" / "tool_sum.py"
LISTING = """\
0, GPU-0a1b, 580.65.06, Disabled, 81559, 00000000:1A:00.0
1, GPU-0a2b, 580.65.06, Disabled, 81559, 00000000:1B:00.0
2, GPU-ffff, 580.65.06, Enabled, 40000, 00000001:9C:00.0
"""

small = st.integers(1, 3)
configs = st.builds(
    RunConfig,
    trainer=st.builds(TrainerConfig, data_parallel=small, tensor_parallel=small),
    generator=st.builds(GeneratorConfig, count=small, tensor_parallel=small),
    rollout=st.builds(RolloutConfig, workers=small),
    placement=st.builds(
        PlacementConfig, device=st.sampled_from(["auto", "cpu", "cuda"]), threads=small, spares=st.integers(0, 2)
    ),
)


def source(package: str, *path: str) -> str:
    """Text of a module, without importing its package."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0], *path).read_text()


@given(configs)
def test_on_cuda_every_computing_rank_has_a_device_of_its_own_among_those_that_its_mesh_sees(config):
    config = replace(config, placement=replace(config.placement, device="cuda"))
    devices = tuple(range(3, 3 + devices_needed(config)))
    placement = plan(config, HostFacts(cpus=8, cuda_devices=devices))
    idle = [mesh for mesh in placement.meshes.values() if not mesh.kind.computes]
    computing = [mesh for mesh in placement.meshes.values() if mesh not in idle]
    assert sorted(each for mesh in computing for each in mesh.devices) == list(devices)
    for mesh in computing:
        for rank, env in enumerate(mesh.env):
            seen = mesh.devices if mesh.kind is Kind.GENERATOR else mesh.devices[rank : rank + 1]
            assert env["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, seen))
    for mesh in idle:
        assert {env["CUDA_VISIBLE_DEVICES"] for env in mesh.env} == {""}


@given(configs, st.integers(2, 4))
def test_ranks_of_different_meshes_may_share_devices_and_those_of_one_mesh_never_do(config, times):
    config = replace(config, placement=replace(config.placement, device="cuda", ranks_per_device=times))
    devices = tuple(range(devices_needed(config)))
    placement = plan(config, HostFacts(cpus=8, cuda_devices=devices))
    computing = [mesh.devices for mesh in placement.meshes.values() if mesh.kind.computes]
    assert all(len(set(mesh)) == len(mesh) for mesh in computing)
    assert max(Counter(each for mesh in computing for each in mesh).values()) <= times
    assert config.generator_settings().shares_device


@given(configs)
def test_on_cpu_no_rank_sees_a_device_and_each_has_its_threads(config):
    config = replace(config, placement=replace(config.placement, device="cpu"))
    placement = plan(config, HostFacts(cpus=2, cuda_devices=(0, 1)))
    for mesh in placement.meshes.values():
        for env in mesh.env:
            assert env["CUDA_VISIBLE_DEVICES"] == ""
            assert env["OMP_NUM_THREADS"] == env["MKL_NUM_THREADS"] == str(config.placement.threads)


def test_on_cuda_a_trainer_rank_has_its_share_of_the_cores_and_memory_without_holes():
    host = HostFacts(cpus=96, cuda_devices=tuple(range(8)))
    placement = plan(RunConfig(trainer=TrainerConfig(data_parallel=2)), host)
    for env in placement.meshes["trainer"].env:
        assert env["OMP_NUM_THREADS"] == env["MKL_NUM_THREADS"] == "12"
        assert env["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    for mesh in placement.meshes.values():
        assert mesh.name == "trainer" or not {"12", "expandable_segments:True"} & set(mesh.env[0].values())


def test_on_cuda_a_rank_has_the_cores_near_its_device():
    host = HostFacts(cpus=8, cuda_devices=(2, 3, 5), device_cores=("0-3", "4-7", ""))
    placement = plan(RunConfig(), host)
    given = {mesh.devices[0]: mesh.env[0].get(CORES) for mesh in placement.meshes.values()}
    assert given == {2: "0-3", 3: "4-7", 5: None, None: None}
    assert CORES not in "\n".join(describe(placement, host)), "it is not alike for all generators"


@pytest.mark.parametrize(
    ("listed", "threads", "bound"),
    [("0-1,8", 2, {1, 8}), ("9", 1, {9}), ("2-7", 1, {1, 8, 9}), ("", 1, {1, 8, 9}), ("0-1,8", 3, {1, 8, 9})],
    ids=str,
)
def test_a_process_has_the_listed_cores_as_far_as_it_may_unless_its_threads_would_take_turns(listed, threads, bound):
    assert cores(listed, {1, 8, 9}, threads) == bound


@given(configs)
def test_every_mesh_has_the_ranks_that_the_config_asks_for(config):
    placement = plan(config, HostFacts(cpus=8, cuda_devices=tuple(range(devices_needed(config)))))
    ranks = {mesh.name: mesh.ranks for mesh in placement.meshes.values()}
    fleet = range(config.generator.count + config.placement.spares)
    generators = {f"generator{number}": config.generator.tensor_parallel for number in fleet}
    workers = {f"rollout{number}": 1 for number in range(config.rollout.workers)}
    assert ranks == {"trainer": config.trainer.ranks, **generators, "router": 1, **workers}
    assert len(placement.meshes) == len(ranks)
    for mesh in placement.meshes.values():
        assert len(set(mesh.positions)) == len(mesh.env) == len(mesh.devices) == len(mesh.positions)


def test_tensor_parallel_ranks_are_next_to_each_other():
    config = RunConfig(trainer=TrainerConfig(data_parallel=2, tensor_parallel=2))
    positions = plan(config, HostFacts(cpus=2)).meshes["trainer"].positions
    assert positions == ("fsdp 0/2, tp 0/2", "fsdp 0/2, tp 1/2", "fsdp 1/2, tp 0/2", "fsdp 1/2, tp 1/2")


@pytest.mark.parametrize(("devices", "expected"), [((), "cpu"), ((0, 1, 2, 3), "cuda")])
def test_auto_takes_cuda_where_the_host_has_it(devices, expected):
    assert plan(RunConfig(), HostFacts(cpus=2, cuda_devices=devices)).device == expected


def test_too_few_devices_are_refused_with_both_numbers():
    config = RunConfig(placement=PlacementConfig(device="cuda"))
    with pytest.raises(ConfigError, match=r"needs 3 CUDA devices \(trainer 1, generators 2 x 1\) and this host has 2"):
        plan(config, HostFacts(cpus=2, cuda_devices=(0, 1)))


def test_dynamo_is_turned_off_for_generators_on_cpu_only():
    config = RunConfig(placement=PlacementConfig(device="auto"))
    on_cpu = plan(config, HostFacts(cpus=2)).meshes["generator0"].env[0]
    on_cuda = plan(config, HostFacts(cpus=2, cuda_devices=(0, 1, 2))).meshes["generator0"].env[0]
    assert on_cpu["TORCHDYNAMO_DISABLE"] == "1" and on_cpu["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert not {"TORCHDYNAMO_DISABLE", "VLLM_CPU_OMP_THREADS_BIND"} & set(on_cuda)


@pytest.mark.parametrize(("ranks", "order"), [(1, None), (2, None), (4, "0")])
def test_more_than_two_ranks_add_in_a_fixed_order(ranks, order):
    config = RunConfig(generator=GeneratorConfig(tensor_parallel=ranks), placement=PlacementConfig(device="cuda"))
    env = plan(config, HostFacts(cpus=8, cuda_devices=tuple(range(1 + 2 * ranks)))).meshes["generator0"].env[0]
    assert env.get("VLLM_ALLREDUCE_USE_FLASHINFER") == order


def test_ranks_on_cuda_know_their_devices_and_network_by_exact_names_and_have_time_to_start():
    hosts = [HostFacts(cpus=8, cuda_devices=(0, 1), name=f"host{number}", interface="eth1") for number in range(2)]
    where = PlacementConfig(device="cuda", hosts=("10.0.0.2:1",), trainer=("host0", "host1"), trusted_network=True)
    config = RunConfig(trainer=TrainerConfig(data_parallel=2), placement=where)
    placement = plan(config, *hosts)
    assert {env["CUDA_DEVICE_ORDER"] for mesh in placement.meshes.values() for env in mesh.env} == {"PCI_BUS_ID"}
    for env in placement.meshes["trainer"].env:
        assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"]) == ("eth1", "=eth1"), "else NCCL takes eth10, too"
    (engine,) = placement.meshes["generator0"].env
    assert engine["NCCL_SOCKET_IFNAME"] == "=lo"
    assert engine["VLLM_LOGGING_LEVEL"] == "INFO", "a start of minutes says what it is at"
    table = SimpleNamespace(config=config, placement=placement)
    assert TrainerKind(table).start_seconds >= 1800
    table.placement = plan(RunConfig(), HostFacts(cpus=2))
    assert TrainerKind(table).start_seconds == where.start_seconds


def stages(stage: Stage, environment: Mapping[str, str]) -> Iterator[tuple[Stage, Mapping[str, str]]]:
    """Those that fork processes, each with the variables in which it imports."""
    environment = {**environment, **(stage.environment or {})}
    if stage.kinds:
        yield stage, environment
    for above in stage.above:
        yield from stages(above, environment)


@given(configs, st.sampled_from(["vllm", "simulated"]), st.booleans())
def test_every_process_can_be_forked_from_the_one_stage_of_its_kind(config, engine, deterministic):
    parallel = config.generator.tensor_parallel if engine == "vllm" else 1
    generator = replace(config.generator, engine=engine, tensor_parallel=parallel)
    config = replace(config, generator=generator, deterministic=deterministic)
    host = HostFacts(cpus=8, cuda_devices=tuple(range(devices_needed(config))))
    found = list(stages(fork_stages(config, host), {}))
    assert sorted(kind for stage, _ in found for kind in stage.kinds) == sorted(Kind)
    of = {kind: (stage, environment) for stage, environment in found for kind in stage.kinds}
    assert of[Kind.TRAINER][0].imports != of[Kind.ROUTER][0].imports
    assert (of[Kind.GENERATOR][0] is of[Kind.ROUTER][0]) == (engine == "simulated")
    for mesh in plan(config, host).meshes.values():
        stage, environment = of[mesh.kind]
        for variables in mesh.env:
            read = {name for name in variables if name.startswith(READ_AT_START) or name in (stage.environment or {})}
            assert {name: variables[name] for name in read} == {name: environment.get(name) for name in read}


@given(configs, st.integers(1, 3), st.sampled_from(["cpu", "cuda"]), st.booleans())
def test_what_is_placed_again_leaves_alone_what_lives(config, hosts, device, named):
    facts = [
        HostFacts(cpus=4, cuda_devices=tuple(range(devices_needed(config))), name=f"host{number}")
        for number in range(hosts)
    ]
    names = tuple(host.name for host in facts) if named else ()
    where = replace(config.placement, device=device, generators=names, rollouts=names, router=facts[-1].name)
    config = replace(config, placement=where)
    before = plan(config, *facts)
    for lost in range(1, hosts):
        left = facts[:lost] + facts[lost + 1 :]
        after = plan(config, *left, kept=before)
        assert after.device == device
        assert {host for mesh in after.meshes.values() for host in mesh.hosts} <= {host.name for host in left}
        assert {mesh.name for mesh in before.meshes.values()} - {mesh.name for mesh in after.meshes.values()} == {
            f"relay{lost}"
        }
        for mesh in before.meshes.values():
            if facts[lost].name not in mesh.hosts:
                assert any(each is mesh for each in after.meshes.values())


def test_what_has_no_room_any_more_is_left_out_and_comes_back_with_room():
    config = replace(
        RunConfig(), placement=PlacementConfig(device="cuda"), generator=GeneratorConfig(count=2, tensor_parallel=2)
    )
    hosts = HostFacts(cpus=4, cuda_devices=(0, 1, 2)), HostFacts(cpus=4, cuda_devices=(0, 1), name="host1")
    before = plan(config, *hosts)
    after = plan(config, hosts[0], kept=before)
    assert {"generator0", "generator1"} - set(after.meshes) == {
        name for name in ("generator0", "generator1") if before.meshes[name].hosts[0] == "host1"
    }
    assert {"trainer", "router", "rollout0", "relay0"} <= set(after.meshes)
    again = plan(config, *hosts, kept=after)
    for name in ("generator0", "generator1"):
        assert (again.meshes[name].hosts, again.meshes[name].devices) == (
            before.meshes[name].hosts,
            before.meshes[name].devices,
        )


def test_a_gateway_on_loopback_is_for_programs_on_its_host():
    hosts = HostFacts(cpus=2), HostFacts(cpus=2, name="host1")
    config = RunConfig(environment=EnvironmentConfig(name=f"{TOOL_SUM}:ToolSumAgent"))
    config = replace(config, placement=PlacementConfig(rollouts=("host1",)))
    with pytest.raises(ConfigError, match="rollout.agents.host: the gateway of host0 cannot be reached from host1"):
        plan(config, *hosts)
    reachable = replace(config.rollout, agents=AgentsConfig(host="10.0.0.1"))
    assert plan(replace(config, rollout=reachable), *hosts).meshes["rollout0"].hosts == ("host1",)


@pytest.mark.parametrize("host", ["[::1]:x", "10.0.0.2:70000", "10.0.0.2"])
def test_hosts_that_are_no_address_are_refused(host):
    with pytest.raises(ConfigError, match="placement.hosts"):
        PlacementConfig(hosts=(host,))


def test_all_hosts_but_loopback_are_on_a_network_that_must_be_trusted():
    hosts = ("127.evil.com:1", "10.0.0.2:1")
    assert PlacementConfig(hosts=hosts).untrusted() == ("127.evil.com", "10.0.0.2")
    assert PlacementConfig(address="10.0.0.1").untrusted() == ("10.0.0.1",)
    assert PlacementConfig(hosts=hosts, trusted_network=True).untrusted() == ()
    assert PlacementConfig(hosts=("127.0.0.1:1", "localhost:2")).untrusted() == ()


def test_a_trainer_over_several_hosts_needs_a_trusted_network():
    hosts = HostFacts(cpus=2), HostFacts(cpus=2, name="host1")
    where = PlacementConfig(hosts=("10.0.0.2:1",), trainer=("host0", "host1"))
    config = RunConfig(trainer=TrainerConfig(data_parallel=2), placement=where)
    placement = plan(config, *hosts)
    table = SimpleNamespace(config=config, placement=placement, report=print, say=print)
    with pytest.raises(ConfigError, match="torch's connections between the hosts of a trainer are not encrypted"):
        TrainerKind(table).client(placement.meshes["trainer"])
    table.config = replace(config, placement=replace(where, trusted_network=True))
    TrainerKind(table).client(placement.meshes["trainer"])


def test_the_description_has_one_row_for_every_process():
    host = HostFacts(cpus=2)
    placement = plan(RECIPES["copy4_2x2"](), host)
    lines = describe(placement, host)
    rows = [line for line in lines if re.match(r"(trainer|generator\d|router|rollout\d) +\d", line)]
    assert len(rows) == placement.processes == 8


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        (None, (0, 1, 2)),
        ("", ()),
        ("-1", ()),
        ("2,0", (2, 0)),
        (" 1 , 2", (1, 2)),
        ("0,7,1", (0,)),
        ("GPU-ff,GPU-0a1", (2, 0)),
        ("GPU-0a", ()),
        ("NoDevFiles", ()),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(visible, devices):
    assert visible_devices(LISTING, visible) == devices


@pytest.mark.parametrize(
    ("driver", "devices"),
    [
        ("", ()),
        (f"cat <<'END'\n{LISTING}END", (1, 2)),
        ("echo '0, GPU-1, 580.65.06, Disabled, 81559, 00000000:1A:00.0'\nexit 9", ()),
    ],
)
def test_a_host_has_the_devices_that_its_driver_lists_unless_it_fails(monkeypatch, tmp_path, driver, devices):
    if driver:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{driver}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(facts, "PCI", tmp_path)
    (tmp_path / "0001:9c:00.0").mkdir()
    (tmp_path / "0001:9c:00.0" / "local_cpulist").write_text("0-1,8\n")
    host = detect_host({"CUDA_VISIBLE_DEVICES": "1,2"} if devices else {})
    assert host.device_cores == (("", "0-1,8") if devices else ()), "the kernel says nothing of the other one"
    assert host.cuda_devices == devices and host.cpus >= 1 and host.memory > 0
    assert (host.driver, host.mig, host.device_memory >> 20) == (
        ("580.65.06", True, 40000) if devices else ("", False, 0)
    )


def test_all_variables_that_torchrun_sets_are_known():
    agent = source("torch", "distributed", "elastic", "agent", "server", "local_elastic_agent.py")
    worker_env = agent[agent.index("worker_env = {") : agent.index("_log_line_prefix_template:")]
    set_by_agent = set(re.findall(r'^\s+"([A-Z_]+)":', worker_env, re.MULTILINE))
    assert {"RANK", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"} <= set_by_agent
    launcher = set(re.findall(r'os\.environ\["(\w+)"\] =', source("torch", "distributed", "launcher", "api.py")))
    assert set_by_agent | launcher | {"LOCAL_RANK"} <= set(TORCHRUN_VARIABLES)


def test_the_head_and_block_sizes_of_the_cpu_attention_are_vllms():
    tree = ast.parse(source("vllm", "v1", "attention", "backends", "cpu_attn.py"))
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    heads, blocks = (
        ast.unparse(functions[f"get_supported_{what}"].body[-1]) for what in ("head_sizes", "kernel_block_sizes")
    )
    assert heads == f"return {[*CPU_HEAD_DIMS]}"
    assert blocks == f"return [MultipleOf({CPU_BLOCK})]"


def test_a_run_has_a_gateway_where_programs_play_its_rollouts():
    names = [
        [*plan(RunConfig(environment=EnvironmentConfig(name=f"{TOOL_SUM}:{task}")), HostFacts(cpus=2)).meshes]
        for task in ("ToolSum", "ToolSumAgent")
    ]
    assert [name for name in names[1] if name != "gateway"] == names[0]
    assert "gateway" in names[1]


@pytest.mark.parametrize("setting", [{"host": "0.0.0.0"}, {"host": ""}])
def test_where_programs_cannot_reach_a_gateway_is_refused(setting):
    with pytest.raises(ConfigError, match=f"rollout.agents.{next(iter(setting))}"):
        AgentsConfig(**setting)
