"""Config of placement: on what the meshes run. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from titan_rl.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class PlacementConfig:
    """Devices and threads of the meshes."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: cuda when this host has a CUDA device, else cpu."""
    threads: int = 1
    """OpenMP threads per process on CPU. More than one on contended cores costs far more than it gives."""
    start_seconds: float = 300.0
    """Bound on the start of a mesh, model load included."""
    step_seconds: float = 1800.0
    """Longest time any single call to a mesh may take before the run ends with the name of that call. Requests and
    rollouts are no such calls: see `router.request_seconds` and `rollout.seconds`."""

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ConfigError(f"placement.threads must be at least 1, got {self.threads}")
        for name in ("start_seconds", "step_seconds"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"placement.{name} must be positive, got {getattr(self, name)}")
