"""The generators of one router: the state of each, by one table of transitions, and who is there, spare or to come.

    RECOVERING ─▶ PULLING ─ verified ─▶ SERVING ─▶ DRAINING or SWAPPING ─ verified ─▶ SERVING
                     ▲                                   any of the three ─ late ─▶ LATE ─ verified ─▶ SERVING
                     └───────────── STALE ◀───────────── any of the four ─ failed
    SERVING, STALE, RECOVERING ─ sleep ─▶ ASLEEP ─ wake ─▶ RECOVERING
    SPARE ─ another died ─▶ RECOVERING         any ─▶ DEAD ─▶ GIVEN_UP

Always true, after every method:

- only a verified pull leads to SERVING. Nothing leads out of GIVEN_UP, and out of DEAD only that;
- a generator whose process has ended is dead until a replacement joins under its name. That starts from nothing;
- at most `serving` generators are in service. The rest are spares: when a generator dies, one takes its place at once;
- the fleet is given up only when every generator is: before that a replacement comes.

Pure.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from titan_rl.errors import GeneratorNotServing
from titan_rl.routing.strategies import RoutingStrategy
from titan_rl.types import PolicyVersion


class Phase(StrEnum):
    """Where a generator is, as a run reports it."""

    RECOVERING = "recovering"
    """Up, without weights, and about to pull them: new, a replacement, or just woken."""
    SERVING = "serving"
    """Holds verified weights and takes requests."""
    DRAINING = "draining"
    """It served, takes no new requests, and pulls once it is idle."""
    PULLING = "pulling"
    """It pulls, and did not serve before."""
    SWAPPING = "swapping"
    """It pulls between two steps and serves meanwhile, but no request for an exact version."""
    LATE = "late"
    """Its change of weights goes on after the time limit; it serves nothing, and nobody waits for it."""
    STALE = "stale"
    """Its last pull failed; serves nothing until a later one is verified."""
    ASLEEP = "asleep"
    """Put to sleep; stays so until it is woken."""
    SPARE = "spare"
    """Built and without weights, for the place of a generator that dies."""
    DEAD = "dead"
    """A replacement under its name is to come."""
    GIVEN_UP = "given up"
    """Dead, and nothing will replace it."""

    @property
    def serves(self) -> bool:
        return self is Phase.SERVING or self is Phase.SWAPPING


GONE = {Phase.DEAD, Phase.GIVEN_UP}

TRANSITIONS: dict[Phase, set[Phase]] = {
    Phase.RECOVERING: {Phase.PULLING, Phase.ASLEEP, *GONE},
    Phase.SERVING: {Phase.DRAINING, Phase.SWAPPING, Phase.ASLEEP, *GONE},
    Phase.DRAINING: {Phase.SERVING, Phase.STALE, Phase.LATE, *GONE},
    Phase.PULLING: {Phase.SERVING, Phase.STALE, Phase.LATE, *GONE},
    Phase.SWAPPING: {Phase.SERVING, Phase.STALE, Phase.LATE, *GONE},
    Phase.LATE: {Phase.SERVING, Phase.STALE, *GONE},
    Phase.STALE: {Phase.PULLING, Phase.ASLEEP, *GONE},
    Phase.ASLEEP: {Phase.RECOVERING, *GONE},
    Phase.SPARE: {Phase.RECOVERING, *GONE},
    Phase.DEAD: {Phase.GIVEN_UP},
    Phase.GIVEN_UP: set(),
}


class Kind(NamedTuple):
    """What decides over a generator's next change of weights. Generators of one kind are alike to the version plan, so
    that it looks at kinds, which are a few, and not at every generator."""

    phase: Phase = Phase.RECOVERING
    version: PolicyVersion | None = None
    """Last verified version; None before the first."""
    pulls: PolicyVersion | None = None
    """The version that the running change of weights brings; None: none is running."""
    failures: int = 0
    """Failed pulls of wanted versions since the last success, or since the wanted versions changed."""

    @property
    def is_syncing(self) -> bool:
        """Whether a change of weights is running, late or not."""
        return self.pulls is not None


@dataclass(slots=True)
class GeneratorHealth:
    """The state machine of one generator. A method that the table does not allow raises ValueError."""

    name: str
    strategy: RoutingStrategy = field(repr=False, compare=False)
    """Hears when it may serve."""
    kind: Kind = Kind()
    must_wake: bool = False
    """It gave up its memory in sleep, so it takes weights only by a wake-up."""
    reason: str = ""
    """Why it is stale or dead."""
    kinds: Counter[Kind] = field(default_factory=Counter, repr=False, compare=False)
    """How many there are of each kind in its fleet."""

    def __post_init__(self) -> None:
        self.kinds[self.kind] += 1

    @property
    def phase(self) -> Phase:
        return self.kind.phase

    @property
    def version(self) -> PolicyVersion | None:
        return self.kind.version

    def sync(self, version: PolicyVersion, *, swap: bool = False) -> None:
        """A change of weights begins. `swap`: the generator goes on serving meanwhile."""
        closed = Phase.DRAINING if self.phase is Phase.SERVING else Phase.PULLING
        self._move(Phase.SWAPPING if swap else closed, pulls=version)

    def pulls_instead(self, version: PolicyVersion) -> None:
        """The change of weights that is running brings this version."""
        self._become(pulls=version)

    def verified(self, version: PolicyVersion) -> None:
        """The pull succeeded, and the generator serves."""
        self._move(Phase.SERVING, version=version, pulls=None, failures=0)
        self.must_wake = False

    def failed(self, reason: str, *, counts: bool = True) -> None:
        """The pull ended without verified weights; the generator serves nothing."""
        self._move(Phase.STALE, reason, pulls=None, failures=self.kind.failures + counts)

    def forgive(self) -> None:
        """Failed pulls do not count any more."""
        if self.kind.failures:
            self._become(failures=0)

    def late(self, reason: str) -> None:
        """The change of weights exceeds its time limit and goes on. Does nothing if it has ended."""
        if self.kind.is_syncing and self.phase is not Phase.LATE:
            self._move(Phase.LATE, reason)

    def sleep(self) -> None:
        """It takes no requests any more. Raises GeneratorNotServing: it changes its weights, sleeps, or is dead."""
        if Phase.ASLEEP not in TRANSITIONS[self.phase]:
            doing = "in a change of weights" if self.kind.is_syncing else self.phase
            raise GeneratorNotServing(f"{self.name} cannot be put to sleep: it is {doing}")
        self._move(Phase.ASLEEP)
        self.must_wake = True

    def wake(self) -> None:
        """It comes back through a verified pull. Raises GeneratorNotServing: it is not asleep, or a spare."""
        if self.phase is not Phase.ASLEEP:
            raise GeneratorNotServing(f"{self.name} cannot be woken: it is {self.phase}")
        self._move(Phase.RECOVERING, failures=0)

    def join_service(self) -> None:
        """A spare takes the place of a generator that died."""
        self._move(Phase.RECOVERING)

    def died(self, reason: str) -> None:
        """Idempotent: the first reason is kept."""
        if self.phase not in GONE:
            self._move(Phase.DEAD, reason, pulls=None)

    def give_up(self, reason: str) -> None:
        """It is dead, and nothing will replace it."""
        if self.phase is not Phase.GIVEN_UP:
            self._move(Phase.GIVEN_UP, reason, pulls=None)

    def leave(self) -> None:
        """Its fleet has another generator of its name."""
        self.kinds[self.kind] -= 1
        if not self.kinds[self.kind]:
            del self.kinds[self.kind]

    def _become(self, **changes: Any) -> None:
        self.leave()
        self.kind = self.kind._replace(**changes)
        self.kinds[self.kind] += 1

    def _move(self, phase: Phase, reason: str = "", **changes: Any) -> None:
        if phase not in TRANSITIONS[self.phase]:
            raise ValueError(f"generator {self.name} cannot go from {self.phase} to {phase}")
        self._become(phase=phase, **changes)
        self.reason = reason
        if phase is Phase.SERVING:
            assert self.version is not None
            self.strategy.serves(self.name, self.version)
        elif phase is not Phase.SWAPPING:
            self.strategy.pauses(self.name)


class Fleet:
    """Generators by name."""

    def __init__(self, strategy: RoutingStrategy, *, serving: int | None = None) -> None:
        """`serving`: generators in service; further ones wait as spares. None: all are in service."""
        self._strategy = strategy
        self._serving = serving
        self._generators: dict[str, GeneratorHealth] = {}
        self.kinds: Counter[Kind] = Counter()
        """How many generators there are of each kind."""

    def __getitem__(self, name: str) -> GeneratorHealth:
        return self._generators[name]

    def __iter__(self) -> Iterator[GeneratorHealth]:
        return iter(self._generators.values())

    @property
    def is_given_up(self) -> bool:
        """Whether no generator lives or is to be replaced."""
        return bool(self.kinds) and all(kind.phase is Phase.GIVEN_UP for kind in self.kinds)

    @property
    def served(self) -> set[PolicyVersion]:
        """Versions that requests may be served with now."""
        return {kind.version for kind in self.kinds if kind.phase.serves and kind.version is not None}

    def count(self, *phases: Phase) -> int:
        """Generators in these phases."""
        return sum(count for kind, count in self.kinds.items() if kind.phase in phases)

    def describe(self) -> str:
        """Every generator's state, or why it is stale or dead."""
        return "; ".join(f"{health.name}: {health.reason or health.phase}" for health in self)

    def join(self, name: str) -> None:
        """A generator is up: a new one, or the replacement of a dead one. Raises ValueError: that of its name lives."""
        if name in self._generators and self[name].phase not in GONE:
            raise ValueError(f"generator {name} is already in the fleet")
        self._put(name, Phase.SPARE if self._is_full else Phase.RECOVERING)

    def expect(self, name: str) -> None:
        """A generator that is dead, or not up yet, will join: nothing that it could serve is given up before."""
        self._put(name, Phase.DEAD, "it is being replaced")

    def died(self, name: str, reason: str) -> None:
        """The generator is dead. Idempotent."""
        self[name].died(reason)
        self._wake_spares()

    def give_up(self, name: str, reason: str) -> None:
        """The generator is dead and will not be replaced. It may be unknown: dead before this router was there."""
        if name not in self._generators:
            self.expect(name)
        self[name].give_up(reason)
        self._wake_spares()

    def resize(self, serving: int) -> None:
        """So many generators are to be in service from now on. If there are more, they go on until one of them dies."""
        self._serving = serving
        self._wake_spares()

    def _put(self, name: str, phase: Phase, reason: str = "") -> None:
        if name in self._generators:
            self[name].leave()
        self._generators[name] = GeneratorHealth(name, self._strategy, Kind(phase), reason=reason, kinds=self.kinds)

    def _wake_spares(self) -> None:
        for health in self:
            if health.phase is Phase.SPARE and not self._is_full:
                health.join_service()

    @property
    def _is_full(self) -> bool:
        in_service = len(self._generators) - self.count(Phase.SPARE, *GONE)
        return self._serving is not None and in_service >= self._serving


@dataclass(slots=True)
class GeneratorStatus:
    """One generator as the router sees it; plain numbers and words."""

    name: str
    state: Phase = Phase.RECOVERING
    version: str = "none"
    load: int = 0
    """Estimated tokens in flight."""
    in_flight: int = 0
    """Requests that it runs or is about to run."""
    served: int = 0
    """Completions handed to callers whose last part this generator sampled."""
    failed: int = 0
    """Attempts that ended in an error."""
    aborted: int = 0
    """Answers that it was sampling when their callers gave them up."""
    aborted_tokens: int = 0
    """Tokens of these answers."""
    last_error: str = ""
    """Why it is stale or dead."""
