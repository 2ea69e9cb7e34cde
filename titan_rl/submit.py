"""`titan-rl launch KIND --nodes N … -- ARGUMENTS`: submits `titan-rl train ARGUMENTS` as a job of a scheduler: a batch
script of Slurm or a manifest of Kubernetes.

Every node runs `python -m titan_rl.train …` with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment
(`hosts.worker`): rank 0 is the controller, every other rank a worker. A job that is started again goes on, because each
start has `--resume auto`, in a directory that belongs to this job alone.

`run/README.md` says what becomes of a job that is taken back, fails or runs out of time, and why Monarch's job classes
are not used.
"""

import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from string import Template
from typing import ClassVar

from titan_rl import train
from titan_rl.bounds import Count, CountOrZero
from titan_rl.errors import ConfigError
from titan_rl.overrides import EXIT_USAGE, Command, Verb, apply, print_error
from titan_rl.run.memory import shape_of, shared_memory

LEAST_SHARED_MEMORY = 16
"""GiB of a pod's /dev/shm."""

TEMPLATES = Path(__file__).with_name("jobs")

TRUSTED = "Trusted networks only: whoever reaches a port of the run can run any code on its nodes."


def train_in(directory: Path, words: Sequence[str]) -> list[str]:
    """What every node runs, after the name of its Python. The run is below this directory."""
    own = ("--logging.directory", str(directory), "--resume", "auto", "--trusted-network")
    return ["-m", "titan_rl.train", *words, *own]


@dataclass(kw_only=True, slots=True)
class JobConfig:
    """What both schedulers are asked for. `text` is given the job's directory, which all nodes share, what each runs
    (`train_in`), and the bytes of /dev/shm that the run takes on a host."""

    nodes: Count = 1
    """Hosts of the run; the first is the controller's, `host0`."""
    cpus_per_node: CountOrZero = 0
    """0: on Slurm the whole node, on Kubernetes as many as it gives."""
    gpus_per_node: CountOrZero = 0
    """On Kubernetes NVIDIA's (`nvidia.com/gpu`)."""
    name: str = ""
    """Of the job, before the time; empty: that of the recipe."""
    save_seconds: Count = 120
    """What the run gets to finish a step and to save, when its node or its time is taken from it."""

    required: ClassVar[tuple[str, ...]] = ()
    """Settings without a default."""


@dataclass(kw_only=True, slots=True)
class SlurmConfig(JobConfig):
    """Nodes of a Slurm cluster. The directory of the job is below `logging.directory`, which all of them must see."""

    partition: str = ""
    """Empty: the cluster's default one."""
    time: str = ""
    """Limit on each start, as `sbatch --time` takes it; the job then goes on in another one. Empty: the partition's."""
    sbatch: tuple[str, ...] = ()
    """Other options of sbatch, without the dashes: `--sbatch account=me qos=high`."""

    program: ClassVar = ("sbatch",)

    def file(self, directory: Path) -> Path:
        return directory / "job.sh"

    def text(self, directory: Path, command: Sequence[str], taken: float) -> str:
        options = [
            f"job-name={directory.name}",
            f"nodes={self.nodes}",
            "ntasks-per-node=1",
            *([f"cpus-per-task={self.cpus_per_node}"] if self.cpus_per_node else ["exclusive", "mem=0"]),
            *([f"gpus-per-node={self.gpus_per_node}"] if self.gpus_per_node else []),
            *([f"partition={self.partition}"] if self.partition else []),
            *([f"time={self.time}"] if self.time else []),
            f"chdir={shlex.quote(str(Path.cwd()))}",
            f"output={shlex.quote(str(directory / 'job.log'))}",
            "open-mode=append",
            "requeue",
            f"signal=HUP@{self.save_seconds}",
            *self.sbatch,
        ]
        head = [
            "#!/bin/bash",
            *(f"#SBATCH --{option}" for option in options),
            f"# {TRUSTED}",
            f"directory={shlex.quote(str(directory))}",
            f"python={shlex.quote(sys.executable)}",
            f"train=({shlex.join([sys.executable, *command])})",
            f"save_seconds={self.save_seconds}",
        ]
        return "\n".join([*head, (TEMPLATES / "slurm.sh").read_text(encoding="utf-8")])


_PORT = 29400
"""Where rank 0 has the store of the ranks."""
_START = """for second in $(seq 600); do getent hosts "$MASTER_ADDR" > /dev/null && break; sleep 1; done; exec "$@" """
"""A pod has no name in the cluster until it has an address."""
_RETRIES = 5
"""Failures of a node, without those by eviction, after which the job has failed."""


@dataclass(kw_only=True, slots=True)
class KubernetesConfig(JobConfig):
    """Pods of a Kubernetes cluster."""

    image: str = ""
    """With titan_rl and what the run imports, bash, and `python` on the path."""
    claim: str = ""
    """PersistentVolumeClaim that all pods may write (ReadWriteMany). It is mounted at `logging.directory`."""
    namespace: str = "default"
    memory: str = ""
    """Of each pod, such as `64Gi`; empty: no limit."""
    shared_memory: str = ""
    """Size of /dev/shm, which counts as memory; empty: what the policy's publications and copies take, and a quarter
    more. Kubernetes' own 64 MiB are too few."""
    rdma: str = ""
    """Resource of the cluster's RDMA plug-in, such as `rdma/hca_shared_devices_a`: each pod gets one, and may lock
    memory. Empty: ranks of several hosts speak TCP."""

    program: ClassVar = ("kubectl", "apply", "--filename")
    required: ClassVar = ("image", "claim")

    def file(self, directory: Path) -> Path:
        return Path.cwd() / f"{directory.name}.yaml"

    def text(self, directory: Path, command: Sequence[str], taken: float) -> str:
        name = dns_name(directory.name)
        labels = {"app.kubernetes.io/name": "titan-rl", "app.kubernetes.io/instance": name}
        limits = {"nvidia.com/gpu": self.gpus_per_node, "cpu": self.cpus_per_node, "memory": self.memory}
        limits |= {self.rdma: 1} if self.rdma else {}
        room = max(LEAST_SHARED_MEMORY, math.ceil(taken * 1.25 / 2**30))
        values = {
            "metadata": {"name": name, "namespace": self.namespace, "labels": labels},
            "labels": labels,
            "port": _PORT,
            "nodes": self.nodes,
            "node_names": " ".join(f"{name}-{index}" for index in range(self.nodes)),
            "failures": _RETRIES * self.nodes,
            "save_seconds": self.save_seconds,
            "image": self.image,
            "command": ["bash", "-c", _START, "start", "python", *command],
            "limits": {key: str(value) for key, value in limits.items() if value},
            "runs": str(directory.parent),
            "claim": self.claim,
            "security": {"capabilities": {"add": ["IPC_LOCK"]}} if self.rdma else {},
            "shared_memory": self.shared_memory or f"{room}Gi",
        }
        manifest = Template((TEMPLATES / "kubernetes.yaml").read_text(encoding="utf-8"))
        in_yaml = {key: json.dumps(value, ensure_ascii=False) for key, value in values.items()}
        return manifest.substitute(in_yaml, name=name, trusted=TRUSTED)


def dns_name(name: str) -> str:
    """A name as Kubernetes takes it, with room for the number of a node behind it (RFC 1123)."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[-50:].lstrip("-0123456789") or "run"


KINDS: dict[str, tuple[type[SlurmConfig | KubernetesConfig], str]] = {
    "slurm": (SlurmConfig, "a batch job; goes on after preemption, requeue and the end of its time"),
    "kubernetes": (KubernetesConfig, "an indexed Job with its Service and NetworkPolicy; not tested on a cluster yet"),
}
_TRUSTED, _DRY_RUN = train.TRUSTED, "--dry-run"
_OF_THE_JOB = {"--resume", _DRY_RUN, "--help", "placement.hosts", "placement.trusted_network"}


def main(arguments: Sequence[str], *, prog: str) -> int:
    kind, *words = arguments or ("--help",)
    if kind in ("-h", "--help"):
        print(f"usage: {prog} KIND --nodes N --trusted-network [OPTIONS] -- ARGUMENTS\n")
        print("Submit `titan-rl train ARGUMENTS` as a job that goes on by itself when it is started again.\n")
        print("\n".join(f"  {name:<12}{text}" for name, (_, text) in KINDS.items()))
        print(f"\n`{prog} KIND --help` lists the options. {TRUSTED}")
        return 0 if arguments else EXIT_USAGE
    if kind not in KINDS:
        print_error(prog, f"there is no kind {kind!r}; there are {', '.join(KINDS)}")
        return EXIT_USAGE
    config, about = KINDS[kind]
    cut = words.index("--") if "--" in words else len(words)
    verb = Verb(
        act=lambda command, prog: _submit(command, words[cut + 1 :], config),
        config=lambda command: config(),
        about=f"usage: {{prog}} --nodes N {_TRUSTED} [OPTIONS] -- ARGUMENTS\n\n{kind}: {about}.\n{TRUSTED}",
        options={_TRUSTED: "needed for more than one node", _DRY_RUN: "print the script or manifest, and do nothing"},
    )
    return verb.run(words[:cut], prog=f"{prog} {kind}")


def _submit(command: Command, words: Sequence[str], kind: type[SlurmConfig | KubernetesConfig]) -> int:
    job = apply(kind(), command.layers)
    if missing := [f"--{name} {name.upper()}" for name in job.required if not getattr(job, name)]:
        raise ConfigError(f"name {' and '.join(missing)}")
    if job.nodes > 1 and _TRUSTED not in command.flags:
        raise ConfigError(
            f"--nodes {job.nodes}: whoever reaches a port of the run can run any code on its nodes: add {_TRUSTED} if "
            "that is only people whom you trust"
        )
    asked = train.VERB.read(words)
    if taken := sorted(_OF_THE_JOB & {*asked.flags, *asked.values, *asked.given}):
        raise ConfigError(f"after --, leave out {', '.join(taken)}: the job decides that by itself")
    config = train.resolve(asked)
    name = f"{job.name or config.logging.name or config.recipe.rpartition(':')[2]}-{datetime.now():%Y%m%d-%H%M%S}"
    shape = shape_of(config)
    directory = Path(config.logging.directory) / name
    taken_there = sum(shared_memory(config, shape).values()) if shape is not None else 0
    text = job.text(directory, train_in(directory, words), taken_there)
    if _DRY_RUN in command.flags:
        print(text, end="")
        return 0
    program, *rest = job.program
    if shutil.which(program) is None:
        raise ConfigError(f"there is no {program} on this machine; {_DRY_RUN} prints what it would be given")
    file = job.file(directory)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from error
    done = subprocess.run([program, *rest, str(file)], capture_output=True, text=True)
    if done.returncode != 0:
        raise ConfigError(f"{program} refuses {file}: {done.stderr or done.stdout}")
    print(f"{done.stdout.strip()}\nsubmitted: {file}\nthe run will be below {directory}")
    return 0
