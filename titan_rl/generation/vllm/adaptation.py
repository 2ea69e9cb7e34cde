"""Where vLLM's CPU backend must be adapted so that it starts beside other libraries and several engines share a host.

Applied explicitly, before an engine is built in this process; nothing happens on import. A test per adaptation
fails when vLLM no longer needs it. Linear layers, which need most, have a module of their own: `linear`.

- **Search for kernels.** While it is built, the CPU worker looks through the globals of every imported module and
  stumbles over objects of other libraries (llvmlite's, under numba) that are not as it expects. It finds all that it
  looks for in vLLM's own modules.
- **Progress bars.** vLLM makes some with tqdm, whose default lock is a semaphore in shared memory that a killed process
  leaves there. Nothing here forks, so a lock between threads does.
- **Names of shared memory.** All tensor-parallel groups on a host would open segments of one fixed name, so a
  second generator, or what a crash left behind, breaks the start. A name per process makes vLLM use gloo instead.
"""

from __future__ import annotations

import os
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

from tqdm import tqdm
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator, _CPUSHMDistributed
from vllm.triton_utils import dispatcher as vllm_kernels

_stock_rebind_kernels = vllm_kernels._rebind_kernels
_stock_group_name = _CPUSHMDistributed.make_group_name


def adapt_kernel_search() -> None:
    """Let vLLM look for its kernels in its own modules only."""

    def rebind_kernels(overrides: list[tuple[Any, Any]]) -> None:
        own_modules: Any = SimpleNamespace(modules=_vllm_modules())
        vllm_kernels.sys = own_modules
        try:
            _stock_rebind_kernels(overrides)
        finally:
            vllm_kernels.sys = sys

    vllm_kernels._rebind_kernels = rebind_kernels


def adapt_progress_bars() -> None:
    """Let tqdm lock among threads only."""
    tqdm.set_lock(threading.RLock())


def adapt_group_names() -> None:
    """Give the shared memory of this process's groups a name of its own, which no other rank agrees to."""

    def make_group_name(communicator: CpuCommunicator) -> str:
        return f"{_stock_group_name(communicator)}-{os.getpid()}"

    setattr(_CPUSHMDistributed, _stock_group_name.__name__, staticmethod(make_group_name))


def _vllm_modules() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "vllm"}
