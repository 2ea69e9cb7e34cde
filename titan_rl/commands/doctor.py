"""`titan-rl doctor`: what this host offers, what is wrong with it, and what to do about each.

Changes nothing. Whether one run would start here is what `titan-rl train --dry-run` says.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from titan_rl import __version__
from titan_rl.config import LoggingConfig
from titan_rl.errors import ConfigError
from titan_rl.gateway.config import GatewayConfig, listen
from titan_rl.launch.checks import OPEN_FILES
from titan_rl.launch.hosts.facts import HostFacts, detect_host
from titan_rl.launch.machine import CORE, Problem, Severity, existing, installed, package_problems, pins
from titan_rl.launch.process import PREFIX, dead_scratch
from titan_rl.one_line import counted
from titan_rl.overrides import Command, Verb
from titan_rl.weights.segment_files import DIRECTORY, dead_segments

EXIT_FAILED = 1
LITTLE_MEMORY = 4 << 30
"""Bytes that the quick start's policy takes to train."""
_GIB = 1 << 30
_CHILD = b"titan_rl.launch.child"
_STYLES = {Severity.ERROR: "red", Severity.ABSENT: "red", Severity.WARNING: "yellow"}


class Finding(NamedTuple):
    """One line: something that was looked at."""

    about: str
    found: str
    problem: Problem | None = None
    """What is wrong with it, and what to do; None: nothing is."""


def examine(host: HostFacts) -> Iterator[Finding]:
    yield Finding("titan_rl", f"{__version__} on Python {platform.python_version()}, {platform.platform()}")
    yield from _packages()
    yield from _processor(host)
    yield from _memory(host)
    yield from _devices(host)
    yield from _ports()
    yield from _disks()
    yield from _remains(Path(tempfile.gettempdir()))


def _packages() -> Iterator[Finding]:
    yield Finding("packages", ", ".join(f"{name} {installed(name) or '–'}" for name in CORE))
    if not pins():
        sentence = (
            "titan_rl itself is not installed, so that no versions can be compared: pip install -e . in its clone"
        )
        yield _warning("packages", sentence)
    for name in dict.fromkeys((*CORE, *pins())):
        yield from (Finding("packages", "", problem) for problem in package_problems(name))


def _processor(host: HostFacts) -> Iterator[Finding]:
    threads = os.environ.get("OMP_NUM_THREADS", "")
    busy = os.getloadavg()[0]
    said = f"OMP_NUM_THREADS={threads}" if threads else "OMP_NUM_THREADS is not set; a run sets placement.threads"
    yield Finding("processor", f"{host.cpus} cores, {said}")
    if threads.isdecimal() and int(threads) > host.cpus:
        yield _warning(
            "processor", f"OMP_NUM_THREADS={threads} is more than {host.cpus} cores: threads that spin slow down all"
        )
    if busy > host.cpus:
        yield _warning("processor", f"{busy:.0f} threads want {host.cpus} cores: runs will be slow until they end")
    flags = re.search(r"^flags.*", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    if flags is not None and "avx2" not in flags[0].split() and not host.cuda_devices:
        yield _absent("processor", "vLLM's CPU build needs AVX2, and this processor has none: use another host")


def _memory(host: HostFacts) -> Iterator[Finding]:
    yield Finding("memory", f"{host.memory / _GIB:.1f} GiB available")
    if 0 < host.memory < LITTLE_MEMORY:
        yield _warning(
            "memory", f"{host.memory / _GIB:.1f} GiB are available, and copy4 takes 4 to train: end other programs"
        )
    yield Finding("shared memory", f"{host.shared_memory / _GIB:.1f} GiB free in {DIRECTORY}")
    limit = f"{host.open_files:,} open files" if host.open_files else "no limit of open files"
    yield Finding("descriptors", f"{limit} per process (hard limit; a small run needs {OPEN_FILES})")


def _devices(host: HostFacts) -> Iterator[Finding]:
    count = len(host.cuda_devices)
    yield Finding("devices", counted(count, "CUDA device") if count else "no CUDA device; runs compute on the CPU")
    if not count and any(Path("/dev").glob("nvidia[0-9]*")):
        yield _warning(
            "devices",
            "there are NVIDIA devices that cannot be used: nvidia-smi does not answer, or CUDA_VISIBLE_DEVICES "
            f"({os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}) hides them; look what `nvidia-smi -L` says",
        )
    if count and "+cpu" in installed("torch"):
        sentence = "torch is built for CPUs only, so that the devices stay idle: pip install 'titan-rl[cuda]'"
        yield _warning("devices", sentence)


def _ports() -> Iterator[Finding]:
    try:
        listen("127.0.0.1", 0).close()
    except ConfigError as error:
        yield _absent("ports", f"{error}: nothing can listen on loopback; a gateway needs it")
        return
    port = GatewayConfig().port
    try:
        listen("127.0.0.1", port).close()
        yield Finding("ports", f"loopback can be listened on; {port}, that of `titan-rl serve`, is free")
    except ConfigError:
        yield _warning("ports", f"port {port}, that of `titan-rl serve`, is taken: give it another one, --port")


def _disks() -> Iterator[Finding]:
    for name, directory in (("runs", LoggingConfig().directory), ("temporary files", tempfile.gettempdir())):
        free = shutil.disk_usage(existing(directory)).free
        yield Finding("disk", f"{free / _GIB:.1f} GiB free for {name}, in {directory}")


def _remains(temporary: Path) -> Iterator[Finding]:
    """What dead runs have left. The next start removes files; processes end with their controller, or are named."""
    segments, scratch = dead_segments(), list(dead_scratch(temporary))
    size = sum(path.stat().st_size for path in segments)
    found = [f"{len(segments)} segments with {size:,} bytes in {DIRECTORY}"] * bool(segments)
    found += [f"{len(scratch)} directories in {temporary}"] * bool(scratch)
    yield Finding(
        "remains", f"{' and '.join(found) or 'none'} of dead runs" + "; the next start removes them" * bool(found)
    )
    if foreign := [path for path in segments if path.stat().st_uid != os.getuid()]:
        size = sum(path.stat().st_size for path in foreign)
        yield _warning("remains", f"{size:,} bytes of them are other users', who must remove them: {foreign[0]}, …")
    if orphans := _orphans():
        pids = " ".join(map(str, orphans))
        yield _warning("remains", f"{len(orphans)} processes have outlived their run: kill -9 {pids}")
    for lock in temporary.glob(f"{PREFIX}*/agent.lock"):
        pid, _, run = _read(lock).partition(" ")
        if pid.isdecimal() and Path(f"/proc/{pid}").exists():
            yield Finding("remains", f"this host is lent to the run {run or 'of another host'} (agent {pid})")


def _orphans() -> list[int]:
    """Processes of meshes that live where this one does and whose parent is gone, so that they have another one."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            here = os.readlink(entry / "ns/pid") == os.readlink("/proc/self/ns/pid")
        except (OSError, ValueError):
            continue
        if _CHILD in words and here and parent == 1 and os.getpid() != 1:
            found.append(int(entry.name))
    return sorted(found)


def _warning(about: str, sentence: str) -> Finding:
    return Finding(about, "", Problem(sentence=sentence, severity=Severity.WARNING))


def _absent(about: str, sentence: str) -> Finding:
    return Finding(about, "", Problem(sentence=sentence, severity=Severity.ABSENT))


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _act(command: Command, prog: str) -> int:
    findings = list(examine(detect_host()))
    console = Console(highlight=False, markup=False, emoji=False)
    width = max(len(finding.about) for finding in findings) + 2
    for about, found, problem in findings:
        mark = Text("ok       ", "green")
        if problem is not None:
            stops = problem.severity is not Severity.WARNING
            mark = Text("stops    " if stops else "warning  ", _STYLES[problem.severity])
        console.print(mark + Text(about.ljust(width)) + Text(problem.sentence if problem else found), soft_wrap=True)
    problems = [finding.problem for finding in findings if finding.problem is not None]
    stopping = sum(problem.severity is not Severity.WARNING for problem in problems)
    console.print(f"{counted(stopping, 'problem')} would stop a run, {counted(len(problems) - stopping, 'warning')}")
    return EXIT_FAILED if stopping else 0


VERB = Verb(
    act=_act,
    about="""
usage: {prog}

Look at this host: versions, cores, memory, shared memory, descriptors, devices, ports, disks, what dead runs have left.
Says what to do about each problem, and changes nothing. `titan-rl train --dry-run` says whether a run would start here.

exit codes: 0 nothing would stop every run; 1 something would""",
    options={},
    takes_settings=False,
)
