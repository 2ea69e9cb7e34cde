"""Where every group is sampled by exactly one version: which versions the fleet serves, and which publications live.

- A version is served while a group that it plays is unfinished, or while it is evaluated.
- A publication lives while a group that it played is active: if the group's samples are lost, the same version plays
  it again.

- A group starts only once its version is served. If it waited inside its rollout worker, it would hold a place that an
  older group needs; the version waits for that older group, so both would wait for ever.

Several versions are served at once. A generator changes over when nobody needs its version, or when another generator
serves it too: a rolling drain, which keeps the fleet busy.

If no generator can load a publication (its bytes were damaged), the run goes back to its newest checkpoint: the trainer
may be steps ahead of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from titan_rl.controller.publications import EVALUATED, SERVED, Publications
from titan_rl.controller.system import System
from titan_rl.errors import TrainerStateLost, WeightsError
from titan_rl.observability.activity import Activities
from titan_rl.scheduling.group import Group
from titan_rl.scheduling.group_buffer import GroupBuffer
from titan_rl.types import PolicyVersion
from titan_rl.weights.manifest import Publication


class Until(Protocol):
    """`TrainingLoop._until`."""

    async def __call__(
        self, task: str, why: Callable[[], str], ready: Callable[[], bool], over: Callable[[], bool], /
    ) -> bool | None: ...


class ExactVersions:
    """Belongs to one event loop."""

    def __init__(
        self,
        buffer: GroupBuffer,
        publications: Publications,
        system: System,
        activity: Activities,
        changed: Callable[[], None],
    ) -> None:
        """
        Args:
            changed: called when one more version is served.
        """
        self._buffer = buffer
        self._publications = publications
        self._system = system
        self._activity = activity
        self._changed = changed
        self._asked: set[PolicyVersion] = set()
        self._served: set[PolicyVersion] = set()

    def startable(self) -> tuple[Group, ...]:
        """Groups whose rollouts are to be started, oldest first."""
        return tuple(group for group in self._buffer.waiting() if group.min_version in self._served)

    async def serve(self, until: Until, over: Callable[[], bool], tasks: asyncio.TaskGroup) -> None:
        """Consumes the versions that are needed. Waits for a change of them. Produces pulls. On failure: the run."""

        def changed() -> bool:
            return self._needed() != self._asked

        while await until("fleet", lambda: "a group that needs another version", changed, over):
            before, self._asked = self._asked, self._needed()
            self._served &= self._asked
            for version in self._asked - before - self._served:
                tasks.create_task(self._pull(self._publications[version]))
            for version in before - self._asked:
                await self._system.router.retire(version)
        for version in self._asked:  # so that nobody waits for a version whose groups were stopped
            await self._system.router.retire(version)

    async def release(self, until: Until, over: Callable[[], bool]) -> None:
        """Consumes publications that no active group was sampled by. Waits for one. Frees it. On failure: the run."""
        while await until("publications", lambda: "the end of older groups", lambda: bool(self._old()), over):
            for version in self._old():
                await self._publications.release(version, SERVED)

    async def _pull(self, publication: Publication) -> None:
        with self._activity("pull", version=publication.version):
            try:
                await self._system.router.serve_beside(publication)
            except WeightsError as error:
                raise TrainerStateLost(f"{error}; the trainer has gone on and cannot publish it again") from error
        if publication.version in self._asked:  # it may have been retired meanwhile
            self._served.add(publication.version)
            self._changed()

    def _needed(self) -> set[PolicyVersion]:
        newest = self._buffer.published_version
        unfinished = (version for version in self._buffer.unfinished_versions() if version <= newest)
        return {*unfinished, *self._publications.held_by(EVALUATED)}

    def _old(self) -> list[PolicyVersion]:
        needed = {self._buffer.published_version, *self._buffer.active_versions()}
        return [version for version in self._publications.held_by(SERVED) if version not in needed]
