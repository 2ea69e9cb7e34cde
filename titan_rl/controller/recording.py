"""Records rollouts while a run goes on, off the critical path.

    begin    before a step: choose by the reports, ask the workers           while it is trained
    finish   after it: merge with the trainer's scores, write in a thread    while the run goes on

- Steps are written one after the other. No step waits for one that is not written yet, as where a worker is stopped; a
  checkpoint does, because it says how much is written.
- What cannot be recorded, because a worker is gone or the disk is full, is missing. The run says so once and goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titan_rl.errors import ActorGone
from titan_rl.observability.recorder import RolloutWriter
from titan_rl.policy.kept_tokens import KeptTokens, SampleName
from titan_rl.rollout.record import Chosen, Record, choose, record
from titan_rl.rollout.report import GroupReport
from titan_rl.types import Purpose

if TYPE_CHECKING:
    from titan_rl.actors.rollouts import Rollouts


@dataclass(frozen=True, slots=True)
class Recording:
    """Of one step."""

    step: int
    chosen: list[Chosen]
    asking: asyncio.Future[dict[SampleName, Record]]
    tokens: KeptTokens
    """For the trainer to fill."""


class Recorder:
    """Of one run. Belongs to one event loop."""

    def __init__(
        self, rollouts: Rollouts, writer: RolloutWriter | None = None, *, each: int = 0, only: int = 0
    ) -> None:
        """
        Args:
            writer: None: nothing is recorded.
            each: `logging.rollouts`; 0: nothing is recorded.
            only: the only step that is recorded; 0: all of them.
        """
        self._rollouts = rollouts
        self._writer = writer if each else None
        self._each = each
        self._only = only
        self._writing: asyncio.Future[None] | None = None

    def begin(self, step: int, reports: Sequence[GroupReport]) -> Recording:
        """Choose what is recorded of a step that is about to be trained. A step that fails needs no `finish`."""
        wanted = self._writer is not None and self._only in (0, step)
        chosen = choose(step, reports, self._each) if wanted else []
        asking = asyncio.ensure_future(self._rollouts.conversations(Purpose.TRAIN, chosen))
        return Recording(step, chosen, asking, KeptTokens(name for each in chosen for name in each.sample_names))

    def finish(self, recording: Recording) -> None:
        """The step is trained. Its samples may be released: the workers have been asked before."""
        self._writing = asyncio.ensure_future(self._write(recording, after=self._writing))

    async def settled(self) -> None:
        """Wait until all finished steps are written."""
        if self._writing is not None:
            await self._writing

    def evaluated(self, records: Sequence[Record]) -> None:
        if self._writer is not None:
            self._writer.write(records)

    @property
    def nbytes(self) -> int:
        """Length of the file, if it is `settled`."""
        return self._writer.nbytes if self._writer is not None else 0

    async def _write(self, recording: Recording, *, after: asyncio.Future[None] | None) -> None:
        if after is not None:
            await after
        if (writer := self._writer) is None:
            return
        said, scores = await recording.asking, recording.tokens.scores
        known = [each for each in recording.chosen if each.name in said]
        if len(known) < len(recording.chosen):
            writer.failed(ActorGone(f"step {recording.step}: the worker that played them is gone"))

        def write() -> None:
            try:
                writer.write([record(recording.step, each, said[each.name], scores) for each in known])
            except Exception as error:  # whatever a loss or an environment of the user gave
                writer.failed(error)

        await asyncio.to_thread(write)
