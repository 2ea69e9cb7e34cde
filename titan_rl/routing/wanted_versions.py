"""Which versions a fleet is to serve, and which of them a generator takes next.

- A generator gives up a wanted version in two cases: another generator serves it too; or it is idle, requests for
  another version wait, and no other generator will serve them. Without the second case a run can deadlock: the waiting
  requests may hold what the groups of its own version need, such as places of programs.
- It takes a version that no generator serves or is about to serve: one that waiting requests ask for, else the oldest.
  If there is none, it takes the newest.

So some request always goes on: an idle generator whose version nobody asks for takes one that is asked for. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from titan_rl.routing.generator import GeneratorHealth, GeneratorState
from titan_rl.types import PolicyVersion


@dataclass(slots=True)
class WantedVersions:
    """What a fleet was asked for."""

    target: PolicyVersion | None = None
    """Newest version that was requested."""
    versions: list[PolicyVersion] = field(default_factory=list)
    """Versions that are to be served, oldest first."""
    demanded: Collection[PolicyVersion] = ()
    """Those of waiting requests."""

    def goal(
        self, health: GeneratorHealth, fleet: Iterable[GeneratorHealth], *, idle: bool = False
    ) -> PolicyVersion | None:
        """The version for which a generator should begin a sync; None: it stays as it is.

        Args:
            idle: it has no request.
        """
        if self.target is None or health.is_syncing:
            return None
        if health.state in (GeneratorState.RECOVERING, GeneratorState.STALE, GeneratorState.SYNCING):
            return self.best_for(health, fleet)
        if health.state is not GeneratorState.SERVING:
            return None
        if health.version not in self.versions:
            best = self.best_for(health, fleet)
            return best if best != health.version else None
        first = next((version for version in self._missing(health, fleet) if version != health.version), None)
        others = [each for each in fleet if each is not health]
        mate = any(each.state is GeneratorState.SERVING and each.version == health.version for each in others)
        coming = any(each.is_awaited or each.is_syncing or each.state is GeneratorState.RECOVERING for each in others)
        return first if mate or (idle and first in self.demanded and not coming) else None

    def best_for(self, health: GeneratorHealth, fleet: Iterable[GeneratorHealth]) -> PolicyVersion:
        """What a sync of this generator brings."""
        assert self.target is not None
        return next(iter(self._missing(health, fleet)), self.target)

    def _missing(self, health: GeneratorHealth, fleet: Iterable[GeneratorHealth]) -> list[PolicyVersion]:
        """Versions that no other generator serves or is about to, demanded ones first."""
        taken = set(self._taken(each for each in fleet if each is not health))
        missing = [version for version in self.versions if version not in taken]
        return sorted(missing, key=lambda version: version not in self.demanded)

    def _taken(self, others: Iterable[GeneratorHealth]) -> Iterator[PolicyVersion | None]:
        for each in others:
            if (each.state is GeneratorState.SERVING or each.is_syncing) and not each.is_late:
                yield each.pulls if each.is_syncing else each.version
