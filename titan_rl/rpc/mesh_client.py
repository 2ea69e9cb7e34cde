"""`MeshClient`: a mesh of actors, and those that replace it, as one object. All clients of meshes have this form.

    replace(actors) ──▶ setup(**peers) ──▶ calls · set_peers(**peers) · pulse · watch ──▶ close
           ▲                                            │
           └────────────── lose(reason) ◀───────────────┘

The client outlives its actors: it is made once, with or without them, and is handed to everybody who calls the mesh.
Between `lose` and the next `setup`, a call fails with `ActorGone`, or waits for the replacement if it may be made twice
(`retry_on_replacement`).
Which peers each mesh has, `supervision/mesh_kinds.py` says.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any, ParamSpec, TypeVar

from titan_rl.errors import ActorGone, CallTimeout
from titan_rl.metrics.timeline import Pulse
from titan_rl.rpc.connection import ConnectedActor, Connection, RemoteMethod

P = ParamSpec("P")
T = TypeVar("T")

LOOKS = 5
"""How often to look within the bound, at least. One look that comes late, because this process had no time, proves
nothing: it counts as so much of the bound."""


class MeshClient:
    """Belongs to one event loop."""

    actor_class: type[Any]
    """Runs in each process. `setup` and `set_peers` take the peers by name, unless the subclass calls others."""

    def __init__(
        self, name: str, actors: Sequence[Any] = (), *, start_seconds: float | None = None, is_replaced: bool = True
    ) -> None:
        """`name`: of the mesh. `actors`: handle of each rank; empty: `replace` brings them. `start_seconds`: bound on
        `setup`. `is_replaced`: somebody replaces the actors that are gone, or ends who waits for that."""
        self.name = name
        self.actor: Any = None
        """Handle of rank 0, for those who call the mesh."""
        self.ranks: list[Connection] = []
        self.has_worked: bool | None = None
        """Whether these actors have done their work once: if they die now, that is no failed start. None: it cannot be
        known, and the time that they were up decides."""
        self.files_left = ""
        """Channel of the shared memory that the last mesh left. Whoever has ended its processes removes the files."""
        self.pulses: list[Pulse] = []
        """What the ranks answered to the newest `pulse`; empty: nothing yet, or they are gone."""
        self.start_seconds = start_seconds
        self._is_replaced = is_replaced
        self._peers: dict[str, Any] = {}
        self._can_retry = asyncio.Event()
        if actors:
            self.replace(actors)

    def replace(self, actors: Sequence[Any]) -> None:
        """From now on these actors are called, one per rank. Open calls to the ones before fail."""
        self.has_worked, self.actor = None, actors[0]
        if self.ranks:
            for connection, actor in zip(self.ranks, actors, strict=True):
                connection.replace(actor)
        else:
            for rank, actor in enumerate(actors):
                what = f"{self.name}.{{}} of rank {rank}" if len(actors) > 1 else f"{self.name}.{{}}"
                self.ranks.append(Connection(actor, what=what, on_push=self._on_push, on_lost=self._on_lost))
        self._retry_now()

    def lose(self, reason: str) -> None:
        """The actors are gone or will be killed: open calls fail, and so do later ones until `replace`."""
        self.pulses = []
        for rank in self.ranks:
            rank.lose(reason)

    async def setup(self, **peers: Any) -> list[int]:
        """Set the actors up with the handles of those that they call; returns their process ids. The first rank that
        fails ends the wait, while the others still wait for it. Raises TitanError: a rank did not start."""
        self._peers = peers
        return await self._set_up(peers)

    async def set_peers(self, **peers: Any) -> None:
        """Let a mesh that is set up call these actors from now on; those that are not named stay as they are. Only what
        has changed is sent. A mesh that is gone gets nothing: its successor gets the peers in `setup`."""
        changed = {name: peer for name, peer in peers.items() if peer != self._peers.get(name)}
        self._peers |= changed
        if changed:
            with suppress(ActorGone):
                await self._send_peers(changed)

    async def pulse(self) -> list[Pulse]:
        """The progress of each rank. The caller sets the time limit."""
        self.pulses = await self.call_all(None, ConnectedActor.pulse)
        return self.pulses

    async def watch(self) -> None:
        """Return when there is nothing to watch but the processes and their pulse. Raises ActorFailed: the mesh failed
        while its processes live; ActorGone: a process is gone, or the link to it is lost."""
        await self.call_all(None, ConnectedActor.serve)

    async def close(self) -> None:
        """Let the actors end their work and free what outlives a process. The caller sets the time limit."""
        await self.call_all(None, ConnectedActor.close)

    async def call_all(
        self, seconds: float | None, endpoint: RemoteMethod[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """The answers of all ranks to the same call. The first rank that fails ends the wait."""
        return await asyncio.gather(*(rank.call(seconds, endpoint, *args, **kwargs) for rank in self.ranks))

    async def retry_on_replacement(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of `call()`, which may be made twice: if the actors are gone before it has one, it is called again
        once they are replaced. Raises ActorGone if nobody replaces them."""
        while True:
            can_retry = self._can_retry
            try:
                return await call()
            except ActorGone:
                if not self._is_replaced:
                    raise
                await can_retry.wait()

    def _retry_now(self) -> None:
        self._can_retry.set()
        self._can_retry = asyncio.Event()

    async def _set_up(self, peers: dict[str, Any]) -> list[int]:
        return await self.call_all(self.start_seconds, self.actor_class.setup, **peers)

    async def _send_peers(self, peers: dict[str, Any]) -> None:
        await self.call_all(None, self.actor_class.set_peers, **peers)

    def _on_push(self, item: Any) -> None:
        """Called with what an endpoint pushes; must not raise."""

    def _on_lost(self, reason: str) -> None:
        """Called when a rank is gone, or its connection is lost."""


async def until_still(pulse: Callable[[], Awaitable[list[Pulse]]], seconds: float, *, every: float = math.inf) -> None:
    """Return when one part has not moved for so long. `pulse`: of each part; raises if there is nothing to look at any
    more. `every`: seconds between two looks, if these are more than `LOOKS` looks within the bound."""
    most = seconds / LOOKS
    now: list[int] = []
    still, looked = [0.0], time.monotonic()  # of each part, for how long; parts do not move in the same second
    while max(still) < seconds - most:
        before = now
        with suppress(TimeoutError, CallTimeout):
            async with asyncio.timeout(most):
                now = [part.progress for part in await pulse()]
        since, looked = looked, time.monotonic()
        more = min(looked - since, most)
        still = [long + more if new == old else 0.0 for new, old, long in zip_longest(now, before, still)]
        if now is not before:
            await asyncio.sleep(min(every, most))
