"""What a router tells about its fleet: plain data that crosses process boundaries."""

from __future__ import annotations

from dataclasses import dataclass

from titan_rl.errors import WeightsError
from titan_rl.generation.reports import PullReport
from titan_rl.types import PolicyVersion


@dataclass(frozen=True, slots=True)
class GeneratorStatus:
    """One generator as the router sees it; plain numbers and words."""

    name: str
    state: str
    """A `routing.fleet.GeneratorState`."""
    version: str
    load: int
    """Estimated tokens in flight."""
    in_flight: int
    """Requests that it runs or is about to run."""
    served: int
    """Completions given to callers whose last part came from here."""
    failed: int
    """Attempts that ended in an error."""
    last_error: str
    """Why it is stale or dead."""


@dataclass(frozen=True, slots=True)
class FleetPull:
    """How one pull went, over the whole fleet."""

    version: PolicyVersion
    reports: dict[str, PullReport]
    """Of the generators that serve the version, or a newer one that overtook it."""
    failures: dict[str, str]
    """Of those that do not: why."""

    def require_served(self) -> FleetPull:
        """This pull, if anybody serves the version.

        Raises:
            WeightsError: nobody does; names every generator and why.
        """
        if not self.reports:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.failures.items())
            raise WeightsError(f"{self.version} is served by nobody: {reasons}")
        return self
