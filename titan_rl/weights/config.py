"""Config of weight publication. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from titan_rl.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class WeightsConfig:
    """How new weights travel from the trainer mesh to the generators. Generators need none of these settings: a
    publication says where it is."""

    transport: Literal["shared_memory", "filesystem"] = "shared_memory"
    """`shared_memory`: every trainer rank writes its own shard into one mapping, no gather; generators of other hosts
    read a copy that their host's relay brings. `filesystem`: one safetensors file per version in `directory`, which all
    trainer ranks and generators must see; slowest, and the one that other programs can read."""
    directory: str = ""
    """Where `filesystem` keeps its versions, as `directory/channel/version/`; needed for it and used by nothing else.
    Released versions are removed, the last ones stay after the run."""
    max_live: int = 2
    """Publications that may exist at once: the one that is served, the one that is being pulled, and those that an
    evaluation keeps. A trainer that wants one more waits, and the watchdog says for whom. At least 2."""

    def __post_init__(self) -> None:
        if self.max_live < 2:
            raise ConfigError(
                f"weights.max_live must be at least 2 (one is served while the next is pulled), got {self.max_live}"
            )
        if self.transport == "filesystem" and not self.directory:
            raise ConfigError('weights.transport = "filesystem" needs weights.directory')
