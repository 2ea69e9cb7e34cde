"""Which published weights are still needed, and which of them generators are to serve.

- A publication lives while somebody holds it, or while it is the newest. At most `max_live` exist at once; `publish`
  waits for a free slot. Every publication is freed exactly once.
- The newest version is served, and each that is evaluated. Where every group is sampled by exactly one version, those
  of unfinished groups are served instead of the newest. Their publications live while a group that they played is
  active: if its samples are lost, the same version plays it again.
- Start a group only once its version is served. A group that waits inside a worker would occupy a slot that an older
  group needs, and the version waits for that older group: a deadlock.
- If no generator can load a publication (its bytes were damaged), the trainer publishes again in its place. It may be
  steps ahead by then: where versions are exact, or the publication was served before and its generators are gone, the
  run goes back to its newest checkpoint.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

from titan_rl.actors.router_client import RouterClient
from titan_rl.actors.trainer_client import TrainerClient
from titan_rl.errors import RollbackNeeded, WeightsError
from titan_rl.loop.changes import Changes
from titan_rl.scheduling.group import Group
from titan_rl.scheduling.group_buffer import GroupBuffer
from titan_rl.types import PolicyVersion
from titan_rl.weights.manifest import FleetPull, Publication

SERVED, EVALUATED, KEPT = "the generators", "evaluation", "a checkpoint"
LEAVING = "a generator that leaves it"
"""Holders of publications."""

FRESH_PUBLICATIONS = 2
"""How often the trainer publishes again after no generator could load a publication. If that does not help, the cause
is not going to go away, and the run ends."""


class Publications:
    """The policy's publications. Belongs to one event loop."""

    def __init__(self, trainer: TrainerClient, changes: Changes, *, max_live: int) -> None:
        self._trainer = trainer
        self._changes = changes
        self._max_live = max_live
        self._live: dict[PolicyVersion, Publication] = {}
        self._holders: dict[PolicyVersion, set[str]] = {}
        self._pushing: set[asyncio.Future[Publication]] = set()

    def __getitem__(self, version: PolicyVersion) -> Publication:
        return self._live[version]

    def __contains__(self, version: PolicyVersion) -> bool:
        return version in self._live

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

    async def publish(self, holder: str) -> Publication:
        """Publish the trainer's current weights, held by `holder`. Waits for a free slot."""
        await self._changes.until("publisher", self.waits_for, lambda: not self.waits_for())
        with self._changes.activity("publish"):
            return await self._push({holder})

    async def publish_again(self, directory: Path, version: PolicyVersion, holders: set[str]) -> Publication:
        """Publish a version that the checkpoint in `directory` keeps."""
        return await self._add(await self._trainer.publish_again(directory, version), set(holders))

    async def _push(self, holders: set[str]) -> Publication:
        """A push that has begun comes to its end, also if nobody waits for it any more: the trainer's ranks do not hear
        of that, and what they publish must be freed."""

        async def push() -> Publication:
            return await self._add(await self._trainer.push_model_state_dict(), holders)

        pushing = asyncio.ensure_future(push())
        self._pushing.add(pushing)
        pushing.add_done_callback(self._pushing.discard)
        return await asyncio.shield(pushing)

    async def _add(self, publication: Publication, holders: set[str]) -> Publication:
        before = self.newest
        self._live[publication.version] = publication
        self._holders[publication.version] = holders
        if before is not None:
            await self._free_if_unneeded(before.version)
        return publication

    async def replace(self, version: PolicyVersion) -> Publication:
        """Free a publication that no generator could load, and publish the trainer's current weights for its holders.
        Nobody may read it any more."""
        holders = self._holders.pop(version)
        await self._trainer.release(self._live.pop(version))
        return await self._push(holders)

    def hold(self, version: PolicyVersion, holder: str) -> None:
        """Keep a live publication for `holder` too. Raises KeyError if it is not live."""
        self._holders[version].add(holder)

    async def release(self, version: PolicyVersion, holder: str) -> None:
        self._holders[version].remove(holder)
        await self._free_if_unneeded(version)

    async def release_all(self, holder: str) -> None:
        for version in self.held_by(holder):
            await self.release(version, holder)

    async def drop(self) -> None:
        """Free all of them, whoever holds them: generators keep what they have pulled."""
        await asyncio.gather(*self._pushing, return_exceptions=True)
        dropped, self._live, self._holders = [*self._live.values()], {}, {}
        for publication in dropped:
            await self._trainer.release(publication)

    async def _free_if_unneeded(self, version: PolicyVersion) -> None:
        if self._holders[version] or self._live[version] is self.newest:
            return
        publication = self._live.pop(version)
        del self._holders[version]
        await self._trainer.release(publication)
        self._changes.notify()


class ServedVersions:
    """Has the wanted versions served. Belongs to one event loop."""

    def __init__(self, buffer: GroupBuffer, publications: Publications, router: RouterClient, changes: Changes) -> None:
        self._buffer = buffer
        self._publications = publications
        self._router = router
        self._changes = changes
        self._exact = buffer.limits.exact_versions
        self._wanted: list[PolicyVersion] = []  # as the router knows them, where versions are exact
        self._served: set[PolicyVersion] = set()

    def startable(self) -> tuple[Group, ...]:
        """Groups whose rollouts are to be started, oldest first."""
        waiting = self._buffer.waiting()
        return tuple(group for group in waiting if not self._exact or group.min_version in self._served)

    async def serve(self, version: PolicyVersion, *, alone: bool = False) -> FleetPull:
        """Have this version served, with the others that are wanted now, or alone. Raises WeightsError: no generator
        could load it."""
        # The trainer may have finished one more step, and that news may not have arrived here yet.
        await self._changes.until(
            "publisher", lambda: f"the end of the step to {version}", lambda: version <= self._buffer.trainer_version
        )
        with self._changes.activity("pull", version=version):
            wanted = (self._publications[each] for each in ([version] if alone else self._wanted_now()))
            return await self._router.pull_model_state_dict(*wanted, version=version)

    async def serve_newest(self, version: PolicyVersion, *, alone: bool = False) -> FleetPull:
        """Have the newest publication served. If nobody can load it, the trainer publishes its weights again. Raises
        WeightsError: the last of `FRESH_PUBLICATIONS` could not be loaded either."""
        for _ in range(FRESH_PUBLICATIONS):
            try:
                return await self.serve(version, alone=alone)
            except WeightsError as error:
                self._changes.warn(f"{error}; the trainer publishes its weights again")
            version = (await self._publications.replace(version)).version
        return await self.serve(version, alone=alone)

    async def watch(self) -> None:
        """Waits for a version that was served, and that no generator can load again. Groups or an evaluation may need
        exactly this one, and the trainer has gone on: the run goes back to its newest checkpoint."""
        raise RollbackNeeded(await self._router.until_unavailable())

    async def end_evaluation(self, version: PolicyVersion) -> None:
        """The version is not evaluated any more. Its generator goes on to what is wanted still."""
        self._publications.hold(version, LEAVING)
        await self._publications.release(version, EVALUATED)
        newest = self._publications.newest
        if not self._exact and newest is not None and newest.version != version:
            try:
                await self.serve(newest.version)
            except WeightsError as error:  # the publisher hears of it too
                self._changes.warn(f"after the evaluation of {version}: {error}")
        await self._publications.release(version, LEAVING)

    # Where versions are exact.

    async def serve_exactly(self, over: Callable[[], bool], tasks: asyncio.TaskGroup) -> None:
        """Consumes the versions that are wanted. Waits for a change of them. Produces pulls. On failure: the run."""
        while await self._changes.until(
            "fleet", lambda: "a group that needs another version", lambda: self._wanted_now() != self._wanted, over
        ):
            before, self._wanted = self._wanted, self._wanted_now()
            self._served &= {*self._wanted}
            for version in {*self._wanted} - {*before} or {self._wanted[-1]}:
                tasks.create_task(self._serve_exactly(version))
        newest = self._publications.newest
        if newest is not None:  # so that nobody waits for a version whose groups were stopped
            await self._router.pull_model_state_dict(newest)

    async def release_old(self, over: Callable[[], bool]) -> None:
        """Consumes publications that no active group was sampled by. Waits for one. Frees it. On failure: the run."""
        while old := await self._changes.until("publications", lambda: "the end of older groups", self._old, over):
            for version in old:
                await self._publications.release(version, SERVED)

    async def _serve_exactly(self, version: PolicyVersion) -> None:
        try:
            await self.serve(version)
        except WeightsError as error:
            raise RollbackNeeded(f"{error}; the trainer has gone on and cannot publish it again") from error
        if version in self._wanted:  # its groups may have ended meanwhile
            self._served.add(version)
            self._changes.notify()

    def _wanted_now(self) -> list[PolicyVersion]:
        publications = self._publications
        evaluated = {*publications.held_by(EVALUATED)}
        newest = {publications.newest.version} if publications.newest is not None else set()
        if not self._exact:
            return sorted(newest | evaluated)
        unfinished = {group.min_version for group in self._buffer.unfinished() if group.min_version in publications}
        return sorted(unfinished | evaluated or newest)

    def _old(self) -> list[PolicyVersion]:
        # those that play the active groups, or would play them again if they were lost
        needed = {self._buffer.published_version, *(group.min_version for group in self._buffer.groups.values())}
        return [version for version in self._publications.held_by(SERVED) if version not in needed]
