"""A run as a Slurm job.

- When Slurm takes the job back (preemption, `scontrol requeue`), every process gets SIGTERM: the run saves, and Slurm
  queues the job again. When the time is nearly over every process gets SIGHUP: the run saves, exits with 129, and the
  script queues the job again. A job that fails, is done or is cancelled stays where it is.
- Ranks meet on a port that was free on the first node, so several jobs may share a node.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from titan_rl.launch.hosts.torchrun import NODES
from titan_rl.launch.jobs.job import TRUSTED, JobConfig, Start

_SCRIPT = """#!/bin/bash
{options}

# {trusted}
directory={directory}
python={python}
train={train}

trap : TERM HUP  # Slurm tells every process: this one waits for the run

run() {{  # run FIRST_NODE NODES COMMAND: one task per node
  srun --relative="$1" --nodes="$2" --ntasks="$2" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 \\
    ${{SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}} "${{@:3}}"
}}

run 0 "$SLURM_JOB_NUM_NODES" bash -c 'test -d "$0" || {{ echo "$SLURMD_NODENAME does not see $0: choose a'\\
' --logging.directory on a file system that all nodes share" >&2; exit 2; }}' "$directory" || exit 2

export WORLD_SIZE="$SLURM_JOB_NUM_NODES" LOCAL_WORLD_SIZE=1 PYTHONUNBUFFERED=1
export {nodes}="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | tr '\\n' ' ')"
export MASTER_PORT="$("$python" -c 'import socket; print(socket.create_server(("", 0)).getsockname()[1])')"
rank='export RANK=$((SLURM_PROCID + $0)) MASTER_ADDR="$SLURM_LAUNCH_NODE_IPADDR"; exec "$@"'

if [ "$WORLD_SIZE" -gt 1 ]; then
  run 1 $((WORLD_SIZE - 1)) bash -c "$rank" 1 "${{train[@]}}" &
fi
run 0 1 bash -c "$rank" 0 "${{train[@]}}"
code=$?
if [ "$code" = 129 ] && [ "$SECONDS" -lt {save} ]; then
  echo "the time limit leaves the run less than its --save-seconds {save}: ask for more --time" >&2
elif [ "$code" = 129 ]; then  # the time is nearly over, and the run is saved
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


@dataclass(kw_only=True, slots=True)
class SlurmConfig(JobConfig):
    """Nodes of a Slurm cluster. The directory of the job is below `logging.directory`, which all of them must see."""

    gpus_per_node: int = 0
    partition: str = ""
    """Empty: the cluster's default one."""
    time: str = ""
    """Limit on each start, as `sbatch --time` takes it; the job then goes on in another one. Empty: the partition's."""
    sbatch: tuple[str, ...] = ()
    """Other options of sbatch, without the dashes: `--sbatch account=me qos=high`."""

    program: ClassVar = ("sbatch",)

    def file(self, start: Start) -> Path:
        return start.directory / "job.sh"

    def text(self, start: Start) -> str:
        log = start.directory / "job.log"
        options = [
            f"job-name={start.name}",
            f"nodes={self.nodes}",
            "ntasks-per-node=1",
            *([f"cpus-per-task={self.cpus_per_node}"] if self.cpus_per_node else ["exclusive", "mem=0"]),
            *([f"gpus-per-node={self.gpus_per_node}"] if self.gpus_per_node else []),
            *([f"partition={self.partition}"] if self.partition else []),
            *([f"time={self.time}"] if self.time else []),
            f"chdir={shlex.quote(str(Path.cwd()))}",
            f"output={shlex.quote(str(log))}",
            "open-mode=append",
            "requeue",
            f"signal=HUP@{self.save_seconds}",
            *self.sbatch,
        ]
        return _SCRIPT.format(
            options="\n".join(f"#SBATCH --{option}" for option in options),
            trusted=TRUSTED,
            directory=shlex.quote(str(start.directory)),
            python=shlex.quote(sys.executable),
            train=f"({shlex.join(start.command(sys.executable))})",
            nodes=NODES,
            save=self.save_seconds,
        )
