"""Which generator gets the next request.

A strategy is told which generator serves which version and each generator's load, and answers `choose`. It never names
a generator whose version the request does not allow. A choice costs the logarithm of the number of generators.

No generator starves: `RoundRobin` chooses a serving generator within n choices of n candidates. `LeastLoaded` chooses
it once no other has less load, and among equals within n choices. A generator that comes back from a pause keeps its
turn, because it has waited longest.

Your own strategy is a class with these methods in any file, named in the config as `file.py:Class`.
"""

import heapq
from collections import OrderedDict
from typing import Protocol

from titan_rl.errors import ConfigError
from titan_rl.importing import import_name
from titan_rl.routing.config import RouterConfig
from titan_rl.types import GenerationRequest, PolicyVersion

SHORT_NAMES = {
    "round_robin": "titan_rl.routing.strategies:RoundRobin",
    "least_loaded": "titan_rl.routing.strategies:LeastLoaded",
    "sticky_session": "titan_rl.routing.strategies:StickySession",
}
"""Values of `router.strategy`, beside `pkg.mod:Class` and `file.py:Class`."""

MOST_SESSIONS = 100_000
"""About 20 MB."""


class RoutingStrategy(Protocol):
    """Chooses generators. Pure. If `choose` raises, its request fails. Nothing else may raise."""

    def serves(self, name: str, version: PolicyVersion) -> None:
        """The generator takes requests now, at this version (new to the strategy, back, or at another version)."""

    def pauses(self, name: str) -> None:
        """It takes no requests from now on, and may be back or not."""

    def choose(self, request: GenerationRequest) -> str | None:
        """The generator for the request; None: ask again when the fleet changes."""

    def assigned(self, request: GenerationRequest, name: str, load: int) -> None:
        """The request is live on a generator, whose estimated load is now `load` tokens."""
        return

    def released(self, request: GenerationRequest, name: str, load: int) -> None:
        """The request is no longer live on the generator, whose estimated load is now `load`."""
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

    def choose(self, request: GenerationRequest) -> str | None:
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


class StickySession(LeastLoaded):
    """Keeps a session on its generator, even under load, so that its prefix cache is used.

    While that one does not serve what is asked for, `LeastLoaded` chooses another one, where the session then stays: it
    is gone, or it takes new weights, which empties its cache. `LeastLoaded` also chooses for requests without a
    session. Nobody says when a session ends: of more than `MOST_SESSIONS` the least recently used one is forgotten.
    """

    def __init__(self) -> None:
        super().__init__()
        self._homes: OrderedDict[str, str] = OrderedDict()  # session → generator, least recently used first

    def choose(self, request: GenerationRequest) -> str | None:
        home = None if request.session_id is None else self.generator_of(request.session_id)
        version = None if home is None else self.serving.get(home)
        return home if version is not None and request.allows(version) else super().choose(request)

    def assigned(self, request: GenerationRequest, name: str, load: int) -> None:
        super().assigned(request, name, load)
        if request.session_id is not None:
            self._homes[request.session_id] = name
            self._homes.move_to_end(request.session_id)
            if len(self._homes) > MOST_SESSIONS:
                self._homes.popitem(last=False)

    def generator_of(self, session_id: str) -> str | None:
        """The session's generator, None if it has none."""
        return self._homes.get(session_id)


def build_strategy(config: RouterConfig) -> RoutingStrategy:
    """The strategy that `router.strategy` names, whose arguments `run.checks` has compared with it. Raises ConfigError:
    the name is none, or the class lacks a method."""
    strategy = import_name(config.strategy, SHORT_NAMES)
    methods = (name for name in dir(RoutingStrategy) if not name.startswith("_"))
    if missing := [name for name in methods if not callable(getattr(strategy, name, None))]:
        raise ConfigError(f"router.strategy: {config.strategy!r} lacks {', '.join(missing)}")
    return strategy(**config.strategy_kwargs)
