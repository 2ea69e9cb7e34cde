"""A run as a managed job of SkyPilot, which starts it again elsewhere when its machines are taken away.

The text is JSON, which is YAML.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from titan_rl.launch.hosts.torchrun import NODES
from titan_rl.launch.jobs.job import PORT, TRUSTED, JobConfig, Start, dns_name

_RUN = f"""# {TRUSTED}
export RANK="$SKYPILOT_NODE_RANK" WORLD_SIZE="$SKYPILOT_NUM_NODES" LOCAL_WORLD_SIZE=1
export {NODES}="$(echo $SKYPILOT_NODE_IPS)" MASTER_PORT={PORT}
export MASTER_ADDR="$(echo "$SKYPILOT_NODE_IPS" | head -n1)"
exec """


@dataclass(kw_only=True, slots=True)
class SkyPilotConfig(JobConfig):
    """Machines that SkyPilot finds. The working directory is copied to each of them."""

    bucket: str = ""
    """URL of a bucket, which outlives the machines; it is mounted at `logging.directory`, such as `s3://my-runs`."""
    accelerators: str = ""
    """GPUs of each machine, such as `H100:8`."""
    image: str = ""
    """With titan_rl and what the run imports, such as `docker:me/titan-rl`; empty: write a `setup` into the file."""

    program: ClassVar = ("sky", "jobs", "launch", "--yes", "--detach-run")
    required: ClassVar = ("bucket",)

    def file(self, start: Start) -> Path:
        return Path.cwd() / f"{start.name}.yaml"

    def text(self, start: Start) -> str:
        resources: dict[str, Any] = {
            "accelerators": self.accelerators,
            "cpus": f"{self.cpus_per_node}+" if self.cpus_per_node else "",
            "image_id": self.image,
        }
        task = {
            "name": dns_name(start.name),
            "num_nodes": self.nodes,
            "workdir": ".",
            "resources": {key: value for key, value in resources.items() if value},
            "file_mounts": {str(start.directory.parent): {"source": self.bucket, "mode": "MOUNT"}},
            "run": _RUN + shlex.join(start.command("python")),
        }
        return json.dumps(task, indent=2) + "\n"
