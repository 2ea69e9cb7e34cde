"""Which generator gets the next request.

A strategy is told which generator serves which version (`ServingListener`) and each generator's load, and answers
`choose`. It never names a generator whose version the request does not allow. A choice costs the logarithm of the
number of generators.

No generator starves: `RoundRobin` chooses a serving generator within n choices of n candidates. `LeastLoaded` chooses
it once no other has less load, and among equals within n choices. A generator that comes back from a pause keeps its
turn, because it has waited longest.

Your own strategy is a class with these methods in any file, named in the config as `file.py:Class`.
"""

import heapq
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

from titan_rl.bounds import Count, NotNegative
from titan_rl.errors import ConfigError
from titan_rl.importing import import_name
from titan_rl.routing.config import RouterConfig
from titan_rl.routing.health import ServingListener
from titan_rl.types import GenerationRequest, PolicyVersion

SHORT_NAMES = {
    "round_robin": "titan_rl.routing.strategies:RoundRobin",
    "least_loaded": "titan_rl.routing.strategies:LeastLoaded",
    "sticky_session": "titan_rl.routing.strategies:StickySession",
}
"""Values of `router.strategy`, beside `pkg.mod:Class` and `file.py:Class`."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Do not assign this request before `until` (seconds of the caller's clock), unless something changes."""

    until: float


class RoutingStrategy(ServingListener, Protocol):
    """Chooses generators. Pure: time is handed in. If `choose` raises, its request fails. Nothing else may raise."""

    def choose(self, request: GenerationRequest, *, now: float, waiting_since: float) -> str | Wait | None:
        """The generator for the request, or the latest time to ask again; None: ask again when the fleet changes.

        Args:
            now: the caller's clock, in seconds.
            waiting_since: when the request began to wait; `now` if it has not waited.
        """

    def assigned(self, request: GenerationRequest, name: str, load: int) -> None:
        """The request is live on a generator, whose estimated load is now `load` tokens."""
        return

    def released(self, request: GenerationRequest, name: str, load: int) -> None:
        """The request is no longer live on the generator, whose estimated load is now `load`."""
        return

    def end_session(self, session_id: str) -> None:
        """The conversation is over."""
        return


_Key = tuple[int, int, str]
"""Load, time of last choice, name of a generator."""


class _Ordered(RoutingStrategy):
    """Chooses, among generators whose version is allowed, the one with the smallest key.

    The generators of a version are in a heap, with every key that they had. Keys of before are dropped at the top, or
    when they are the most.
    """

    def __init__(self) -> None:
        self._clock = 0
        self.serving: dict[str, PolicyVersion] = {}
        """Version of every generator that takes requests now."""
        self._keys: dict[str, _Key] = {}
        self._heaps: dict[PolicyVersion, list[_Key]] = {}

    def serves(self, name: str, version: PolicyVersion) -> None:
        if self.serving.get(name) != version:
            self.pauses(name)
            self.serving[name] = version
            self._push(self._key(name))

    def pauses(self, name: str) -> None:
        version = self.serving.pop(name, None)
        if version is not None and version not in self.serving.values():
            del self._heaps[version]

    leaves = pauses

    def choose(self, request: GenerationRequest, *, now: float, waiting_since: float) -> str | Wait | None:
        allowed = [version for version in self._heaps if request.allows(version)]
        if not allowed:
            return None
        load, _, name = min(map(self._first, allowed))
        self._clock += 1
        self._push((load, self._clock, name))
        return name

    def _first(self, version: PolicyVersion) -> _Key:
        heap = self._heaps[version]
        while not self._holds(heap[0], version):
            heapq.heappop(heap)
        return heap[0]

    def _holds(self, key: _Key, version: PolicyVersion) -> bool:
        """Whether a key in the heap of this version is still its generator's."""
        return self._keys[key[2]] == key and self.serving.get(key[2]) == version

    def _key(self, name: str) -> _Key:
        return self._keys.get(name, (0, 0, name))

    def _push(self, key: _Key) -> None:
        """The key of a generator is another one now, or it serves."""
        self._keys[key[2]] = key
        if (version := self.serving.get(key[2])) is None:
            return
        heap = self._heaps.setdefault(version, [])
        heapq.heappush(heap, key)
        if len(heap) > 4 * len(self.serving) + 16:
            heap[:] = {each for each in heap if self._holds(each, version)}
            heapq.heapify(heap)


class RoundRobin(_Ordered):
    """Chooses the generator that was chosen longest ago: all get as many requests, also those that are slower."""


class LeastLoaded(_Ordered):
    """Chooses the generator with the least estimated work; among equals the one that was chosen longest ago."""

    def assigned(self, request: GenerationRequest, name: str, load: int) -> None:
        self._push((load, self._key(name)[1], name))

    released = assigned


class StickySession:
    """Keeps a session on its generator, even under load, so that its prefix cache is used.

    If the generator pauses (a pull), the session's requests wait for it, at most `sync_wait_seconds`. If it leaves, or
    the wait is over, `LeastLoaded` chooses a new generator, where the session then stays. At most `max_sessions`
    sessions without live requests are remembered; the least recently used is dropped first. A session with live
    requests is never dropped. `LeastLoaded` also chooses for requests without a session.

    Args:
        max_sessions: sessions without live requests to remember.
        sync_wait_seconds: how long a request waits for its session's generator to come back; 0: not at all.
    """

    def __init__(self, *, max_sessions: Count = 100_000, sync_wait_seconds: NotNegative = 5.0) -> None:
        self._max_sessions = max_sessions
        self._sync_wait_seconds = sync_wait_seconds
        self._fallback = LeastLoaded()
        self._paused: set[str] = set()
        self._live: dict[str, _Session] = {}
        self._idle: OrderedDict[str, str] = OrderedDict()  # session → generator, least recently used first

    def serves(self, name: str, version: PolicyVersion) -> None:
        self._paused.discard(name)
        self._fallback.serves(name, version)

    def pauses(self, name: str) -> None:
        # otherwise it is stale, and its sessions need not wait for a retry
        if name in self._fallback.serving:
            self._paused.add(name)
        self._fallback.pauses(name)

    def leaves(self, name: str) -> None:
        self._paused.discard(name)
        self._fallback.leaves(name)

    def choose(self, request: GenerationRequest, *, now: float, waiting_since: float) -> str | Wait | None:
        home = None if request.session_id is None else self.generator_of(request.session_id)
        if home is not None:
            version = self._fallback.serving.get(home)
            if version is not None and request.allows(version):
                return home
            deadline = waiting_since + self._sync_wait_seconds
            coming_back = request.exact_version is None and (version is not None or home in self._paused)
            if coming_back and now < deadline:
                return Wait(deadline)  # it is syncing, or will be: it does not serve the requested version yet
        return self._fallback.choose(request, now=now, waiting_since=waiting_since)

    def assigned(self, request: GenerationRequest, name: str, load: int) -> None:
        self._fallback.assigned(request, name, load)
        session = request.session_id
        if session is None:
            return
        self._idle.pop(session, None)
        live = self._live.setdefault(session, _Session(name))
        live.generator = name
        live.requests += 1

    def released(self, request: GenerationRequest, name: str, load: int) -> None:
        self._fallback.released(request, name, load)
        session = request.session_id
        if session is None or session not in self._live:
            return
        live = self._live[session]
        live.requests -= 1
        if live.requests == 0:
            del self._live[session]
            if not live.ended:
                self._idle[session] = live.generator
                while len(self._idle) > self._max_sessions:
                    self._idle.popitem(last=False)

    def end_session(self, session_id: str) -> None:
        self._idle.pop(session_id, None)
        if session_id in self._live:
            self._live[session_id].ended = True

    def generator_of(self, session_id: str) -> str | None:
        """The session's generator, None if it has none."""
        live = self._live.get(session_id)
        return live.generator if live is not None else self._idle.get(session_id)


@dataclass(slots=True)
class _Session:
    generator: str
    requests: int = 0
    ended: bool = False
    """Whether to forget the session when its last live request ends."""


def build_strategy(config: RouterConfig) -> RoutingStrategy:
    """The strategy that `router.strategy` names, whose arguments `run.checks` has compared with it. Raises ConfigError:
    the name is none, or the class lacks a method."""
    strategy = import_name(config.strategy, SHORT_NAMES)
    methods = (name for name in dir(RoutingStrategy) if not name.startswith("_"))
    if missing := [name for name in methods if not callable(getattr(strategy, name, None))]:
        raise ConfigError(f"router.strategy: {config.strategy!r} lacks {', '.join(missing)}")
    return strategy(**config.strategy_kwargs)
