"""Groups that are lost: each is played again under its id, and keeps its place.

the worker of a running group ends, or the gateway of its programs ─▶ of_player
the worker that holds a finished group's samples ends              ─▶ of_store
a step cannot have all its samples                                 ─▶ of_samples   up to MAX_ATTEMPTS times
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.errors import ActorGone, SamplesLost
from titan_rl.scheduling.group import MAX_ATTEMPTS, Batch, Group, GroupState

if TYPE_CHECKING:
    from titan_rl.controller.ledger import Ledger
    from titan_rl.controller.system import System

_log = logging.getLogger(__name__)


class Losses:
    """Of one run."""

    def __init__(
        self, ledger: Ledger, system: System, *, say: Callable[[str], None], changed: Callable[[], None]
    ) -> None:
        """
        Args:
            changed: called when a group is to be played again, or the trainer's state is lost.
        """
        self._schedule, self._trainer = ledger.schedule, system.trainer
        self._buffer, self._reports, self._summary = ledger.buffer, ledger.reports, ledger.summary
        self._rollouts = system.rollouts
        self._say = say
        self._changed = changed
        self._over = False
        self._unread: Counter[int] = Counter()  # how often a group's samples could not be had
        self._rollouts.on_lost = self.of_store
        self._trainer.on_state_lost = changed

    def take(self) -> Batch | None:
        """The groups of the next step, if they are finished. Raises TrainerStateLost even while they are not: without
        the weights that are lost with the trainer's host, they might never be."""
        self._trainer.require_state()
        return self._schedule.take()

    def of_player(self, group: Group, error: ActorGone) -> None:
        """Play a running group again."""
        _log.info("%s is played again: %s", group, error)
        self._lost(group.group_id)

    def of_store(self, reason: str) -> None:
        """Play the finished groups again whose samples are gone. Those of a batch that is out are in the hands of the
        trainer, which may have read them."""
        lost = [
            group_id
            for group_id, report in self._reports.items()
            if not self._over
            and self._buffer[group_id].state is GroupState.FINISHED
            and not self._rollouts.holds(report.samples)
        ]
        for group_id in lost:
            del self._reports[group_id]
            self._lost(group_id)
        if lost:
            self._say(f"groups {', '.join(map(str, lost))} were finished and are played again: {reason}")

    async def of_samples(self, batch: Batch, error: SamplesLost) -> None:
        """Give a batch up, and play those of its groups again that the error names.

        Raises:
            SamplesLost: it names no group of this batch, or one that was lost too often.
        """
        if not error.group_ids or not set(error.group_ids) <= set(batch.group_ids):
            raise error
        self._unread.update(error.group_ids)
        if any(self._unread[group_id] >= MAX_ATTEMPTS for group_id in error.group_ids):
            raise error
        given_up = []
        for group_id in error.group_ids:
            self._say(f"group {group_id} is played again: {error}")
            given_up.append(self._reports.pop(group_id).samples)
            self._lost(group_id)
        self.of_store(str(error))
        await self._rollouts.release(SampleBatch.concat(given_up))

    def end(self) -> None:
        """The run is over, and its workers end: nothing is played again."""
        self._over = True

    def _lost(self, group_id: int) -> None:
        self._buffer.lost(group_id)
        self._summary.lost += 1
        self._changed()
