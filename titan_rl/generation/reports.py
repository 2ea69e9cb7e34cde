"""What a generator tells about itself: plain data that crosses process boundaries."""

from __future__ import annotations

from dataclasses import dataclass, field

from titan_rl.generation.decisions import ServingState
from titan_rl.types import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class PullReport:
    """A pull that ended with verified weights."""

    version: PolicyVersion
    """What is served now."""
    superseded: bool = False
    """True when the caller asked for an older version, which a newer one overtook while it waited."""
    seconds_waited: float
    """From the call to the decision: the running burst, and pulls before it."""
    seconds_copied: float
    """Reading, loading and dropping the old weights' KV."""
    seconds_verifying: float
    bytes: int
    """Of the publication."""
    requests_in_flight: int
    """Requests that go on under the new weights with the tokens they have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopStatus:
    """One moment of an engine loop."""

    rank: int
    state: ServingState
    """On a follower: whether its loop runs (SERVING) or has ended (CLOSED)."""
    reason: str
    """Why the state is STALE."""
    version: PolicyVersion | None
    running: int
    """Requests in the engine."""
    waiting: int
    """Requests that are not in the engine yet."""
    decisions: int
    """Applied so far."""
    digest: str
    """Hexadecimal; equal on all ranks that applied the same decisions."""
    failure: str
    """Why the loop died; empty while it lives."""
    engine: dict[str, float] = field(default_factory=dict)
    """The engine's own counters: steps, tokens, prefix-cache queries and hits, …"""
