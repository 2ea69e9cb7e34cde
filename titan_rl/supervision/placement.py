"""Which process of which mesh runs on which host and device: a pure function of the run config and the hosts.

Always true of a `Placement`:

- Mesh names are unique (`Kind`). There is a `gateway` where the task defines `play`; where a checkpoint is served,
  there is one, and neither trainer nor rollout workers. The last generators are spares. Several hosts have relays.
- Only the trainer spans hosts, with equal shares of its ranks in the order of the hosts.
- On CUDA every rank of the trainer and of the generators has a device that no other rank of its mesh has, and none of
  another mesh's unless `placement.ranks_per_device` allows it. The ranks of a generator see all
  devices of that generator, as torchrun's do (vLLM's all-reduce maps them), and a rank of the trainer only its own. No
  other process sees a device, and on CPU none does: a stray `.cuda()` fails instead of taking memory from a rank.
- The environment of a rank is complete before Monarch starts. Variables that torchrun left in the controller's
  environment never reach a rank, because they describe another process group.

Imports neither Monarch nor torch, so that a dry run on any machine can show the plan of a run on another one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Literal

from titan_rl.config import PlacementConfig, RunConfig
from titan_rl.environments import SHORT_NAMES
from titan_rl.environments.base import Environment
from titan_rl.errors import ConfigError
from titan_rl.gateway.config import is_loopback
from titan_rl.generation.config import generator_environment
from titan_rl.hosts.facts import HostFacts
from titan_rl.importing import import_name
from titan_rl.supervision.process import SUPERVISION_ENVIRONMENT, TCP_ONLY
from titan_rl.supervision.proxy import CORES

Device = Literal["cpu", "cuda"]

TORCHRUN_VARIABLES = """
RANK LOCAL_RANK GROUP_RANK ROLE_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE ROLE_WORLD_SIZE ROLE_NAME
MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS
TORCHELASTIC_USE_AGENT_STORE TORCHELASTIC_ERROR_FILE TORCHELASTIC_SIGNALS_TO_HANDLE TORCH_NCCL_ASYNC_ERROR_HANDLING
""".split()
"""Variables that torchrun sets in the process that it starts. They are removed before a mesh is spawned. For example,
with TORCHELASTIC_USE_AGENT_STORE rank 0 of a mesh would wait for torchrun's store instead of opening its own."""

_INTERFACE = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "="}
"""Ranks that compute listen for each other on this network interface only, and what stands before its name: without it
NCCL would take eth01, too, for eth0."""


class Kind(StrEnum):
    """What runs in a mesh. Its name is the kind, with a number where there are several."""

    RELAY = "relay"
    """Brings weights to its host."""
    TRAINER = "trainer"
    GENERATOR = "generator"
    ROUTER = "router"
    GATEWAY = "gateway"
    ROLLOUT = "rollout"
    """One rollout worker."""

    @property
    def computes(self) -> bool:
        """Whether its ranks are one model's."""
        return self in (Kind.TRAINER, Kind.GENERATOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """One mesh of `ranks` processes."""

    kind: Kind
    name: str
    hosts: tuple[str, ...]
    """Per rank, the name of its host; ranks of one host follow each other."""
    env: tuple[dict[str, str], ...]
    """Per rank, what to set before Monarch starts. The rendezvous (RANK, WORLD_SIZE, …) is not in it: it is known
    when the mesh is spawned."""
    devices: tuple[int | None, ...]
    """Per rank, the CUDA device; None: CPU."""
    positions: tuple[str, ...]
    """Per rank, its place in the parallelism, for people."""

    @property
    def ranks(self) -> int:
        return len(self.env)

    @property
    def device(self) -> Device:
        """Of all its ranks."""
        return "cpu" if self.devices[0] is None else "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """All meshes of a run."""

    device: Device
    """Device of trainer and generators."""
    meshes: Mapping[str, MeshPlan]
    """By name, in the order of their start: each uses handles of those before it."""

    @property
    def processes(self) -> int:
        return sum(mesh.ranks for mesh in self.meshes.values())


def resolve_device(config: RunConfig, *hosts: HostFacts) -> Device:
    """`placement.device` with `auto` decided."""
    if config.placement.device == "auto":
        return "cuda" if any(host.cuda_devices for host in hosts) else "cpu"
    return config.placement.device


def devices_needed(config: RunConfig) -> int:
    """CUDA devices that the run takes on CUDA: for each rank of the trainer (if any) and of every generator one, or its
    share of one."""
    trainer, of_one = 0 if config.serving else config.trainer.ranks, config.generator.tensor_parallel
    ranks = len(config.generator_names()) * of_one + trainer
    return max(-(-ranks // config.placement.ranks_per_device), trainer, of_one)


def plays(config: RunConfig) -> bool:
    """Whether the task's rollouts are played by programs, which need a gateway. Imports the task's class, or raises
    ConfigError."""
    task = import_name(config.environment.name, SHORT_NAMES)
    return getattr(task, "play", Environment.play) is not Environment.play


class _Room:
    """What is left of the hosts while meshes are placed."""

    def __init__(self, device: Device, hosts: Sequence[HostFacts], where: PlacementConfig, *, some_lost: bool) -> None:
        self.hosts = {host.name: host for host in hosts}
        self._where = where
        self._some_lost = some_lost
        on_cuda, times = device == "cuda", where.ranks_per_device
        self._free = {host.name: list(host.cuda_devices) * times for host in hosts} if on_cuda else {}
        self._computing = dict.fromkeys(self.hosts, 0)  # ranks
        self._others = dict.fromkeys(self.hosts, 0)  # processes

    def take(
        self, host: str, *, computes: bool, device: int | None = None, besides: Sequence[int | None] = ()
    ) -> int | None:
        """Place a process; returns its device: this one, if it has it already, else the emptiest not `besides`."""
        if not computes:
            self._others[host] += 1
            return None
        self._computing[host] += 1
        if not self._free:
            return None
        free = self._free[host]
        device = max((each for each in free if each not in besides), key=free.count) if device is None else device
        free.remove(device)
        return device

    def near(self, host: str, device: int | None) -> dict[str, str]:
        """Binds a rank to the cores of its device's NUMA node: others reach the device through another processor."""
        cores = dict(zip(self.hosts[host].cuda_devices, self.hosts[host].device_cores, strict=False))
        return {CORES: cores[device]} if device is not None and cores.get(device) else {}

    def for_trainer(self, ranks: int, tensor_parallel: int) -> list[str]:
        """Hosts that share the ranks: as few as have room, if the config names none. Raises ConfigError."""
        names = self._named("trainer", self._where.trainer)
        all_of_them = bool(self._where.trainer) and not self._some_lost
        for count in [len(names)] if all_of_them else range(1, len(names) + 1):
            found = self._with_room(names, ranks // count)
            if len(found) >= count and ranks % (count * tensor_parallel) == 0:
                return sorted(found[:count], key=names.index)
        raise ConfigError(
            f"placement.trainer: {ranks} ranks (trainer.data_parallel, trainer.tensor_parallel) cannot be shared "
            f"evenly among {', '.join(names)}: whole tensor-parallel groups on each, and on CUDA a device for each rank"
        )

    def for_generator(self, ranks: int) -> list[str]:
        """The emptiest host. Raises ConfigError."""
        names = self._where.generators
        joined = [name for name in self.hosts if int(name.removeprefix("host")) > len(self._where.hosts)]
        if found := self._with_room(self._named("generators", [*names, *joined] if names else ()), ranks):
            return found[:1]
        raise ConfigError(f"placement.generators: no host has {ranks} CUDA devices left for one generator")

    def for_process(self, setting: str, names: Sequence[str]) -> list[str]:
        """The emptiest host for a process that does not compute. Raises ConfigError."""
        return [min(self._named(setting, names), key=lambda name: self._others[name])]

    def _named(self, setting: str, names: Sequence[str]) -> list[str]:
        """Hosts that a setting names; all, if it names none, or those that it names are lost."""
        there = [name for name in names if name in self.hosts]
        if len(there) < len(names) and not self._some_lost:
            name = next(name for name in names if name not in self.hosts)
            raise ConfigError(f"placement.{setting}: there is no {name}; there are {', '.join(self.hosts)}")
        return there or list(self.hosts)

    def _with_room(self, names: Sequence[str], ranks: int) -> list[str]:
        """Those with room for so many ranks that compute, the emptiest first."""
        if self._free:
            fit = [name for name in names if len(set(self._free[name])) >= ranks]
            return sorted(fit, key=lambda name: -len(self._free[name]))
        return sorted(names, key=lambda name: self._computing[name] / self.hosts[name].cpus)


def threads(number: int) -> dict[str, str]:
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(number))


def trainer_threads(host: HostFacts, device: Device) -> dict[str, str]:
    """On CUDA a rank has its device's share of the cores."""
    return threads(max(1, host.cpus // len(host.cuda_devices))) if device == "cuda" and host.cuda_devices else {}


def engine_environment(config: RunConfig, device: Device) -> dict[str, str]:
    settings, threads = config.generator_settings(), config.placement.threads
    ranks, deterministic = settings.tensor_parallel, settings.deterministic
    return generator_environment(device, tensor_parallel=ranks, threads=threads, deterministic=deterministic)


def plan(
    config: RunConfig, *hosts: HostFacts, generators: Sequence[str] | None = None, kept: Placement | None = None
) -> Placement:
    """Place the run.

    Args:
        hosts: the controller's first.
        generators: names of those that there are to be; None: those that the run starts with.
        kept: the placement so far, of which hosts may be gone: its meshes stay where they are if their hosts are still
            there, and they are still to be. A mesh for which no room is left is not in the new one.

    Raises:
        ConfigError: a mesh does not fit on any host, says by how much; or a host is named that does not exist, or the
            task cannot be imported.
    """
    device, where = kept.device if kept else resolve_device(config, *hosts), config.placement
    room = _Room(device, hosts, where, some_lost=kept is not None)
    devices = sum(len(host.cuda_devices) for host in hosts)
    needed = devices_needed(config)
    if kept is None and device == "cuda" and needed > devices:
        trainer_share = "" if config.serving else f"trainer {config.trainer.ranks}, "
        raise ConfigError(
            f"the run needs {needed} CUDA devices ({trainer_share}generators "
            f"{len(config.generator_names())} x {config.generator.tensor_parallel}) and "
            f"{'this host has' if len(hosts) == 1 else f'these {len(hosts)} hosts have'} "
            f'{devices or "none"}; placement.ranks_per_device lets them share; placement.device = "cpu" needs none'
        )
    trainer = config.trainer
    common = {**threads(where.threads), **SUPERVISION_ENVIRONMENT, **(TCP_ONLY if where.rdma == "off" else {})}
    if device == "cuda":
        common["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as nvidia-smi numbers them
    generators = config.generator_names() if generators is None else generators
    stay = {
        name: mesh
        for name, mesh in (kept.meshes if kept else {}).items()
        if room.hosts.keys() >= set(mesh.hosts) and (mesh.kind is not Kind.GENERATOR or name in generators)
    }
    for mesh in stay.values():
        for host, taken in zip(mesh.hosts, mesh.devices, strict=True):
            room.take(host, computes=mesh.kind.computes, device=taken)
    meshes: dict[str, MeshPlan] = {}

    def place(
        kind: Kind, name: str, find: Callable[[], Sequence[str]], positions: Sequence[str] = ("-",), **variables: str
    ) -> None:
        """`find` gives the hosts of the mesh, which share its ranks."""
        if name in stay:
            meshes[name] = stay[name]
            return
        try:
            found = find()
        except ConfigError:
            if kept is None:
                raise
            return
        chosen = [host for host in found for _ in range(len(positions) // len(found))]
        taken: list[int | None] = []
        for host in chosen:
            besides = [number for there, number in zip(chosen, taken, strict=False) if there == host]
            taken.append(room.take(host, computes=kind.computes, besides=besides))
        indices = tuple(taken)

        def environment(host: str, device_index: int | None) -> dict[str, str]:
            seen = indices if kind is Kind.GENERATOR else (device_index,)
            env = {**common, "CUDA_VISIBLE_DEVICES": "" if device_index is None else ",".join(map(str, seen))}
            if kind.computes:
                interface = room.hosts[host].interface if len(found) > 1 else "lo"
                env |= {name: prefix + interface for name, prefix in _INTERFACE.items()}
                env |= room.near(host, device_index)
            if kind is Kind.TRAINER:
                env |= trainer_threads(room.hosts[host], device)
            return env | variables

        env = tuple(map(environment, chosen, indices))
        meshes[name] = MeshPlan(
            kind=kind, name=name, hosts=tuple(chosen), env=env, devices=indices, positions=tuple(positions)
        )

    for relayed in room.hosts if len(hosts) > 1 or "relay0" in stay else ():  # generators go on asking it
        place(Kind.RELAY, f"relay{relayed.removeprefix('host')}", lambda host=relayed: [host])  # type: ignore[misc]
    if not config.serving:
        positions = [
            f"fsdp {shard}/{trainer.data_parallel}, tp {rank}/{trainer.tensor_parallel}"
            for shard in range(trainer.data_parallel)
            for rank in range(trainer.tensor_parallel)
        ]
        find = partial(room.for_trainer, trainer.ranks, trainer.tensor_parallel)
        place(Kind.TRAINER, "trainer", find, positions, **config.trainer_settings().environment(device))
    engine = engine_environment(config, device)
    spares, ranks = config.generator_names()[config.generator.count :], config.generator.tensor_parallel
    for name in generators:
        positions = [f"{'spare, ' if name in spares else ''}tp {rank}/{ranks}" for rank in range(ranks)]
        place(Kind.GENERATOR, name, partial(room.for_generator, ranks), positions, **engine)
    place(Kind.ROUTER, "router", partial(room.for_process, "router", [where.router]))
    if config.serving or plays(config):
        place(Kind.GATEWAY, "gateway", partial(room.for_process, "gateway", [where.gateway]))
    find = partial(room.for_process, "rollouts", where.rollouts)
    for number in range(0 if config.serving else config.rollout.workers):  # a tokenizer is used on both sides of a fork
        place(Kind.ROLLOUT, f"rollout{number}", find, TOKENIZERS_PARALLELISM="false")
    if kept is None and "gateway" in meshes and is_loopback(address := config.rollout.agents.host):
        [there] = meshes["gateway"].hosts
        if apart := sorted({each.hosts[0] for each in meshes.values() if each.kind is Kind.ROLLOUT} - {there}):
            raise ConfigError(
                f"rollout.agents.host: the gateway of {there} cannot be reached from {', '.join(apart)} at {address}: "
                f"name an address of {there}, or keep the rollout workers there (placement.rollouts {there})"
            )
    return Placement(device=device, meshes=meshes)


def with_devices(host: HostFacts, config: RunConfig) -> HostFacts:
    """The host with as many devices as a run that asks for CUDA would need, where it has fewer: for a drawing, and for
    runs whose devices are on other hosts."""
    needed = devices_needed(config)
    if config.placement.device != "cuda" or len(host.cuda_devices) >= needed:
        return host
    return replace(host, cuda_devices=tuple(range(needed)), devices_there=len(host.cuda_devices))


def assumed_hosts(config: RunConfig, here: HostFacts) -> list[HostFacts]:
    """The hosts of the run as far as they are known before they are attached: all like this one."""
    addresses = (worker.rpartition(":")[0] for worker in config.placement.hosts)
    like = replace(here, devices_there=None)
    others = (replace(like, name=f"host{number}", address=address) for number, address in enumerate(addresses, 1))
    return [here, *others]


def describe(placement: Placement, *hosts: HostFacts) -> list[str]:
    """The placement as lines of text: a table of all processes."""
    several = len(hosts) > 1
    lines = [f"placement: {placement.processes} processes on {placement.device}"]
    for host in hosts:
        memory = f", {host.memory / 2**30:.1f} GiB of memory available" if host.memory else ""
        name = f"{host.name}{f' at {host.address}' if host.address else ''}" if several else "host"
        devices = f"{len(host.cuda_devices) or 'no'} CUDA devices"
        if host.devices_there is not None:
            devices = f"{host.devices_there or 'no'} CUDA devices; drawn as if it had {len(host.cuda_devices)}"
        lines.append(f"({name}: {host.cpus} CPUs{memory}, {devices})")
    if not several:
        lines = [" ".join(lines)]
    lines.append("")
    rows = [["host", "mesh", "rank", "device", "threads", "position"]]
    for mesh in placement.meshes.values():
        for rank, (there, env, device) in enumerate(zip(mesh.hosts, mesh.env, mesh.devices, strict=True)):
            where = "cpu" if device is None else f"cuda:{device}"
            rows.append([there, mesh.name, str(rank), where, env["OMP_NUM_THREADS"], mesh.positions[rank]])
    rows = rows if several else [row[1:] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return lines
