"""A real Slurm on this machine, for tests: one slurmctld and several slurmd, all at 127.0.0.1. Needs root, and Debian's
packages slurm-wlm and munge.

    with Slurm(2) as slurm:
        slurm("sbatch", "job.sh")

Nothing of it is outside a directory in /tmp, which goes when the block ends, with every job.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

_CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
MpiDefault=none
KillWait=120
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
"""`cred_expire`: a job that is queued again waits for so many seconds."""

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")


class Slurm:
    """Nodes n1, n2, …; up inside the `with` block."""

    def __init__(self, nodes: int) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.environment = {**os.environ, "SLURM_CONF": str(self.directory / "slurm.conf")}
        self._names = [f"n{number}" for number in range(1, nodes + 1)]

    def __call__(self, *command: str, seconds: float = 120) -> str:
        """Run a command; returns its output."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=seconds)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}{done.stdout}"
        return done.stdout

    def __enter__(self) -> Slurm:
        directory, host = self.directory, socket.gethostname()
        ports = _free_ports(1 + len(self._names))
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2"
            for name, port in zip(self._names, ports[1:], strict=True)
        ]
        config = _CONFIG.format(host=host, port=ports[0], directory=directory, nodes="\n".join(lines))
        (directory / "slurm.conf").write_text(config)
        (directory / "munge.key").write_bytes(os.urandom(1024))
        (directory / "munge.key").chmod(0o400)
        (directory / "state").mkdir()
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        try:
            self("munged", "--force", *(f"--{option}={directory}/munge.{file}" for option, file in files.items()))
            self("slurmctld")
            for name in self._names:
                self("slurmd", "-N", name)
            self("srun", f"--nodes={len(self._names)}", "true")  # returns when all nodes are up
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def wait(self, job: str) -> None:
        """Return when the job is done, or cancelled."""
        self("srun", f"--dependency=afterany:{job}", "--nodes=1", "true", seconds=800)

    def close(self) -> None:
        all_nodes = ("srun", "--exclusive", f"--nodes={len(self._names)}", "true")  # once no job has a process left
        for command in (("scancel", "--signal=KILL", "--full", "--user=root"), ("scancel", "--user=root"), all_nodes):
            with suppress(AssertionError, subprocess.TimeoutExpired):
                self(*command)
        for file in self.directory.glob("*.pid"):
            with suppress(ProcessLookupError, ValueError):
                process = os.pidfd_open(int(file.read_text()))
                signal.pidfd_send_signal(process, signal.SIGKILL)
                os.close(process)
        shutil.rmtree(self.directory, ignore_errors=True)


def _free_ports(count: int) -> list[int]:
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


def skip_reason() -> str:
    """Why this machine has no Slurm; empty if it has."""
    if os.geteuid() != 0:
        return "a Slurm of one's own needs root"
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        return f"{', '.join(missing)} not installed: apt-get install slurm-wlm munge"
    return ""
