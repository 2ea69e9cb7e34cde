"""scripts/setup.sh on a small clone: real venv, pip and uv, made-up wheels, no network (about 20 CPU seconds).

The wheels lie in a folder that pip's own configuration points to, so the tests also show that uv obeys it.
"""

import base64
import fcntl
import hashlib
import importlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from importlib.util import cache_from_source
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"

BUILD_BACKEND = """
import zipfile

def build_editable(directory, config_settings=None, metadata_directory=None):
    name = "probe_project-1-py3-none-any.whl"
    with zipfile.ZipFile(f"{directory}/{name}", "w") as wheel:
        info = "probe_project-1.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\nName: probe-project\\nVersion: 1\\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return name
"""

LOCK = "torch==1\nuv==1\nprobe-a==1\nprobe-b==1\n"
ALL_LOCK = "probe-c==1\n"
CHANGED = f"{LOCK}# another stamp, and nothing to install\n"


def load_environment_module():
    spec = importlib.util.spec_from_file_location("setup_environment", SCRIPTS / "environment.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


environment = load_environment_module()


def write_wheel(folder: Path, name: str, version: str, text: str = "value = 1\n", requires: str = "") -> None:
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = {
        f"{name}.py": text,
        f"{info}/METADATA": metadata + (f"Requires-Dist: {requires}\n" if requires else ""),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, content in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest()).rstrip(b"=").decode()
            record += f"{path},sha256={digest},{len(content)}\n"
            wheel.writestr(path, content)
        wheel.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")


class Clone:
    """A clone with a small lock, and the output of its set-up script."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.wheels = root / "wheels"
        (root / "scripts").mkdir(parents=True)
        self.wheels.mkdir()
        for script in ("setup.sh", "environment.py"):
            shutil.copy(SCRIPTS / script, root / "scripts" / script)
        (root / "backend.py").write_text(BUILD_BACKEND)
        (root / "pyproject.toml").write_text(
            '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
            '[project]\nname = "probe-project"\nversion = "1"\n'
        )
        uv = importlib.import_module("uv").find_uv_bin()
        write_wheel(self.wheels, "uv", "1", f"import os, sys\nos.execv({uv!r}, ['uv', *sys.argv[1:]])\n")
        write_wheel(self.wheels, "torch", "1+cpu", "build = 'CPU'\n")
        for name in ("probe_a", "probe_b", "probe_c"):
            write_wheel(self.wheels, name, "1")
        self.write_lock(LOCK)
        self.write_lock(ALL_LOCK, "requirements-all.lock")

    def write_lock(self, text: str, name: str = "requirements.lock") -> None:
        (self.root / "scripts" / name).write_text(text)

    @property
    def stamp(self) -> Path:
        return self.root / ".venv" / "titan_rl.stamp"

    @property
    def site_packages(self) -> Path:
        return next((self.root / ".venv" / "lib").glob("python*/site-packages"))

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        settings = {
            "PYTHON": sys.executable,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
            "UV_CACHE_DIR": str(self.root / "cache"),
            **variables,
        }
        return subprocess.Popen(
            [self.root / "scripts" / "setup.sh", *arguments],
            env={**os.environ, **settings},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def set_up(self, *arguments: str, **variables: str) -> tuple[int, str, str]:
        process = self.start(*arguments, **variables)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err

    def installed(self) -> set[str]:
        names = {path.name.removesuffix(".dist-info") for path in self.site_packages.glob("*.dist-info")}
        return {name for name in names if name.startswith(("torch-", "nvidia_", "probe_"))}


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Clone:
    return Clone(tmp_path_factory.mktemp("setup") / "clone")


@pytest.fixture
def finished(clone) -> Clone:
    """Ready, whatever the test before left: the first test pays for the environment, the others for what it broke."""
    clone.write_lock(LOCK)
    code, out, err = clone.set_up()
    assert code == 0, out + err
    return clone


def test_a_first_start_installs_the_lock_and_the_project(finished):
    assert finished.stamp.exists()
    assert finished.installed() == {"torch-1+cpu", "probe_a-1", "probe_b-1", "probe_project-1"}


def test_a_second_start_does_nothing_and_says_nothing(finished):
    assert finished.set_up() == (0, "", "")


def test_a_changed_lock_changes_what_is_installed_and_leaves_the_rest_alone(finished):
    untouched = (finished.site_packages / "probe_a-1.dist-info" / "RECORD").stat().st_mtime_ns
    write_wheel(finished.wheels, "probe_b", "2", "value = 'two'\n")
    finished.write_lock(LOCK.replace("probe-b==1", "probe-b==2"))
    assert finished.set_up()[0] == 0
    assert finished.installed() == {"torch-1+cpu", "probe_a-1", "probe_b-2", "probe_project-1"}
    assert (finished.site_packages / "probe_b.py").read_text() == "value = 'two'\n"
    assert (finished.site_packages / "probe_a-1.dist-info" / "RECORD").stat().st_mtime_ns == untouched


def test_all_adds_the_second_lock_and_what_has_it_keeps_it(finished):
    base = finished.installed()
    assert finished.set_up("--all")[0] == 0
    assert finished.installed() == {*base, "probe_c-1"}
    assert finished.set_up() == finished.set_up("--all") == (0, "", "")
    write_wheel(finished.wheels, "probe_c", "2")
    finished.write_lock("probe-c==2\n", "requirements-all.lock")
    assert finished.set_up()[0] == 0
    assert finished.installed() == {*base, "probe_c-2"}


def test_on_a_terminal_progress_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for done in (1, 2):
        environment.say_progress("compiling", done, 2, f"{done} of 2 files")
    assert capsys.readouterr().out == "\rsetup: compiling 1 of 2 files\rsetup: compiling 2 of 2 files\n"


def test_an_environment_behind_a_link_is_left_alone(tmp_path):
    clone = Clone(tmp_path / "clone")
    others = tmp_path / "others"
    others.mkdir()
    (others / "titan_rl.stamp").write_text("of another clone")
    (clone.root / ".venv").symlink_to(others)
    code, _, err = clone.set_up()
    assert code == 1 and "is a link" in err
    assert (others / "titan_rl.stamp").read_text() == "of another clone"


def test_two_starts_at_once_take_turns(finished):
    before = finished.stamp.read_text()
    finished.write_lock(CHANGED)
    descriptor = os.open(finished.root, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    waiting = finished.start()
    assert "another set-up of this clone is at work" in waiting.stdout.readline()
    assert finished.stamp.read_text() == before
    os.close(descriptor)
    out, err = waiting.communicate(timeout=120)
    assert waiting.returncode == 0, out + err
    assert finished.stamp.read_text() != before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_start_leaves_no_stamp(finished, number):
    before = finished.stamp.read_text()
    finished.write_lock(CHANGED)
    # uv stops at this named pipe until it is killed: it opens it, and nobody writes.
    endless = finished.root / "endless.txt"
    os.mkfifo(endless)
    interrupted = finished.start(UV_CONSTRAINT=str(endless))
    with endless.open("w"):
        # Opening for writing returned, so uv is reading now.
        interrupted.send_signal(number)
        _, err = interrupted.communicate(timeout=60)
    endless.unlink()
    assert interrupted.returncode == 130
    assert "start again to go on" in err
    assert not finished.stamp.exists()
    finished.stamp.write_text(before)  # nothing was changed yet


def test_what_uv_cannot_find_is_told_and_the_next_start_makes_the_environment_anew_and_compiles_it(finished):
    finished.write_lock(LOCK + "probe-absent==7\n")
    code, _, err = finished.set_up()
    assert code == 1
    assert "probe-absent" in err
    assert "setup: uv could not install the locked packages" in err
    assert not finished.stamp.exists()
    (finished.site_packages / "probe_a.py").unlink()
    (finished.site_packages / "leftover.py").touch()
    finished.write_lock(LOCK)
    code, out, err = finished.set_up()
    assert code == 0, out + err
    assert finished.installed() == {"torch-1+cpu", "probe_a-1", "probe_b-1", "probe_project-1"}
    assert (finished.site_packages / "probe_a.py").exists()
    assert not (finished.site_packages / "leftover.py").exists()
    progress = [line for line in out.splitlines() if line.startswith("setup: compiling ")]
    done, files = re.fullmatch(r"setup: compiling ([\d,]+) of ([\d,]+) files", progress[-1]).groups()
    assert done == files and 1 < len(progress) <= 5
    assert not [path for path in finished.site_packages.rglob("*.py") if not Path(cache_from_source(path)).exists()]


def test_without_a_cpu_build_the_build_for_cuda_is_taken_with_what_it_imports(finished):
    (finished.wheels / "torch-1+cpu-py3-none-any.whl").unlink()
    write_wheel(finished.wheels, "torch", "1", "build = 'CUDA'\n", requires="nvidia-probe")
    write_wheel(finished.wheels, "nvidia_probe", "1")
    finished.stamp.unlink()
    code, out, err = finished.set_up()
    assert code == 0, out + err
    assert "setup: torch 1: the build for CUDA" in out
    assert "2.4 GB" in out and "6.4 GB" in out and "extra-index-url" in out
    assert finished.installed() == {"torch-1", "nvidia_probe-1", "probe_a-1", "probe_b-1", "probe_project-1"}


def test_without_any_build_of_torch_every_try_is_told(clone):
    for wheel in clone.wheels.glob("torch-*"):
        wheel.unlink()
    clone.write_lock("torch==3\nuv==1\n")
    code, _, err = clone.set_up()
    assert code == 1
    assert "setup: No build of torch 3 was found. Tried:" in err
    assert "- the CPU build, where pip looks:" in err
    assert "- PyTorch's CPU wheels:" in err
    assert "- the build for CUDA, where pip looks:" in err
    assert "pip config set" in err


def test_a_wrong_python_is_refused_with_one_sentence(tmp_path):
    clone = Clone(tmp_path / "clone")
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho 3.10\n")
    fake.chmod(0o755)
    code, out, err = clone.set_up(PYTHON=str(fake))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "needs Python 3.11, 3.12 or 3.13" in err
    assert "3.10" in err
    assert not (clone.root / ".venv").exists()


def test_uv_looks_where_pip_looks():
    arguments, variables = environment.uv_settings(
        "\n".join(
            [
                ":env:.find-links='/wheels'",
                "global.cert='/certificates.pem'",
                "global.find-links='/elsewhere'",
                "global.extra-index-url='https://one/simple\\nhttps://two/simple'",
                "global.index-url='https://shadowed/simple'",
                "install.index-url='https://index/simple'",
                "global.proxy='http://proxy:3128'",
            ]
        )
    )
    pairs = set(zip(arguments[::2], arguments[1::2], strict=True))
    assert pairs == {
        ("--index-strategy", "unsafe-best-match"),
        ("--default-index", "https://index/simple"),
        ("--index", "https://one/simple"),
        ("--index", "https://two/simple"),
        ("--find-links", "/wheels"),
    }
    assert variables == {"SSL_CERT_FILE": "/certificates.pem", "ALL_PROXY": "http://proxy:3128"}


@pytest.mark.parametrize(
    ("system", "machine", "glibc", "flags", "sentence"),
    [
        ("Darwin", "arm64", (), "", "Linux x86-64 only"),
        ("Linux", "aarch64", (2, 36), "", "Linux x86-64 only"),
        ("Linux", "x86_64", (2, 17), "avx2", "glibc 2.28 or newer"),
        ("Linux", "x86_64", (), "avx2", "glibc 2.28 or newer"),
        ("Linux", "x86_64", (2, 36), "sse2 avx", "AVX2"),
    ],
)
def test_a_machine_that_cannot_run_it_is_refused(system, machine, glibc, flags, sentence):
    with pytest.raises(environment.SetupError, match=sentence):
        environment.check_machine(system, machine, glibc, flags)


def test_a_full_disk_is_refused_with_the_figures():
    with pytest.raises(environment.SetupError, match="has 2.0 GB free, and the installation needs 5.8 GB"):
        environment.check_disk(Path("here"), 2.0, 5.8)
