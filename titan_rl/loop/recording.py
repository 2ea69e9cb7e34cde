"""Which rollouts are recorded, and their recording while a run goes on, off the critical path.

    begin    before a step: choose by the reports, ask the workers           while it is trained
    finish   after it: merge with the trainer's scores, write in a thread    while the run goes on

- The choice follows from the step's number and its reports, in the order of the batch: a deterministic run records the
  same rollouts again.
- Steps are written one after the other. No step waits for one that is not written yet, as where a worker is stopped; a
  checkpoint does, because it says how much is written.
- What cannot be recorded, because a worker is gone or the disk is full, is missing. The run says so once and goes on.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from titan_rl.errors import ActorGone
from titan_rl.metrics.rollout_record import GROUP, RolloutRecord, RolloutWriter
from titan_rl.policy.token_score_recorder import SampleName, TokenScoreRecorder
from titan_rl.rollout.report import GroupReport, with_scores
from titan_rl.seeding import derive_seed

if TYPE_CHECKING:
    from titan_rl.actors.rollouts import RolloutWorkers

BEST, WORST, RANDOM, WRONG, RIGHT = "best", "worst", "random", "wrong", "right"
"""Why a rollout is recorded: of a step, and of an evaluation."""
WHOLE_GROUP_EVERY = 20
"""Steps. All samples of a prompt beside each other say what none of them says alone."""
MOST_WRONG, MOST_SHOWN = 2, 3
"""Rollouts of an evaluation that are recorded: the first wrong ones, and with them the first right ones."""


def choose(step: int, reports: Sequence[GroupReport], each: int) -> list[RolloutRecord]:
    """The `each` best and worst rollouts of a step, and as many random ones, which may have failed; of some steps the
    whole group of a random one. Of equal rewards the first is best, and the last is worst."""
    everyone = [rollout for report in reports for rollout in report.rollouts]
    numbers = range(len(everyone))
    graded = [number for number in numbers if not everyone[number].error]
    falling = sorted(graded, key=lambda number: -everyone[number].reward)
    drawn = random.Random(derive_seed("recorded rollouts", step)).sample(numbers, min(each, len(numbers)))
    whole = {everyone[number].group for number in drawn[:1] if step % WHOLE_GROUP_EVERY == 0}
    beside = [number for number in numbers if everyone[number].group in whole]
    kept: dict[int, list[str]] = {}
    for why, some in ((BEST, falling[:each]), (WORST, falling[::-1][:each]), (RANDOM, drawn), (GROUP, beside)):
        for number in some:
            kept.setdefault(number, []).append(why)
    return [msgspec.structs.replace(everyone[number], step=step, kept=tuple(why)) for number, why in kept.items()]


def choose_evaluated(step: int, reports: Sequence[GroupReport]) -> list[RolloutRecord]:
    """The first wrong and the first right ones of the version of a step."""
    graded = [rollout for report in reports for rollout in report.rollouts if not rollout.error]
    wrong = [each for each in graded if each.exact_match < 1][:MOST_WRONG]
    right = [each for each in graded if each.exact_match >= 1][: MOST_SHOWN - len(wrong)]
    chosen = [(each, WRONG) for each in wrong] + [(each, RIGHT) for each in right]
    return [msgspec.structs.replace(each, step=step, kept=(why,)) for each, why in chosen]


@dataclass(frozen=True, slots=True)
class Recording:
    step: int
    chosen: list[RolloutRecord]
    described: asyncio.Future[list[RolloutRecord]]
    """The chosen ones whose worker is there."""
    tokens: TokenScoreRecorder


class Recorder:
    """Of one run. Belongs to one event loop."""

    def __init__(
        self, rollouts: RolloutWorkers, writer: RolloutWriter | None = None, *, each: int = 0, only: int = 0
    ) -> None:
        """`each`: `logging.rollouts`; 0, or no writer: nothing is recorded. `only`: the only step that is recorded; 0:
        all of them."""
        self._rollouts = rollouts
        self._writer = writer if each else None
        self._each = each
        self._only = only
        self._writing: asyncio.Future[None] | None = None

    def begin(self, step: int, reports: Sequence[GroupReport]) -> Recording:
        """Choose what is recorded of a step that is about to be trained. A step that fails needs no `finish`."""
        wanted = self._writer is not None and self._only in (0, step)
        chosen = choose(step, reports, self._each) if wanted else []
        described = asyncio.ensure_future(self._rollouts.describe(chosen, reports))
        return Recording(step, chosen, described, TokenScoreRecorder(_samples_of(chosen, reports)))

    def finish(self, recording: Recording) -> None:
        """The step is trained. Its samples may be released: the workers have been asked before."""
        self._writing = asyncio.ensure_future(self._write(recording, after=self._writing))

    async def settled(self) -> None:
        """Wait until all finished steps are written."""
        if self._writing is not None:
            await self._writing

    def evaluated(self, records: Sequence[RolloutRecord]) -> None:
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
        described, scores = await recording.described, recording.tokens.scores
        if len(described) < len(recording.chosen):
            writer.failed(ActorGone(f"step {recording.step}: the worker that played them is gone"))
        await asyncio.to_thread(writer.write, (with_scores(each, scores) for each in described))


def _samples_of(chosen: Sequence[RolloutRecord], reports: Sequence[GroupReport]) -> list[SampleName]:
    by_id = {report.group_id: report for report in reports}
    return [
        (ref.group_id, ref.sample)
        for each in chosen
        for ref in by_id[each.group].samples.refs
        if ref.sample % len(by_id[each.group].rollouts) == each.sample
    ]
