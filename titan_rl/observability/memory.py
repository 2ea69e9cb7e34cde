"""How much memory this process takes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple

_PAGE = os.sysconf("SC_PAGE_SIZE")


class Memory(NamedTuple):
    """Of one process, in bytes."""

    resident: int = 0
    """In RAM; what it shares with other processes is counted in each of them (RSS)."""
    device: int = 0
    """That torch holds on this process's device."""


def memory() -> Memory:
    """Two small reads, no waiting for the device."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    is_initialized = getattr(sys.modules.get("torch.cuda"), "is_initialized", None)  # torch may be half imported
    device = sys.modules["torch.cuda"].memory_reserved() if is_initialized is not None and is_initialized() else 0
    return Memory(resident, device)
