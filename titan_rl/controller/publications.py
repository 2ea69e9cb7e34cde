"""Which published weights are still needed, and when the next may be published.

A publication lives while somebody holds it, or while it is the newest. At most `max_live` exist at once; `publish`
waits for a free slot. Every publication is freed exactly once. If no generator could load one (its bytes were damaged
after the trainer wrote them), the trainer publishes again in its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from titan_rl.actors.trainer_client import Trainer
from titan_rl.errors import WeightsError
from titan_rl.observability.activity import Activities
from titan_rl.types import PolicyVersion
from titan_rl.weights.manifest import Publication

T = TypeVar("T")

SERVED, EVALUATED, KEPT = "the generators", "evaluation", "a checkpoint"
"""Holders of publications."""

FRESH_PUBLICATIONS = 2
"""How often the trainer publishes again after no generator could load a publication. If that does not help, the cause
is not going to go away, and the run ends."""


class Publications:
    """The policy's publications. Belongs to one event loop."""

    def __init__(self, trainer: Trainer, *, max_live: int) -> None:
        self._trainer = trainer
        self._max_live = max_live
        self._live: dict[PolicyVersion, Publication] = {}
        self._holders: dict[PolicyVersion, set[str]] = {}
        self._freed = asyncio.Event()

    def __getitem__(self, version: PolicyVersion) -> Publication:
        """A live one."""
        return self._live[version]

    def held_by(self, holder: str) -> list[PolicyVersion]:
        return [version for version, holders in self._holders.items() if holder in holders]

    def older_than(self, version: PolicyVersion, *, needed_by: set[str]) -> dict[PolicyVersion, set[str]]:
        """Live versions before this one that any of these holders holds, oldest first, with those holders."""
        older = {each: holders & needed_by for each, holders in sorted(self._holders.items()) if each < version}
        return {each: holders for each, holders in older.items() if holders}

    @property
    def newest(self) -> Publication | None:
        return next(reversed(self._live.values()), None)

    def waits_for(self) -> str:
        """Why there is no free slot; empty if there is one."""
        if len(self._live) < self._max_live:
            return ""
        held = (f"{version} by {', '.join(sorted(holders))}" for version, holders in self._holders.items() if holders)
        return f"a place for one more publication (weights.max_live is {self._max_live}); held: {'; '.join(held)}"

    async def publish(self, holder: str, activity: Activities) -> Publication:
        """Publish the trainer's current weights, held by `holder`. Waits for a free slot."""
        if self.waits_for():
            with activity("publisher", waits_for=self.waits_for):
                while self.waits_for():
                    self._freed.clear()
                    await self._freed.wait()
        with activity("publish"):
            return await self._add(await self._trainer.push_model_state_dict(), {holder})

    async def publish_again(self, directory: Path, version: PolicyVersion, holders: set[str]) -> Publication:
        """Publish a version that the checkpoint in `directory` keeps."""
        return await self._add(await self._trainer.publish_again(directory, version), set(holders))

    async def _add(self, publication: Publication, holders: set[str]) -> Publication:
        before = self.newest
        self._live[publication.version] = publication
        self._holders[publication.version] = holders
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
        """Call `take` with a publication. If nobody could load it, publish the trainer's current weights in its place
        and try again. Returns the publication that was taken, and the result of `take`.

        Args:
            take: raises WeightsError if no generator could load the publication; then nobody reads it any more.
            on_refused: called with the reason before the trainer publishes again.

        Raises:
            WeightsError: the last of `FRESH_PUBLICATIONS` could not be loaded either.
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
        """End the hold of `holder`."""
        self._holders[version].remove(holder)
        await self._free_if_unneeded(version)

    async def drop(self) -> None:
        """Free all of them, whoever holds them: generators keep what they have pulled."""
        dropped, self._live, self._holders = [*self._live.values()], {}, {}
        for publication in dropped:
            await self._trainer.release(publication)

    async def _free_if_unneeded(self, version: PolicyVersion) -> None:
        if self._holders[version] or self._live[version] is self.newest:
            return
        publication = self._live.pop(version)
        del self._holders[version]
        await self._trainer.release(publication)
        self._freed.set()
