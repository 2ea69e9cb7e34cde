"""A job: one run over the nodes that a scheduler gives, started in the same way whatever the scheduler is.

Every node runs `python -m titan_rl.train …` with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment
(`launch.hosts.torchrun`): rank 0 is the controller, every other rank a worker. A job that is started again goes on,
because each start has `--resume auto`, in a directory that belongs to this job alone.

Monarch's job classes are not used (0.7); its workers and its attachment are. SlurmJob names one port before it has
nodes, so two jobs on a node collide. Its workers end at the SIGTERM by which Slurm takes a job back, before a trainer
that spans nodes has saved, and it never queues a job again. KubernetesJob's workers listen on every interface; it needs
an operator in the cluster and a controller outside the job, and writes no manifest.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from titan_rl.errors import ConfigError

TRUSTED = "Trusted networks only: whoever reaches a port of the run can run any code on its nodes."


@dataclass(frozen=True, slots=True)
class Start:
    """What a job starts."""

    name: str
    directory: Path
    """Of the job, on a file system that all nodes share; the run is below it."""
    arguments: tuple[str, ...]
    """Of `titan-rl train`."""

    def command(self, python: str) -> list[str]:
        """The command of every node."""
        own = ("--logging.directory", str(self.directory), "--resume", "auto", "--trusted-network")
        return [python, "-m", "titan_rl.train", *self.arguments, *own]


@dataclass(kw_only=True, slots=True)
class JobConfig:
    """What both schedulers are asked for."""

    nodes: int = 1
    """Hosts of the run; the first is the controller's, `host0`."""
    cpus_per_node: int = 0
    """0: on Slurm the whole node, on Kubernetes as many as it gives."""
    name: str = ""
    """Of the job, before the time; empty: that of the recipe."""
    save_seconds: int = 120
    """What the run gets to finish a step and to save, when its node or its time is taken from it."""

    required: ClassVar[tuple[str, ...]] = ()
    """Settings without a default."""

    def __post_init__(self) -> None:
        for option, least in (("nodes", 1), ("cpus_per_node", 0), ("save_seconds", 1)):
            if (value := getattr(self, option)) < least:
                raise ConfigError(f"--{option.replace('_', '-')} must be at least {least}, got {value}")
