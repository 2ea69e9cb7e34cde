"""What travels between a rollout worker and the host of its programs, in frames as `environment_wire` packs them."""

from __future__ import annotations

from typing import NamedTuple

from titan_rl.types import Endpoint, Purpose


class Start(NamedTuple):
    """Play a rollout; answered by one `Ended`."""

    number: int
    """Names the play; never used again."""
    purpose: Purpose
    prompt_index: int
    """In the training stream or the held-out list."""
    endpoint: Endpoint


class Kill(NamedTuple):
    """End a play; of one that has ended already, nothing. An `Ended` comes all the same."""

    number: int


class Ended(NamedTuple):
    """A play is over, and nothing that it started is left."""

    number: int
    error: str
    """Non-empty when it did not return."""
    state: bytes | None
    """Pickled by the play; None where it returned None."""
