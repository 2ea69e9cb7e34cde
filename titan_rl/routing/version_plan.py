"""Which versions a fleet is to serve, and which generator takes which of them when.

Usually one version is wanted: the newest. Older ones are wanted beside it while an evaluation, or the groups of a
deterministic run, ask for exactly them. Of each older wanted version one generator stays; all others take the newest.

- A generator gives up a wanted version in two cases: another generator serves it; or it is idle, requests for another
  version wait, and no other generator will serve them. Without the second case a run can deadlock: the waiting requests
  may hold what the groups of its own version need, such as places of programs.
- A version that nobody serves or is about to serve comes first: one that waiting requests need, else the oldest.
- At most `max_syncing` serving generators drain at once (0: any number). Those that serve nothing anyway start at once.
- With `hot_swap` a generator serves while it pulls, unless requests may ask for exactly its version: then it drains.
- What a generator takes is decided again when its pull begins. A failed pull is tried again `pull_retries` times.
- A verified generator serves even if other versions are wanted by then. So every pull that succeeds serves waiting
  requests, however fast versions follow each other; `min_version` protects requests that need a newer one.

Pure: no asyncio, no clock. The caller waits for idleness, pulls, and says what came of it:

    want([v]) ─▶ begin(): [g0] ─▶ (wait until g0 is idle) ─▶ pulling(g0) = v ─▶ verified(g0, v) | failed(g0, …)
"""

from collections import Counter
from collections.abc import Iterable

from titan_rl.routing.config import RouterConfig
from titan_rl.routing.dispatcher import Dispatcher
from titan_rl.routing.health import Fleet, Kind, Phase
from titan_rl.types import PolicyVersion

_NEVER = PolicyVersion(-1, 0)


class VersionPlan:
    def __init__(self, fleet: Fleet, config: RouterConfig) -> None:
        self._fleet = fleet
        self._config = config
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
            if health.kind.pulls not in self.wanted:
                health.forgive()

    def begin(self, dispatcher: Dispatcher) -> list[str]:
        """Generators whose change of weights begins now. Each ends with `verified`, `failed` or its death.

        If only some may close at once, those with the oldest version go first, and of equals those with the least load:
        an idle generator is back at once, while a busy one occupies a place for a whole drain.
        """
        started: list[str] = []
        self._demanded = dispatcher.demanded(self.wanted)
        if not self._may_begin():
            return started
        for health in sorted(self._fleet, key=lambda health: (health.version or _NEVER, dispatcher.load(health.name))):
            goal = self._goal(health.kind, idle=not dispatcher.load(health.name))
            if goal is None:
                continue
            serves = health.phase is Phase.SERVING
            drains = serves and (self._drains(health.kind) or dispatcher.runs_exact(health.name))
            if drains and self._is_draining_enough:
                continue
            health.sync(goal, swap=serves and not drains)
            started.append(health.name)
            if not self._may_begin():
                break
        return started

    def pulling(self, name: str) -> PolicyVersion:
        """The pull itself begins now. Returns the version to pull."""
        health = self._fleet[name]
        best = self._best(health.kind)
        health.pulls_instead(best)
        return best

    def verified(self, name: str, version: PolicyVersion) -> None:
        self._fleet[name].verified(version)
        self.served.add(version)

    def failed(self, name: str, reason: str) -> None:
        health = self._fleet[name]
        health.failed(reason, counts=health.kind.pulls in self.wanted)  # not a pull of an overtaken version

    def is_lost(self, version: PolicyVersion) -> bool:
        """Whether nobody serves it, nor will: all are given up, asleep, spares, or have failed to pull too often."""
        able = (kind for kind in self._fleet.kinds if kind.failures <= self._config.pull_retries)
        idle = (Phase.GIVEN_UP, Phase.ASLEEP, Phase.SPARE)
        return version not in self._fleet.served and all(kind.phase in idle for kind in able)

    @property
    def unavailable(self) -> PolicyVersion | None:
        """A wanted version that was served, and that no generator can load again: its publication is damaged."""
        if all(kind.failures <= self._config.pull_retries for kind in self._fleet.kinds):
            return None
        return next((version for version in self.wanted if version in self.served and self.is_lost(version)), None)

    def is_coming(self, name: str) -> bool:
        """Whether the generator changes its weights, or will as soon as it may. A late one does not count."""
        return self._coming(self._fleet[name].kind) is not None

    def counted(self, version: PolicyVersion) -> PolicyVersion:
        """The version itself, or, if it is not wanted any more, the newest that is."""
        return version if version in self.wanted or not self.wanted else self.wanted[-1]

    def settled(self, version: PolicyVersion) -> bool:
        """Whether no generator is on its way to the version that counts for this one, and one serves it or it is lost.
        While nobody serves it, late generators and replacements of dead ones are waited for too."""
        version = self.counted(version)
        if any(self._coming(kind) == version for kind in self._fleet.kinds):
            return False
        return version in self._fleet.served or self.is_lost(version)

    # How: by kind, so that no decision about one generator looks at all of them.

    def _may_begin(self) -> bool:
        """Whether a generator of some kind may begin a change of weights now."""
        willing = (kind for kind in self._fleet.kinds if self._goal(kind, idle=True) is not None)
        full = self._is_draining_enough
        return any(not (full and kind.phase is Phase.SERVING and self._drains(kind)) for kind in willing)

    def _drains(self, kind: Kind) -> bool:
        """Whether those of this kind that serve drain in any case."""
        return self._config.weight_sync == "drain" or kind.version in self.wanted

    @property
    def _is_draining_enough(self) -> bool:
        return 0 < self._config.max_syncing <= self._fleet.count(Phase.DRAINING)

    def _coming(self, kind: Kind) -> PolicyVersion | None:
        """The version to which a generator is on its way."""
        if kind.is_syncing:
            return None if kind.phase is Phase.LATE else kind.pulls
        return self._goal(kind)

    def _goal(self, kind: Kind, *, idle: bool = False) -> PolicyVersion | None:
        """The version for which a generator should begin a change of weights; None: it stays as it is."""
        if not self.wanted or kind.is_syncing or kind.failures > self._config.pull_retries:
            return None
        if kind.phase in (Phase.RECOVERING, Phase.STALE):
            return self._best(kind)
        if kind.phase is not Phase.SERVING:
            return None
        missing = [version for version in self._missing(kind) if version != kind.version]
        best = missing[0] if missing else self.wanted[-1]
        if best == kind.version:
            return None
        kinds = self._fleet.kinds
        same = sum(kinds[other] for other in kinds if other.phase is Phase.SERVING and other.version == kind.version)
        if kind.version not in self.wanted or same > 1:
            return best
        alone = not any(other.is_syncing or other.phase in (Phase.RECOVERING, Phase.DEAD) for other in kinds)
        return best if idle and missing and best in self._demanded and alone else None

    def _best(self, kind: Kind) -> PolicyVersion:
        """What a change of weights of a generator should bring."""
        return next(iter(self._missing(kind)), self.wanted[-1])

    def _missing(self, kind: Kind) -> list[PolicyVersion]:
        """Wanted versions that no other generator serves or is about to, demanded ones first."""
        own = _provides(kind)
        providers: Counter[PolicyVersion | None] = Counter()
        for other, count in self._fleet.kinds.items():
            providers[_provides(other)] += count
        missing = [version for version in self.wanted if providers[version] == (version == own)]
        return sorted(missing, key=lambda version: version not in self._demanded)


def _provides(kind: Kind) -> PolicyVersion | None:
    """The version that a generator serves, or is about to."""
    if kind.phase is Phase.SERVING:
        return kind.version
    return None if kind.phase is Phase.LATE else kind.pulls
