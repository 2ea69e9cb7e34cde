"""Config of the data plane: where finished samples wait and how trainer ranks get them. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from titan_rl.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class DataPlaneConfig:
    """Samples stay in the rollout worker that made them until they are trained."""

    store_mib: int = 1024
    """Shared memory that one rollout worker may fill with samples; about 60 thousand tokens per MiB. A run whose
    samples do not fit ends with an error that says so."""

    def __post_init__(self) -> None:
        if self.store_mib < 1:
            raise ConfigError(f"data_plane.store_mib must be at least 1, got {self.store_mib}")
