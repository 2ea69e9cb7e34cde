"""What a host with CUDA devices needs besides them, looked at before anything starts. Loads neither torch nor vLLM."""

import os
import re
import resource
import shutil
import sysconfig
from collections.abc import Iterator
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

from titan_rl.hosts.facts import HostFacts
from titan_rl.importing import installed

DRIVERS = {"12": 525, "13": 580}
"""The oldest driver for each major version of CUDA."""
INFINIBAND = Path("/sys/class/infiniband")
_INSTALL = "pip install 'titan-rl[cuda]' in an environment of its own"


def torch_cuda() -> str:
    """Version of CUDA that the installed torch is built for; empty: for CPUs, or there is no torch."""
    spec = find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    found = re.search(r"^cuda\b.*= '([\d.]+)'", file.read_text(), re.MULTILINE) if file and file.exists() else None
    return found[1] if found else ""


def lacking(host: HostFacts) -> Iterator[str]:
    """Why no run on the host's devices can start, each with its remedy."""
    cuda = torch_cuda()
    if not cuda:
        yield f"torch {installed('torch')} is built for CPUs only: {_INSTALL}"
    if not list(distributions(name="vllm")) and (found := installed("vllm")):
        yield f"vllm {found} is built for CPUs only: {_INSTALL}"
    least, have = DRIVERS.get(cuda.partition(".")[0], 0), host.driver.partition(".")[0]
    if have.isdecimal() and int(have) < least and "compat" not in os.environ.get("LD_LIBRARY_PATH", ""):
        yield (
            f"NVIDIA's driver {host.driver} is older than {least}, which CUDA {cuda} needs: update it, or put the "
            "libraries of NVIDIA's package cuda-compat on LD_LIBRARY_PATH"
        )
    if host.mig:
        yield "MIG splits a device, and parts cannot be placed: nvidia-smi -mig 0, or hide it (CUDA_VISIBLE_DEVICES)"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        yield "Triton compiles its launchers with a C compiler, and there is none: apt install gcc, or set CC"
    if not (include := Path(sysconfig.get_paths()["include"], "Python.h")).exists():
        yield f"Triton's launchers need Python's headers, and there is no {include}: apt install python3-dev"


def slowing() -> Iterator[str]:
    """What a run does without, each with its remedy."""
    if find_spec("flashinfer_cubin") is None and not (shutil.which("ninja") and shutil.which("nvcc")):
        yield (
            "vLLM leaves out FlashInfer's kernels without ninja and nvcc on PATH: activate the environment, which has "
            "ninja, and add CUDA's bin; or pip install flashinfer-cubin"
        )
    most = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    if most >= 0 and INFINIBAND.is_dir() and any(INFINIBAND.iterdir()):
        yield (
            f"a process may lock {most >> 20} MiB of memory, and transfers over InfiniBand lock all of theirs: raise "
            "the limit (ulimit -Hl unlimited; containers: --ulimit memlock=-1 --cap-add IPC_LOCK)"
        )
