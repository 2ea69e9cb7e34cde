"""Which versions a fleet is to serve, and which generator takes which of them when.

Usually one version is wanted: the newest. Older ones are wanted beside it while an evaluation, or the groups of a
deterministic run, ask for exactly them. Of each older wanted version one generator stays; all others take the newest.

- A generator gives up a wanted version in two cases: another generator serves it; or it is idle, requests for another
  version wait, and no other generator will serve them. Without the second case a run can deadlock: the waiting requests
  may hold what the groups of its own version need, such as places of programs.
- A version that nobody serves or is about to serve comes first: one that waiting requests need, else the oldest.
- At most `max_syncing` serving generators drain at once (0: any number). Generators that do not serve anyway (new,
  stale, woken) start at once.
- With `hot_swap` a generator serves while it pulls, unless requests may ask for exactly its version: then it drains.
- What a generator takes is decided again when its pull begins. A failed pull is tried again `retries` times.
- A verified generator serves even if other versions are wanted by then. So every pull that succeeds serves waiting
  requests, however fast versions follow each other; `min_version` protects requests that need a newer one.

Pure: no asyncio, no clock. The caller waits for idleness, pulls, and says what came of it:

    want([v]) ─▶ begin(): [g0] ─▶ (wait until g0 is idle) ─▶ pulling(g0) = v ─▶ verified(g0, v) | failed(g0, …)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal

from titan_rl.routing.dispatcher import Dispatcher
from titan_rl.routing.health import Fleet, GeneratorHealth, GeneratorState, Phase
from titan_rl.types import PolicyVersion

SyncMode = Literal["drain", "hot_swap"]

_NEVER = PolicyVersion(-1, 0)


class VersionPlan:
    """Of one fleet."""

    def __init__(self, fleet: Fleet, *, mode: SyncMode = "drain", max_syncing: int = 0, retries: int = 1) -> None:
        self._fleet = fleet
        self._mode = mode
        self._max_syncing = max_syncing
        self._retries = retries
        self.wanted: list[PolicyVersion] = []
        """Versions that are to be served, oldest first. Empty before the first: nobody changes anything."""
        self.served: set[PolicyVersion] = set()
        """Those that were served since they are wanted: nobody waits for them any more."""
        self._demanded: set[PolicyVersion] = set()

    def want(self, versions: Iterable[PolicyVersion]) -> None:
        """These are to be served, and no others. Generators that failed get new attempts."""
        self.wanted = sorted({*versions})
        self.served &= {*self.wanted}
        for health in self._fleet:
            if health.pulls not in self.wanted:
                health.failures = 0

    def begin(self, dispatcher: Dispatcher) -> list[str]:
        """Generators whose change of weights begins now. Each ends with `verified`, `failed` or its death.

        If only some may close at once, those with the oldest version go first, and of equals those with the least load:
        an idle generator is back at once, while a busy one occupies a place for a whole drain.
        """
        started: list[str] = []
        if not self.wanted:
            return started
        self._demanded = dispatcher.demanded(self.wanted)
        providers = self._providers()
        for health in sorted(self._fleet, key=lambda health: (health.version or _NEVER, dispatcher.load(health.name))):
            goal = self._goal(health, providers, idle=not dispatcher.load(health.name))
            if goal is None:
                continue
            serves = health.phase is Phase.SERVING
            exact = health.version in self.wanted or dispatcher.runs_exact(health.name)
            drains = serves and (self._mode == "drain" or exact)
            if drains and 0 < self._max_syncing <= sum(each.phase is Phase.DRAINING for each in self._fleet):
                continue
            providers[_provides(health)] -= 1
            health.sync(goal, swap=serves and not drains)
            providers[goal] += 1
            started.append(health.name)
        return started

    def pulling(self, name: str) -> PolicyVersion:
        """The pull itself begins now. Returns the version to pull."""
        health = self._fleet[name]
        health.pulls = self._best(health, self._providers())
        return health.pulls

    def verified(self, name: str, version: PolicyVersion) -> None:
        """The pull succeeded, and the generator serves."""
        self._fleet[name].verified(version)
        self.served.add(version)

    def failed(self, name: str, reason: str) -> None:
        """The pull ended without verified weights; the generator serves nothing."""
        health = self._fleet[name]
        health.failures += health.pulls in self.wanted  # a failed pull of an overtaken version does not count
        health.failed(reason)

    def is_served(self, version: PolicyVersion) -> bool:
        return any(health.state is GeneratorState.SERVING and health.version == version for health in self._fleet)

    def is_lost(self, version: PolicyVersion) -> bool:
        """Whether nobody serves the version, and nobody will: every generator is given up, asleep, a spare, or has
        failed to pull too often."""
        return not self.is_served(version) and not any(
            health.failures <= self._retries and health.phase not in (Phase.GIVEN_UP, Phase.ASLEEP, Phase.SPARE)
            for health in self._fleet
        )

    @property
    def unavailable(self) -> PolicyVersion | None:
        """A wanted version that was served, and that no generator can load again: its publication is damaged."""
        if all(health.failures <= self._retries for health in self._fleet):
            return None
        return next((version for version in self.wanted if version in self.served and self.is_lost(version)), None)

    def is_coming(self, name: str) -> bool:
        """Whether the generator changes its weights, or will as soon as it may. A late one does not count."""
        return self._coming(self._fleet[name], self._providers()) is not None

    def settled(self, version: PolicyVersion) -> bool:
        """Whether no generator is on its way to the version, and one serves it or it is lost. While nobody serves it,
        late generators and replacements of dead ones are waited for too."""
        providers = self._providers()
        if any(self._coming(health, providers) == version for health in self._fleet):
            return False
        return self.is_served(version) or self.is_lost(version)

    # How.

    def _coming(self, health: GeneratorHealth, providers: Mapping[PolicyVersion | None, int]) -> PolicyVersion | None:
        """The version to which the generator is on its way."""
        if health.is_syncing:
            return None if health.phase is Phase.LATE else health.pulls
        return self._goal(health, providers)

    def _goal(
        self, health: GeneratorHealth, providers: Mapping[PolicyVersion | None, int], *, idle: bool = False
    ) -> PolicyVersion | None:
        """The version for which the generator should begin a change of weights; None: it stays as it is."""
        if not self.wanted or health.is_syncing or health.failures > self._retries:
            return None
        if health.phase in (Phase.RECOVERING, Phase.STALE):
            return self._best(health, providers)
        if health.phase is not Phase.SERVING:
            return None
        missing = [version for version in self._missing(health, providers) if version != health.version]
        best = missing[0] if missing else self.wanted[-1]
        if best == health.version:
            return None
        others = [each for each in self._fleet if each is not health]
        if health.version not in self.wanted or any(
            each.phase is Phase.SERVING and each.version == health.version for each in others
        ):
            return best
        alone = not any(each.is_syncing or each.phase in (Phase.RECOVERING, Phase.DEAD) for each in others)
        return best if idle and missing and best in self._demanded and alone else None

    def _best(self, health: GeneratorHealth, providers: Mapping[PolicyVersion | None, int]) -> PolicyVersion:
        """What a change of weights of this generator should bring."""
        return next(iter(self._missing(health, providers)), self.wanted[-1])

    def _missing(self, health: GeneratorHealth, providers: Mapping[PolicyVersion | None, int]) -> list[PolicyVersion]:
        """Wanted versions that no other generator serves or is about to, demanded ones first."""
        own = _provides(health)
        missing = [version for version in self.wanted if providers[version] == (version == own)]
        return sorted(missing, key=lambda version: version not in self._demanded)

    def _providers(self) -> Counter[PolicyVersion | None]:
        """Version → generators that serve it, or are about to."""
        return Counter(map(_provides, self._fleet))


def _provides(health: GeneratorHealth) -> PolicyVersion | None:
    if health.phase is Phase.SERVING:
        return health.version
    return None if health.phase is Phase.LATE else health.pulls
