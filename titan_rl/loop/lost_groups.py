"""Groups that are lost: each is played again under its id, and keeps its place.

the worker of a running group ends, or the gateway of its programs ─▶ player_lost
the worker that holds a finished group's samples ends              ─▶ store_lost
a step cannot have all its samples                                 ─▶ batch_lost   up to MAX_ATTEMPTS times

And samples that are left at the end: a run that ends well must have released all; one that fails does what it can.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable

from titan_rl.actors.rollouts import RolloutWorkers
from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.errors import ActorGone, InvariantError, SamplesLost, TitanError
from titan_rl.loop.changes import Changes
from titan_rl.loop.ledger import Ledger
from titan_rl.rollout.report import GroupReport
from titan_rl.scheduling.group import MAX_ATTEMPTS, Batch, Group, GroupState

RELEASE_SECONDS = 2.0
"""A failed run waits no longer than this for its stores. Their files are removed with the run in any case."""

_log = logging.getLogger(__name__)


class LostGroups:
    def __init__(self, ledger: Ledger, rollouts: RolloutWorkers, changes: Changes) -> None:
        self._buffer, self._reports, self._summary = ledger.buffer, ledger.reports, ledger.summary
        self._rollouts = rollouts
        self._changes = changes
        self._unread: Counter[int] = Counter()  # how often a group's samples could not be had

    def player_lost(self, group: Group, error: ActorGone) -> None:
        _log.info("%s is played again: %s", group, error)
        self._lost(group.group_id)

    def store_lost(self, reason: str) -> None:
        """Play the finished groups again whose samples are gone. Those of a batch that is out are in the hands of the
        trainer, which may have read them."""
        lost = [
            group_id
            for group_id, report in self._reports.items()
            if self._buffer.groups[group_id].state is GroupState.FINISHED and not self._rollouts.holds(report.samples)
        ]
        for group_id in lost:
            del self._reports[group_id]
            self._lost(group_id)
        if lost:
            self._changes.say(f"groups {', '.join(map(str, lost))} were finished and are played again: {reason}")

    async def batch_lost(self, batch: Batch, error: SamplesLost) -> None:
        """Give a batch up, and play those of its groups again that the error names. Raises SamplesLost: it names no
        group of this batch, or one that was lost too often."""
        if not error.group_ids or not set(error.group_ids) <= set(batch.group_ids):
            raise error
        self._unread.update(error.group_ids)
        if any(self._unread[group_id] >= MAX_ATTEMPTS for group_id in error.group_ids):
            raise error
        given_up = []
        for group_id in error.group_ids:
            self._changes.say(f"group {group_id} is played again: {error}")
            given_up.append(self._reports.pop(group_id).samples)
            self._lost(group_id)
        self.store_lost(str(error))
        await self._rollouts.release(SampleBatch.concat(given_up))

    def _lost(self, group_id: int) -> None:
        self._buffer.lost(group_id)
        self._summary.lost += 1
        self._changes.notify()


async def check_stores_are_empty(rollouts: RolloutWorkers) -> None:
    """Raises InvariantError unless all stores are empty; the error says what each store holds."""
    if what := "; ".join(str(report) for report in await rollouts.held() if report.samples):
        raise InvariantError(f"the run is over and samples are still held: {what}")


async def release_samples(rollouts: RolloutWorkers, reports: Iterable[GroupReport], *, seconds: float | None) -> None:
    """Stop running rollouts and release reported samples. Never raises a TitanError."""
    try:
        async with asyncio.timeout(seconds):
            await rollouts.stop_groups()
            await rollouts.release(SampleBatch.concat(report.samples for report in reports))
    except (TitanError, TimeoutError) as error:
        _log.warning("the samples of the failed run were not released: %s", error or type(error).__name__)
