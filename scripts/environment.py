"""Makes `.venv` hold the exact versions of `requirements.lock` and this project, whatever state it is found in. With
`--all`, those of `requirements-all.lock` as well; an environment that has them keeps them without `--all`.

- The stamp exists while everything is installed; it goes before anything is changed. Its first line is the Python and
  the place of the clone, its second the locks and the project. A start that finds both as wanted does nothing.
- A stamp with another second line: uv installs the difference. Any other stamp, or none (a first start, an interrupted
  one): the environment is made anew. uv's cache has what earlier starts downloaded.
- One set-up at a time per clone. Children inherit the lock, so it is held as long as one of them still writes.

Runs under the Python that `setup.sh` found and uses the standard library only.
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import hashlib
import itertools
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "scripts" / "requirements.lock"
ALL_LOCK = ROOT / "scripts" / "requirements-all.lock"
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "titan_rl.stamp"

DISK_GB = {"CPU": (3.5, 4.5), "CUDA": (6.4, 7.4)}
"""What the finished environment takes, by torch's build, without and with `--all`. uv links its files, so that its
cache takes nothing more."""
CUDA_EXTRA_GB = 11.0
"""What the environment of `--cuda` takes."""
CAPTURED = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
COMPILED_AT_ONCE = 200
"""Files per process that compiles: enough that its start costs little, few enough to say how far it is."""

HELP = """\
Makes .venv in this clone and installs the exact versions of scripts/requirements.lock, then the project itself
(editable): what training, evaluating, serving and reports need. Linux x86-64 with AVX2; Python 3.11, 3.12 or 3.13;
4 GB of disk, or 7 GB where only the build of torch for CUDA is found, and 1 GB more with --all. Training the quick
start's policy takes about 4 GB of memory.

PYTHON=/path/to/python names the interpreter. Without it that of an existing .venv stays, or the newest is taken.
pip's configuration (pip config list) says where packages come from. It holds for uv, too, which pip installs first."""
ALL_HELP = """install scripts/requirements-all.lock as well: tests, linters, reasoning-gym, math-verify, wandb,
datasets, pyarrow, agent SDKs, and the rest of what vLLM, torchtitan and Monarch ask for"""
CUDA_HELP = """make an environment with the CUDA wheels (extras cuda and dev) in DIRECTORY instead, with or without a
GPU; .venv stays as it is"""
CUDA_CHOICE = """no CPU build of torch was found. The one for CUDA computes the same on a CPU, but it takes 2.4 GB to
download, and the finished environment {} GB of disk. The other way: stop this (Ctrl-C), name an index that has CPU
wheels of torch (pip config set global.extra-index-url ADDRESS), and start again."""


class SetupError(Exception):
    """What is wrong and what to do, for the person at the terminal."""


def wanted_locks(everything: bool) -> list[Path]:
    """An environment that has everything keeps it; one of before there were two locks has."""
    of_all = any(ALL_LOCK.name in line or " " not in line for line in found_stamp()[1:])
    return [LOCK, ALL_LOCK] if everything or of_all else [LOCK]


def wanted_stamp(locks: list[Path]) -> list[str]:
    sources = b"\0".join(path.read_bytes() for path in (*locks, ROOT / "pyproject.toml", Path(__file__)))
    names = " ".join(lock.name for lock in locks)
    return [f"{platform.python_version()} {sys.base_prefix} {ROOT}", f"{names} {hashlib.sha256(sources).hexdigest()}"]


def found_stamp() -> list[str]:
    return STAMP.read_text().splitlines() if STAMP.is_file() and PYTHON.exists() else []


def check_machine(system: str, machine: str, glibc: tuple[int, ...], cpu_flags: str) -> None:
    """Raises SetupError where the wheels cannot run. An empty glibc means another C library."""
    if (system, machine) != ("Linux", "x86_64"):
        raise SetupError(f"titan_rl is built and tested on Linux x86-64 only, and this is {system} {machine}.")
    if glibc < (2, 28):
        have = ".".join(map(str, glibc)) or "not glibc"
        raise SetupError(f"The C library must be glibc 2.28 or newer, as for torch's wheels (it is {have}).")
    if cpu_flags and "avx2" not in cpu_flags.split():
        raise SetupError("vLLM's CPU build needs a processor with AVX2, and this one has none.")


def check_this_machine() -> None:
    name, version = platform.libc_ver()
    glibc = tuple(int(part) for part in version.split(".")[:2]) if name == "glibc" else ()
    processors = Path("/proc/cpuinfo")
    flags = re.search(r"^flags.*", processors.read_text(), re.MULTILINE) if processors.is_file() else None
    check_machine(platform.system(), platform.machine(), glibc, flags[0] if flags else "")


def check_disk(place: Path, free: float, needed: float) -> None:
    if free < needed:
        raise SetupError(f"{place} has {free:.1f} GB free, and the installation needs {needed:.1f} GB.")


def uv_settings(pip_config: str) -> tuple[list[str], dict[str, str]]:
    """uv's arguments and environment variables that mean what `pip config list` printed."""
    lines = [match.groups() for match in re.finditer(r"^(.+)\.([a-z-]+)=(.*)$", pip_config, re.MULTILINE)]
    values: dict[str, str] = {}
    for section in ("global", "install", ":env:"):  # as for pip, the last one wins
        values |= {name: ast.literal_eval(value) for found, name, value in lines if found == section}
    # Like pip: the best version of all indexes. By itself uv asks the first index that knows the name only.
    arguments = ["--index-strategy", "unsafe-best-match"]
    options = {"index-url": "--default-index", "extra-index-url": "--index", "find-links": "--find-links"}
    for name, option in {**options, "trusted-host": "--allow-insecure-host"}.items():
        arguments += [each for value in values.get(name, "").split() for each in (option, value)]
    if values.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        arguments.append("--no-index")
    variables = {"cert": "SSL_CERT_FILE", "proxy": "ALL_PROXY"}
    return arguments, {variable: values[name] for name, variable in variables.items() if name in values}


class Installer:
    """Installs uv with pip, and everything else with uv. Raises SetupError where that fails."""

    def __init__(self, uv_version: str, lock_descriptor: int, python: Path = PYTHON) -> None:
        self.python = python
        self.descriptor = lock_descriptor
        self.environment = {"UV_SYSTEM_CERTS": "true", **os.environ}
        found, output = self.run("pip", "install", "--quiet", f"uv=={uv_version}", quiet=True)
        if not found:
            raise SetupError(f"pip could not install uv {uv_version}:\n{output}")
        self.sources, variables = uv_settings(self.run("pip", "config", "list", quiet=True)[1])
        self.environment = {**variables, **self.environment}

    def run(self, *arguments: str, quiet: bool = False) -> tuple[bool, str]:
        """Runs a module of the new environment: whether it ended well and, where `quiet`, what it printed."""
        settings = {"env": self.environment, "pass_fds": [self.descriptor], **(CAPTURED if quiet else {})}
        done = subprocess.run([self.python, "-m", *arguments], **settings)
        return done.returncode == 0, (done.stdout or "").strip()

    def uv(self, *arguments: str, quiet: bool = False) -> tuple[bool, str]:
        return self.run("uv", "pip", "install", "--python", str(self.python), *self.sources, *arguments, quiet=quiet)

    def install(self, what: str, *arguments: str) -> None:
        if not self.uv(*arguments)[0]:
            raise SetupError(f"uv could not install {what}; its reason stands above. Mend that and start again.")

    def torch_build(self, version: str) -> list[str]:
        """Arguments for the first build of torch that is found. All of them compute the same on a CPU."""
        builds = {
            "the CPU build, where pip looks": ["--no-deps", f"torch=={version}+cpu"],
            "PyTorch's CPU wheels": ["--no-deps", "--torch-backend", "cpu", f"torch=={version}+cpu"],
            "the build for CUDA, where pip looks": ["--constraints", str(LOCK), f"torch=={version}"],
        }
        tried = ""
        for title, arguments in builds.items():
            found, output = self.uv("--dry-run", "--quiet", *arguments, quiet=True)
            if found:
                say(f"torch {version}: {title}")
                return arguments
            tried += f"- {title}: {' '.join(output.split())}\n"
        raise SetupError(
            f"No build of torch {version} was found. Tried:\n{tried}Check the network. Behind a firewall, tell pip "
            "where packages are: pip config set global.index-url ADDRESS."
        )

    def compile_bytecode(self) -> None:
        """Otherwise every process of the first run would compile it, and of every run where Python writes no bytecode.
        uv's own option leaves out what was installed before. In processes of their own, which end soon if this one is
        killed: the workers of a pool would stay, and hold the lock."""
        files = [str(path) for place in (VENV / "lib", ROOT / "titan_rl") for path in place.rglob("*.py")]
        parts = [files[start : start + COMPILED_AT_ONCE] for start in range(0, len(files), COMPILED_AT_ONCE)]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            compiled = pool.map(lambda part: self.run("compileall", "-qq", *part, quiet=True), parts)
            for done, _ in enumerate(itertools.chain([None], compiled)):
                say_progress("compiling", done, len(parts), f"{sum(map(len, parts[:done])):,} of {len(files):,} files")


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def say_progress(what: str, done: int, parts: int, text: str) -> None:
    """One line that changes, on a terminal; elsewhere a line per quarter."""
    if sys.stdout.isatty():
        print(f"\rsetup: {what} {text}", end="\n" if done == parts else "", flush=True)
    elif 4 * done // parts > 4 * (done - 1) // parts:
        say(f"{what} {text}")


def locked_versions() -> dict[str, str]:
    return dict(re.findall(r"^([\w-]+)==(\S+)", LOCK.read_text(), re.MULTILINE))


def make_environment(directory: Path) -> None:
    say(f"making {directory} with Python {platform.python_version()}")
    made = subprocess.run([sys.executable, "-m", "venv", "--clear", directory], **CAPTURED)
    if made.returncode:
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
        raise SetupError(f"python -m venv failed (Debian and Ubuntu: apt install {package}):\n{made.stdout}")


def bring_up_cuda(directory: Path) -> None:
    """An environment with the CUDA wheels, apart from `VENV`; what is there already stays. Raises SetupError."""
    python, pins = directory / "bin" / "python", locked_versions()
    if not python.exists():
        if directory.exists() and any(directory.iterdir()):
            raise SetupError(f"{directory} is no environment, and not empty: name another directory")
        make_environment(directory)
        check_disk(directory, shutil.disk_usage(directory).free / 1e9, CUDA_EXTRA_GB)
    descriptor = os.open(directory, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    # The extra pins what computes. An index that has torch's CPU build, too, would give that: it counts as newer.
    constraints = directory / "constraints.txt"
    constraints.write_text(f"torch!={pins['torch']}+cpu\n")
    installer = Installer(pins["uv"], descriptor, python)
    installer.install("the extra `cuda`", "--constraints", str(constraints), "--editable", f"{ROOT}[cuda,dev]")
    say(f"ready: {directory}")


def bring_up(lock_descriptor: int, locks: list[Path]) -> None:
    """From any state to the wanted one. Raises SetupError."""
    started = time.monotonic()
    pins = locked_versions()
    check_this_machine()
    whole = found_stamp()[:1] == wanted_stamp(locks)[:1]
    if not whole and VENV.is_symlink():
        raise SetupError(
            f"{VENV} is a link, and what it points to, {VENV.resolve()}, would be emptied. Remove the link."
        )
    STAMP.unlink(missing_ok=True)
    if not whole:
        make_environment(VENV)
    installer = Installer(pins["uv"], lock_descriptor)
    torch = installer.torch_build(pins["torch"])
    if not whole:
        build = "CUDA" if "--constraints" in torch else "CPU"
        needed = DISK_GB[build][len(locks) - 1]
        if build == "CUDA":
            say(CUDA_CHOICE.format(needed))
        check_disk(ROOT, shutil.disk_usage(ROOT).free / 1e9, needed)
    installer.install("torch", "--no-build", *torch)
    required = [argument for lock in locks for argument in ("-r", str(lock))]
    installer.install("the locked packages", "--no-deps", "--no-build", *required)
    # Without isolation the build takes the locked setuptools and downloads nothing.
    installer.install("the project itself", "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    installer.compile_bytecode()
    STAMP.write_text("\n".join(wanted_stamp(locks)))
    say(f"ready after {time.monotonic() - started:.0f} s: {VENV}")


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("scripts/setup.sh", description=HELP, formatter_class=raw)
    parser.add_argument("--all", action="store_true", help=ALL_HELP)
    parser.add_argument("--cuda", type=Path, metavar="DIRECTORY", help=CUDA_HELP)
    arguments = parser.parse_args()
    everything = arguments.all
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if arguments.cuda is not None:
            check_this_machine()
            bring_up_cuda(arguments.cuda.absolute())
            return 0
        locks = wanted_locks(everything)
        if found_stamp() == wanted_stamp(locks):
            return 0
        descriptor = os.open(ROOT, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up of this clone is at work; waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        locks = wanted_locks(everything)
        if found_stamp() != wanted_stamp(locks):
            bring_up(descriptor, locks)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; start again to go on with what was downloaded", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
