"""Which published weights are still needed, and when the next may be published.

A publication lives while somebody holds it, or while it is the newest. At most `max_live` exist at once: `publish`
waits for a place. Everything is freed exactly once. One that nobody could take (its bytes were damaged behind the
trainer's back) gives its place to a fresh one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from titan_rl.actors.trainer import Trainer
from titan_rl.errors import WeightsError
from titan_rl.observability.activity import Activities
from titan_rl.types import PolicyVersion
from titan_rl.weights.manifest import Publication

T = TypeVar("T")

FRESH_PUBLICATIONS = 2
"""That take the place of one that nobody could take; what damages more is not going to stop, and ends the run."""


class Publications:
    """The policy's publications. Belongs to one event loop."""

    def __init__(self, trainer: Trainer, *, max_live: int) -> None:
        self._trainer = trainer
        self._max_live = max_live
        self._live: dict[PolicyVersion, Publication] = {}
        self._holders: dict[PolicyVersion, set[str]] = {}
        self._freed = asyncio.Event()

    @property
    def newest(self) -> Publication | None:
        return next(reversed(self._live.values()), None)

    def waits_for(self) -> str:
        """Why there is no place for another one; empty when there is."""
        if len(self._live) < self._max_live:
            return ""
        held = (f"{version} by {', '.join(sorted(holders))}" for version, holders in self._holders.items() if holders)
        return f"a place for one more publication (weights.max_live is {self._max_live}); held: {'; '.join(held)}"

    async def publish(self, holder: str, activity: Activities) -> Publication:
        """The trainer's current weights, held by `holder`."""
        if self.waits_for():
            with activity("publisher", waits_for=self.waits_for):
                while self.waits_for():
                    self._freed.clear()
                    await self._freed.wait()
        with activity("publish"):
            publication = await self._trainer.push_model_state_dict()
            before = self.newest
            self._live[publication.version] = publication
            self._holders[publication.version] = {holder}
            if before is not None:
                await self._free_if_unneeded(before.version)
        return publication

    async def taken(
        self,
        publication: Publication,
        take: Callable[[Publication], Awaitable[T]],
        *,
        on_refused: Callable[[str], None],
    ) -> tuple[Publication, T]:
        """What `take` makes of a publication, or of the trainer's current weights published in its place.

        Args:
            take: raises WeightsError where nobody could take it; nobody reads it any more then.
            on_refused: told why, before the trainer publishes again.

        Raises:
            WeightsError: the last of `FRESH_PUBLICATIONS` was not taken either.
        """
        for _ in range(FRESH_PUBLICATIONS):
            try:
                return publication, await take(publication)
            except WeightsError as error:
                on_refused(f"{error}; the trainer publishes its weights again")
            holders = self._holders.pop(publication.version)
            await self._trainer.release(self._live.pop(publication.version))
            publication = await self._trainer.push_model_state_dict()
            self._live[publication.version] = publication
            self._holders[publication.version] = holders
        return publication, await take(publication)

    def hold(self, version: PolicyVersion, holder: str) -> None:
        """Keep a live publication for `holder` too. Raises KeyError if it is not live."""
        self._holders[version].add(holder)

    async def release(self, version: PolicyVersion, holder: str) -> None:
        """`holder` needs it no more."""
        self._holders[version].remove(holder)
        await self._free_if_unneeded(version)

    async def _free_if_unneeded(self, version: PolicyVersion) -> None:
        if self._holders[version] or self._live[version] is self.newest:
            return
        publication = self._live.pop(version)
        del self._holders[version]
        await self._trainer.release(publication)
        self._freed.set()
