"""What a host with CUDA devices lacks, by a driver that a test makes up (1 s)."""

from __future__ import annotations

import importlib.metadata

import pytest

from titan_rl import train
from titan_rl.errors import ConfigError
from titan_rl.hosts.facts import HostFacts, detect_host
from titan_rl.run import cuda, doctor

HOST = HostFacts(cpus=4, cuda_devices=(0,), driver="580.65.06")


@pytest.fixture
def ready(monkeypatch, tmp_path):
    """Builds for CUDA 13, a compiler, Python's headers, ninja and nvcc."""
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(cuda, "torch_cuda", lambda: "13.0")
    monkeypatch.setattr(cuda, "distributions", lambda name: [name])
    monkeypatch.setattr(cuda.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setattr(cuda.resource, "getrlimit", lambda what: (-1, -1))
    for program in ("gcc", "ninja", "nvcc"):
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    return tmp_path


def test_a_host_that_has_all_lacks_nothing(ready):
    assert [*cuda.lacking(HOST), *cuda.slowing()] == []


@pytest.mark.parametrize(
    ("build", "driver", "words"),
    [("13.0", "570.86.10", "older than 580, which CUDA 13.0 needs"), ("12.9", "520.1", "older than 525"), ("", "", "")],
)
def test_an_old_driver_and_a_cpu_build_are_refused(ready, monkeypatch, build, driver, words):
    monkeypatch.setattr(cuda, "torch_cuda", lambda: build)
    (sentence,) = cuda.lacking(HostFacts(cpus=4, cuda_devices=(0,), driver=driver))
    assert (words or "built for CPUs only: pip install") in sentence
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/cuda/compat")
    assert bool([*cuda.lacking(HostFacts(cpus=4, cuda_devices=(0,), driver=driver))]) == (not build)


def test_what_compiles_kernels_is_missed(ready):
    for program in ("gcc", "ninja"):
        (ready / program).unlink()
    (ready / "Python.h").unlink()
    compiler, headers = cuda.lacking(HOST)
    assert "apt install gcc" in compiler and "apt install python3-dev" in headers
    assert "flashinfer-cubin" in next(cuda.slowing())


def test_too_little_locked_memory_matters_where_there_is_infiniband(ready, monkeypatch):
    monkeypatch.setattr(cuda.resource, "getrlimit", lambda what: (8 << 20, 8 << 20))
    monkeypatch.setattr(cuda, "INFINIBAND", ready / "none")
    assert [*cuda.slowing()] == []
    monkeypatch.setattr(cuda, "INFINIBAND", ready)
    assert "may lock 8 MiB" in next(cuda.slowing())


def test_mig_is_refused_of_the_devices_that_the_run_sees(ready):
    rows = "0, GPU-a, 580.65.06, Disabled, 81559, 0:1:0.0\n1, GPU-b, 580.65.06, Enabled, 81559, 0:2:0.0"
    (ready / "nvidia-smi").write_text(f"#!/bin/sh\necho '{rows}'\n")
    (ready / "nvidia-smi").chmod(0o755)
    assert [*cuda.lacking(detect_host({"CUDA_VISIBLE_DEVICES": "0"}))] == []
    assert "nvidia-smi -mig 0" in next(cuda.lacking(detect_host({})))


@pytest.mark.skipif(bool(list(importlib.metadata.distributions(name="vllm"))), reason="vLLM is built for CUDA")
def test_a_run_and_doctor_refuse_a_gpu_host_with_builds_for_cpus(capsys, tmp_path, monkeypatch):
    rows = "\n".join(f"{index}, GPU-{index}, 580.65.06, Disabled, 81559, 0:{index}:0.0" for index in range(3))
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{rows}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert train.main("--recipe copy4 --placement.device cuda".split()) == 2
    assert "torch 2.13.0+cpu is built for CPUs only" in capsys.readouterr().err
    stops = [str(each) for _, each in doctor.examine(detect_host()) if isinstance(each, ConfigError)]
    assert any("vllm 0.32.0" in sentence and "built for CPUs only" in sentence for sentence in stops)
