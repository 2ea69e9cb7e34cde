"""Which process of which mesh runs on which device: a pure function of the run config and the host's resources.

Always true of a `Placement`:

- Mesh names are unique: `trainer`, `generator0`, `generator1`, …, `router`, `rollout0`, …, and `gateway` where the task
  defines `play`; where a checkpoint is served, generators, `router` and `gateway`. The last generators are spares.
- On CUDA every rank of the trainer and of the generators sees exactly one device, and no two ranks see the same one.
  No other process sees a device, and on CPU none does: a stray `.cuda()` fails instead of taking memory from a rank.
- The environment of a rank is complete before its Python starts. Variables that torchrun left in the controller's
  environment never reach a rank, because they describe another process group.

Imports neither Monarch nor torch, so that a dry run on any machine can show the plan of a run on another one.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from titan_rl.config import RunConfig
from titan_rl.environments import SHORT_NAMES
from titan_rl.environments.base import Environment
from titan_rl.errors import ConfigError
from titan_rl.generation.config import generator_environment
from titan_rl.importing import import_name

Device = Literal["cpu", "cuda"]

_KEEPS_EXIT_STATUS = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) >= (6, 15)
"""Whether the kernel still has the exit status of a process that Monarch has reaped."""

SUPERVISION_ENVIRONMENT = {
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "10s" if _KEEPS_EXIT_STATUS else "1s",
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "1d",
    "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": "1d",
    "HYPERACTOR_MESH_SUPERVISION_WATCHDOG_TIMEOUT": "3d",
    "HYPERACTOR_MESH_ORPHAN_TIMEOUT": "1d",
    "HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT": "1d",
}
"""Set in every process, the controller too, before Monarch is imported.

- Monarch looks for failed actors every 10 s; each look leaves some bytes in the controller for good. It looks every
  second where only Monarch knows how a process ended.
- It never takes a silent process for dead. By default it does so after 30 s, which kills runs whose processes are
  stopped by SIGSTOP or a debugger, or whose laptop sleeps. The kernel reports the death of a process instead
  (`launch.child`), and every call has its own time limit. The watchdog must be longer than both idle times
  together.
- No process dies because another one died. By default a process exits (code 1, without a message) if it cannot return
  an answer within 30 s to a sender that is dead, even if nobody waits for that answer."""

_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Set for ranks that compute: they listen for each other on the loopback interface only."""

TORCHRUN_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_NAME",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_SIGNALS_TO_HANDLE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)
"""Variables that torchrun sets in the process that it starts. They are removed before a mesh is spawned. For example,
with TORCHELASTIC_USE_AGENT_STORE rank 0 of a mesh would wait for torchrun's store instead of opening its own."""

_DETERMINISTIC_TRAINER = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Set for trainer ranks on CUDA in deterministic mode: torch refuses matrix products without it."""

_NVIDIA_SMI_SECONDS = 30.0
"""A driver that is still initialising answers within seconds. One that hangs must not block the command line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What this host offers to a run."""

    cpus: int
    """CPUs that this process may use."""
    cuda_devices: tuple[int, ...] = ()
    """Device indices as `CUDA_VISIBLE_DEVICES` takes them; empty if that variable hides all of them."""
    memory: int = 0
    """Bytes available without swapping; 0: unknown."""
    shared_memory: int = 0
    """Bytes free in /dev/shm; 0: unknown."""
    open_files: int = 0
    """Hard limit of a process; 0: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """One mesh: `ranks` processes on this host."""

    name: str
    env: tuple[dict[str, str], ...]
    """Per rank, what to set before Python starts. The rendezvous (RANK, WORLD_SIZE, …) is not in it: its file
    is named when the mesh is spawned."""
    devices: tuple[int | None, ...]
    """Per rank, the CUDA device; None: CPU."""
    positions: tuple[str, ...]
    """Per rank, its place in the parallelism, for people."""

    @property
    def ranks(self) -> int:
        return len(self.env)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """All meshes of a run."""

    device: Device
    """Device of trainer and generators."""
    meshes: tuple[MeshPlan, ...]
    sample_transport: Literal["shared_memory", "rdma"] = "shared_memory"
    """How trainer ranks fetch samples from rollout workers."""

    def mesh(self, name: str) -> MeshPlan:
        return next(mesh for mesh in self.meshes if mesh.name == name)

    @property
    def processes(self) -> int:
        return sum(mesh.ranks for mesh in self.meshes)


def resolve_device(config: RunConfig, host: HostFacts) -> Device:
    """`placement.device` with `auto` decided."""
    if config.placement.device == "auto":
        return "cuda" if host.cuda_devices else "cpu"
    return config.placement.device


def devices_needed(config: RunConfig, *, serving: bool = False) -> int:
    """CUDA devices that the run takes on CUDA: one per rank of the trainer (if any) and of every generator."""
    generators = (config.generator.count + config.placement.spares) * config.generator.tensor_parallel
    return generators if serving else config.trainer.ranks + generators


def plays(config: RunConfig) -> bool:
    """Whether the task's rollouts are played by programs, which need a gateway. Imports the task's class.

    Raises:
        ConfigError: it cannot be imported.
    """
    task = import_name(config.environment.name, SHORT_NAMES)
    return getattr(task, "play", Environment.play) is not Environment.play


def plan(config: RunConfig, host: HostFacts, *, serving: bool = False) -> Placement:
    """Place the run on one host.

    Args:
        serving: there is a gateway, and neither trainer nor rollout workers.

    Raises:
        ConfigError: CUDA is wanted and the host has fewer devices than ranks that need one, or the task cannot be
            imported.
    """
    device = resolve_device(config, host)
    free: list[int | None] = []
    if device == "cuda":
        needed = devices_needed(config, serving=serving)
        if needed > len(host.cuda_devices):
            trainer_share = "" if serving else f"trainer {config.trainer.ranks}, "
            fleet = config.generator.count + config.placement.spares
            raise ConfigError(
                f"the run needs {needed} CUDA devices ({trainer_share}generators "
                f"{fleet} x {config.generator.tensor_parallel}) and this host has "
                f'{len(host.cuda_devices) or "none"}; placement.device = "cpu" needs none'
            )
        free.extend(host.cuda_devices)

    threads = str(config.placement.threads)
    common = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **SUPERVISION_ENVIRONMENT}

    def mesh(name: str, positions: list[str], extra: Mapping[str, str], *, computes: bool) -> MeshPlan:
        devices = tuple(free.pop(0) if computes and free else None for _ in positions)
        env = tuple(
            {
                **common,
                **(_LOOPBACK if computes else {}),
                **extra,
                "CUDA_VISIBLE_DEVICES": "" if index is None else str(index),
            }
            for index in devices
        )
        return MeshPlan(name=name, env=env, devices=devices, positions=tuple(positions))

    trainer, generator = config.trainer, config.generator
    deterministic = config.generator_settings().deterministic
    engine = generator_environment(device, threads=config.placement.threads, deterministic=deterministic)
    if device == "cpu":
        # otherwise vLLM pins its threads to cores of its own choice, the same ones in every process
        engine["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    meshes: list[MeshPlan] = []
    if not serving:
        positions = [
            f"fsdp {shard}/{trainer.data_parallel}, tp {rank}/{trainer.tensor_parallel}"
            for shard in range(trainer.data_parallel)
            for rank in range(trainer.tensor_parallel)
        ]
        extra = _DETERMINISTIC_TRAINER if config.trainer_settings().deterministic and device == "cuda" else {}
        meshes.append(mesh("trainer", positions, extra, computes=True))
    for number in range(generator.count + config.placement.spares):
        spare = "spare, " if number >= generator.count else ""
        positions = [f"{spare}tp {rank}/{generator.tensor_parallel}" for rank in range(generator.tensor_parallel)]
        meshes.append(mesh(f"generator{number}", positions, engine, computes=True))
    meshes.append(mesh("router", ["-"], {}, computes=False))
    if serving or plays(config):
        meshes.append(mesh("gateway", ["-"], {}, computes=False))
    if not serving:
        for number in range(config.rollout.workers):
            # its tokenizer is used on both sides of a fork
            extra = {"TOKENIZERS_PARALLELISM": "false"}
            meshes.append(mesh(f"rollout{number}", ["-"], extra, computes=False))
    return Placement(
        device=device,
        sample_transport=config.data_plane.transport,
        meshes=tuple(meshes),
    )


def describe(placement: Placement, host: HostFacts) -> list[str]:
    """The placement as lines of text: a table of all processes, then the variables they start with."""
    memory = f", {host.memory / 2**30:.1f} GiB of memory available" if host.memory else ""
    lines = [
        f"placement: {placement.processes} processes on {placement.device} "
        f"(host: {host.cpus} CPUs{memory}, {len(host.cuda_devices) or 'no'} CUDA devices)",
        "",
    ]
    rows = [("mesh", "rank", "device", "threads", "position")]
    for mesh in placement.meshes:
        for rank, (env, device, position) in enumerate(zip(mesh.env, mesh.devices, mesh.positions, strict=True)):
            where = "cpu" if device is None else f"cuda:{device}"
            rows.append((mesh.name, str(rank), where, env["OMP_NUM_THREADS"], position))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += ["", "environment"]
    for names, variables in _shared_environment(placement).items():
        lines.append(f"  {names}:")
        lines += [f"    {name}={value}" for name, value in sorted(variables.items())]
    return lines


def _shared_environment(placement: Placement) -> dict[str, dict[str, str]]:
    """Variables by the meshes that have them: all processes first, then meshes with equal extras. Without the device,
    which is in the table."""
    extras = {mesh.name: dict(mesh.env[0]) for mesh in placement.meshes}
    for variables in extras.values():
        del variables["CUDA_VISIBLE_DEVICES"]
    common = dict(set.intersection(*(set(variables.items()) for variables in extras.values())))
    shared: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, variables in extras.items():
        own = tuple(sorted(variables.items() - common.items()))
        if own:
            shared.setdefault(own, []).append(name)
    return {"every process": common, **{", ".join(names): dict(own) for own, names in shared.items()}}


def detect_host(environ: Mapping[str, str] = os.environ) -> HostFacts:
    """Detect this host's resources without torch: from `/proc`, the scheduler, and `nvidia-smi` if it is installed."""
    shared = os.statvfs("/dev/shm")
    memory = re.search(r"^MemAvailable:\s+(\d+) kB$", _read(Path("/proc/meminfo")), re.MULTILINE)
    return HostFacts(
        cpus=len(os.sched_getaffinity(0)),
        cuda_devices=visible_devices(_nvidia_smi(), environ.get("CUDA_VISIBLE_DEVICES")),
        memory=int(memory[1]) * 1024 if memory else 0,
        shared_memory=shared.f_bavail * shared.f_frsize,
        open_files=max(0, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),  # -1: no limit
    )


def visible_devices(listing: str, visible: str | None) -> tuple[int, ...]:
    """Indices of the devices that a process may use, in its order.

    Args:
        listing: output of `nvidia-smi -L`, lines such as `GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-4f…)`.
        visible: `CUDA_VISIBLE_DEVICES`, of indices or (beginnings of) UUIDs; None: not set. As in CUDA itself, the
            first entry that names no device ends the list.
    """
    uuids = {int(index): uuid for index, uuid in re.findall(r"^GPU (\d+): .*\(UUID: (\S+)\)", listing, re.MULTILINE)}
    if visible is None:
        return tuple(uuids)
    devices: list[int] = []
    for entry in filter(None, (entry.strip() for entry in visible.split(","))):
        named = [index for index, uuid in uuids.items() if entry == str(index) or uuid.startswith(entry)]
        if len(named) != 1 or named[0] in devices:
            break
        devices.append(named[0])
    return tuple(devices)


def _nvidia_smi() -> str:
    """Output of `nvidia-smi -L`; empty if there is no driver or it does not answer, so that no device can be used."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        result = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout if result.returncode == 0 else ""


def _read(file: Path) -> str:
    return file.read_text() if file.exists() else ""
