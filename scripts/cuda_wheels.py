#!/usr/bin/env python
"""What can be known of the CUDA builds without a GPU: `scripts/cuda_wheels.py DIRECTORY`, a quarter of an hour.

Makes the environment of `scripts/setup.sh --cuda DIRECTORY`, and there: imports every module of titan_rl, lets vLLM's
own configs validate the engine's arguments for a Hopper device, runs the tests of `TESTS`, and takes the trainer's step
of 0.6B, 8B and 32B on fake tensors as rank 0 of 8 (`fake_step.py`), whose peak must be near the estimate of a dry run.

vLLM's extensions need NVIDIA's driver library to load: a library of the same name without functions stands in for it.
Exit codes: 0 all holds; 1 something does not. The last line is JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests/config/test_placement.py", "tests/run/test_cuda_host.py")
"""Besides every file with `cuda` in its name."""
STEPS = {
    "0.6B": "--data-parallel 4 --tensor-parallel 2",
    "8B": "--data-parallel 4 --tensor-parallel 2",
    "32B": "--data-parallel 4 --tensor-parallel 2 --recompute",
}
TOLERANCE = 0.2
"""Between the tracked peak and the estimate, which is to be the larger one."""


def import_all() -> str:
    import titan_rl

    failed = []
    for module in pkgutil.walk_packages(titan_rl.__path__, "titan_rl."):
        try:
            importlib.import_module(module.name)
        except Exception as error:
            failed.append(f"{module.name}: {type(error).__name__}: {error}")
    assert not failed, "; ".join(failed)
    return "every module of titan_rl is imported"


def engine_arguments(tensor_parallel: str) -> str:
    """As vLLM would complete them on Hopper devices."""
    from titan_rl.generation.config import GeneratorConfig, generator_environment

    os.environ |= generator_environment("cuda") | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": tensor_parallel}
    import torch
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class Hopper(NonNvmlCudaPlatform):
        get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
        get_device_name = classmethod(lambda cls, device_id=0: "NVIDIA H100 80GB HBM3")
        get_device_total_memory = classmethod(lambda cls, device_id=0: 80 << 30)
        num_compute_units = classmethod(lambda cls, device_id=0: 132)

    vllm.platforms._current_platform = Hopper()
    torch.cuda.device_count = lambda: int(tensor_parallel)
    from vllm import EngineArgs

    from titan_rl.generation.vllm import engine
    from titan_rl.run.memory import published_shape

    shape = published_shape("Qwen3-8B")
    assert shape is not None
    with tempfile.TemporaryDirectory() as directory:
        sizes = {"vocab_size": shape.vocab, "hidden_size": shape.dim, "num_hidden_layers": shape.layers}
        sizes |= {"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim}
        sizes |= {"intermediate_size": shape.ffn, "max_position_embeddings": shape.max_length}
        rest = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16"}
        Path(directory, "config.json").write_text(json.dumps(sizes | rest))
        config = GeneratorConfig(
            tensor_parallel=int(tensor_parallel), dtype="bfloat16", max_model_len=8192, block_size=16
        )
        found = EngineArgs(**engine.engine_arguments(config, Path(directory), "cuda")).create_engine_config()
    runner = "V2" if found.use_v2_model_runner else "V1"
    return f"TP {tensor_parallel}: model runner {runner}, {found.compilation_config.cudagraph_mode.name}"


def stand_in(directory: Path) -> None:
    """A libcuda.so.1 that has the names which vLLM's extensions look for when they are loaded."""
    extensions = map(str, directory.glob("lib/python3*/site-packages/vllm/*.so"))
    listed = subprocess.run(["nm", "-D", "--undefined-only", *extensions], capture_output=True, text=True).stdout
    names = {line.split()[-1] for line in listed.splitlines() if line.strip().startswith("U cu")}
    source = "".join(f"int {name}(void) {{ return 100; }}\n" for name in sorted(names) if name[2].isupper())
    library = directory / "stand-in" / "libcuda.so.1"
    library.parent.mkdir(exist_ok=True)
    command = ["cc", "-shared", "-xc", "-", "-Wl,-soname,libcuda.so.1", "-o", str(library)]
    subprocess.run(command, input=source, text=True, check=True)


def main() -> int:
    directory = Path(sys.argv[1]).absolute()
    subprocess.run([ROOT / "scripts" / "setup.sh", "--cuda", directory], check=True)
    stand_in(directory)
    here = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LD_LIBRARY_PATH": str(directory / "stand-in")}
    tests = [*TESTS, *(str(path) for path in sorted((ROOT / "tests").rglob("test_*cuda*.py")))]
    jobs = {"import_all": [__file__, "--inside", "import_all"]}
    jobs |= {f"engine_tp{ranks}": [__file__, "--inside", "engine_arguments", ranks] for ranks in ("1", "2", "4")}
    jobs |= {f"step_{size}": [f"{ROOT}/scripts/fake_step.py", size, *words.split()] for size, words in STEPS.items()}
    jobs |= {"tests": ["-m", "pytest", "-q", "--timeout=600", *dict.fromkeys(tests)]}
    failed = []
    for name, words in jobs.items():
        began, command = time.monotonic(), [directory / "bin" / "python", *words]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | here, capture_output=True, text=True)
        lines = (done.stdout.strip() or done.stderr.strip()).splitlines() or [""]
        holds, said = done.returncode == 0, lines[-1]
        if holds and name.startswith("step_"):
            found = json.loads(said)
            peak, estimate = found["tracked"]["Total"], sum(found["estimated"].values())
            holds = 0 <= estimate / peak - 1 <= TOLERANCE
            said = f"peak memory {peak:.1f} GiB, estimated {estimate:.1f}"
        print(f"{name:<12} {'holds' if holds else 'FAILED':<7} {time.monotonic() - began:6.1f} s  {said}", flush=True)
        if not holds:
            failed.append(name)
            print("\n".join((done.stdout + done.stderr).splitlines()[-20:]), file=sys.stderr)
    print(json.dumps({"checks": len(jobs), "failed": len(failed)}))
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1] == "--inside":
        print({"import_all": import_all, "engine_arguments": engine_arguments}[sys.argv[2]](*sys.argv[3:]))
        sys.exit(0)
    sys.exit(main())
