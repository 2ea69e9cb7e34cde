"""Config of weight publication. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from titan_rl.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class WeightsConfig:
    """How new weights travel from the trainer mesh to the generators. Generators need none of these settings: a
    publication says where it is."""

    max_live: int = 2
    """Publications that may exist at once: the one that is served, the one that is being pulled, and those that an
    evaluation keeps. A trainer that wants one more waits, and the watchdog says for whom. At least 2."""

    def __post_init__(self) -> None:
        if self.max_live < 2:
            raise ConfigError(
                f"weights.max_live must be at least 2 (one is served while the next is pulled), got {self.max_live}"
            )
