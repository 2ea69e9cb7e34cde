"""How engines step on CUDA, on a CPU: vLLM's model runner V2 and its own Triton kernels, under Triton's interpreter,
with steps that overlap as far as vLLM and this project know. Only the device, its graphs and streams are not there.

Import it before vLLM, in a process of its own.
"""

from __future__ import annotations

import os
from typing import Any

os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}

import triton.backends  # noqa: E402
from triton.backends.driver import DriverBase  # noqa: E402


class _Interpreter(DriverBase):
    """vLLM asks for an active driver named "cpu", or does without Triton."""

    @classmethod
    def is_active(cls) -> bool:
        return True

    map_python_to_cpp_type = get_current_target = get_active_torch_device = get_benchmarker = None


triton.backends.backends.clear()
triton.backends.backends["cpu"] = triton.backends.Backend(compiler=None, driver=_Interpreter)

from vllm.platforms.cpu import CpuPlatform  # noqa: E402
from vllm.v1.engine.core import EngineCore  # noqa: E402

from titan_rl.generation.vllm import engine  # noqa: E402
from titan_rl.generation.vllm.cuda import OverlappedSteps, cuda_arguments  # noqa: E402

_stock_update = CpuPlatform.check_and_update_config
_cpu_arguments = engine._cpu_arguments


def _update(config: Any) -> None:
    overlaps = config.scheduler_config.async_scheduling
    _stock_update(config)
    config.scheduler_config.async_scheduling = overlaps  # which a CPU does not need


def _arguments(config: Any) -> dict[str, Any]:
    on_cuda = cuda_arguments(config)
    del on_cuda["gpu_memory_utilization"]
    on_cuda.pop("attention_backend", None)  # vLLM has one of its own for CPUs
    memory = {name: _cpu_arguments(config)[name] for name in ("kv_cache_memory_bytes", "enforce_eager")}
    return on_cuda | memory


def _steps(this: engine.VllmEngine, core: EngineCore) -> OverlappedSteps:
    return OverlappedSteps(this._client, core, this._requests, this._recorded)


CpuPlatform.check_and_update_config = staticmethod(_update)  # type: ignore[assignment]
engine._cpu_arguments = _arguments
engine.VllmEngine._make_stepper = _steps  # type: ignore[method-assign]
