"""The bytes of a segment as a tensor. A process that uses CUDA has them page-locked: only then do copies between them
and its device run at the speed of the link, and beside the host's work. Never run on CUDA."""

from __future__ import annotations

import mmap
import weakref
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from titan_rl.errors import WeightsError
from titan_rl.weights.segment_files import Identity, map_segment


def map_tensor(path: Path, *, page_lock: bool = True) -> tuple[Tensor, Identity]:
    """The whole file [N] uint8, until its last view goes, and what it was then.

    Args:
        page_lock: where this process uses CUDA. It takes a second for some GB, once for each mapping.

    Raises:
        FileNotFoundError: there is none, or it is empty.
        WeightsError: CUDA cannot lock it.
    """
    memory, identity = map_segment(path)
    array = np.frombuffer(memory, np.uint8)
    if page_lock and torch.cuda.is_initialized():
        address = array.ctypes.data
        error = torch.cuda.cudart().cudaHostRegister(address, array.nbytes, 0)
        if error.value:
            raise WeightsError(f"CUDA cannot lock the {array.nbytes >> 20} MiB of {path} in memory ({error})")
        # The array goes with the last view, and the mapping, which must not be gone before, after this.
        weakref.finalize(array, _unlock, address, memory).atexit = False
    return torch.from_numpy(array), identity


def _unlock(address: int, memory: mmap.mmap) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
