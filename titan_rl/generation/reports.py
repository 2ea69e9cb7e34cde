"""How pulls went: plain data that crosses process boundaries."""

from __future__ import annotations

from dataclasses import dataclass

from titan_rl.errors import WeightsError
from titan_rl.types import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class PullReport:
    """A pull that ended with verified weights."""

    version: PolicyVersion
    """The version that is served now: the requested one, or a newer one that was requested before it was loaded."""
    seconds_waited: float
    """From the call to the decision: the running burst, and pulls before it."""
    seconds_copied: float
    """Reading, loading and dropping the old weights' KV."""
    seconds_verifying: float
    bytes: int
    """Of the publication."""
    requests_in_flight: int
    """Requests that continue under the new weights with their tokens so far."""


@dataclass(frozen=True, slots=True)
class FleetPull:
    """How one pull went, over the whole fleet."""

    version: PolicyVersion
    reports: dict[str, PullReport]
    """By generator that serves the version, or a newer one that overtook it."""
    failures: dict[str, str]
    """By generator that does not: why."""

    def require_served(self) -> FleetPull:
        """Return this pull if any generator serves the version.

        Raises:
            WeightsError: none does; names every generator and the reason.
        """
        if not self.reports:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.failures.items())
            raise WeightsError(f"{self.version} is served by nobody: {reasons}")
        return self
