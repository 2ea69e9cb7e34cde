"""When versions are published and evaluated, how many groups are let in, and when warm-up and run are over.

Always true:

- the versions of step 0, of every `every`-th step and of the last step are evaluated, and the trainer does not train
  past one of them before it is published;
- no group is admitted beyond those that the remaining steps train;
- a group that teaches something resets the `UntrainableStreak`: one in every k batches keeps a run going.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import Any

from titan_rl.errors import NothingToTrain
from titan_rl.metrics.metric_table import metric_of
from titan_rl.metrics.rollout_record import Failed
from titan_rl.scheduling.group import Batch
from titan_rl.scheduling.group_buffer import GroupBuffer
from titan_rl.types import PolicyVersion

ENOUGH_STEPS = 10
"""Of a warm-up, in a row with a loss below `trainer.warmup.enough_loss`."""
STILL = 0.98
"""Of the median loss before; between this and its inverse it stands still. A mean would take one bad batch for that."""
FALLEN = 0.2
"""Of the first losses. A loss that stands still above has learned nothing yet: many fall late, and then fast."""
NEWEST = 256
"""Rollouts whose failures count: a run that has gone well for long stops soon after something breaks."""
FEWEST = 64
"""Rollouts before which no share of failures is taken: a few failures may be those of the first prompts alone."""


def warm_up_is_over(losses: Sequence[float], *, enough: float, flat: int) -> str:
    """Why a warm-up with these losses is over; empty: it goes on. `enough`, `flat`: of `trainer.warmup`, 0: none."""
    if len(losses) >= ENOUGH_STEPS and max(losses[-ENOUGH_STEPS:]) < enough:
        return "enough"
    window = max(flat, len(losses) // 4)  # it stands still for as long as it took to come there
    if flat and len(losses) >= 2 * window:
        before, last = median(losses[-2 * window : -window]), median(losses[-window:])
        if STILL * before < last < before / STILL and last < FALLEN * median(losses[:ENOUGH_STEPS]):
            return "it falls no more"
    return ""


def too_many_failures(rollouts: Sequence[Failed | None], most: float) -> str:
    """Why a run is to stop; empty: it may go on. Each kind of failure is counted by itself: another thing has to be
    changed for it. `rollouts`: the newest ones of training, at most `NEWEST`, as their groups were decided; None: it
    did not fail. `most`: share of the rollouts that one kind of failure may have (`rollout.failure_share`)."""
    causes = Counter(filter(None, rollouts))
    kinds = Counter(kind for kind, _ in causes.elements())
    for kind, count in kinds.most_common(1):
        if len(rollouts) >= FEWEST and (share := count / len(rollouts)) > most:
            times, cause = max((times, cause) for (failure, cause), times in causes.items() if failure is kind)
            metric = metric_of(f"rollout/failed_{kind}")
            failed = f"{kind} failures: {count} of the last {len(rollouts)} rollouts ({share:.0%})"
            limit = f"rollout.failure_share = {most:g}"
            return f"{failed}, more than {limit}; {times} × {cause}; {metric.do if metric else ''}"
    return ""


class Schedule:
    """The schedule of one run. `next_due`, `take` and `may_publish` answer for now: ask again after every change, until
    the matching `all_…` says that nothing more will come."""

    def __init__(self, buffer: GroupBuffer, *, steps: int, every: int) -> None:
        """`every`: steps between two evaluations; 0: only before and after."""
        self._buffer = buffer
        self._every = every
        self._due: deque[PolicyVersion] = deque()  # to be evaluated
        self.evaluated = -1
        """The newest step whose evaluation is over, however it ended."""
        self.steps = steps
        """As they were asked for."""
        self.last = self._admitted = steps
        """The step after which the run is over, and up to which groups are admitted."""

    def state_dict(self) -> dict[str, Any]:
        """Plain data; no evaluation that is under way, which begins again."""
        return {"steps": self.steps, "last": self.last, "admitted": self._admitted, "evaluated": self.evaluated}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any], buffer: GroupBuffer) -> Schedule:
        """`change_settings` follows."""
        schedule = cls(buffer, steps=state["steps"], every=0)
        schedule.last, schedule._admitted, schedule.evaluated = state["last"], state["admitted"], state["evaluated"]
        return schedule

    # Generation and training.

    def admissible(self) -> int:
        """How many groups to admit now: never more than the remaining steps train."""
        wanted = self._admitted * self._buffer.limits.groups_per_step
        return max(0, min(self._buffer.free_slots, wanted - self._buffer.expected))

    def take(self) -> Batch | None:
        return None if self._must_be_published() else self._buffer.take()

    def trainer_waits_for(self) -> str:
        if self._must_be_published():
            return f"the publication of {self._buffer.trainer_version}"
        return self._buffer.waits_for()

    def all_trained(self) -> bool:
        return self._buffer.trainer_version.step >= self.last

    # Publication.

    def may_publish(self) -> bool:
        return self._buffer.published_version < self._buffer.trainer_version

    def all_published(self) -> bool:
        return self._buffer.published_version.step >= self.last

    # Evaluation.

    def is_due(self, version: PolicyVersion) -> bool:
        rhythm = version.step in (0, self.last) or bool(self._every and version.step % self._every == 0)
        return rhythm and version.step > self.evaluated

    def make_due(self, version: PolicyVersion) -> None:
        self._due.append(version)

    def next_due(self) -> PolicyVersion | None:
        """The version to evaluate next. It leaves the queue."""
        return self._due.popleft() if self._due else None

    def all_evaluated(self) -> bool:
        return not self._due and self.evaluated >= self.last

    # The end.

    def change_settings(self, steps: int, every: int) -> None:
        """The run was restored. The settings may be others now."""
        self._every = every
        if steps != self.steps:
            self.steps = steps
            self.last = self._admitted = max(steps, self._buffer.trainer_version.step)

    def end_after(self, step: int) -> None:
        """End after this step, and evaluate nothing until then. Groups are admitted as if the run went on, because what
        was admitted before a group decides which version plays it."""
        self._due.clear()
        self.last = self.evaluated = step

    def all_done(self) -> bool:
        return self.all_trained() and self.all_published() and self.all_evaluated()

    def stop_early(self, served: PolicyVersion | None) -> bool:
        """Make the running step, or else the previous one, the last. Its version is published and evaluated as usual.
        `served`: the newest publication's version, if groups are played under it. Returns whether this made it due."""
        was_due = served is not None and self.is_due(served)
        self.last = self._admitted = self._buffer.last_certain_step
        if served is None or was_due or not self.is_due(served):
            return False
        self.make_due(served)
        return True

    def _must_be_published(self) -> bool:
        """Whether the trainer must not train on: its unpublished version is to be evaluated, or to play groups."""
        version = self._buffer.trainer_version
        needed = self.is_due(version) or self._buffer.limits.exact_versions
        return needed and version > self._buffer.published_version


class Untrainable(StrEnum):
    SOLVED = "solved"
    """All its rollouts got the same reward, and each is an exact match."""
    EQUAL_REWARDS = "all rewards equal"
    """Every advantage is 0: it is trained, but moves nothing."""
    FILTERED = "filtered"
    FAILED = "failed"
    """None of its rollouts could be played to the end."""
    EMPTY = "no token to train"
    """Nothing of it can be trained."""


SOLVED_SHARE = 0.95
"""Of groups that teach nothing; then nothing is left to learn, though rare prompts may always be answered wrongly."""


@dataclass(slots=True, kw_only=True)
class UntrainableStreak:
    """Counts groups in a row, in the order in which they finish, that teach nothing. After k·P of them the run ends."""

    groups_per_step: int
    """P."""
    batches: int
    """k."""
    reasons: dict[Untrainable, int] = field(default_factory=dict)
    """How many there are of each."""
    first: dict[Untrainable, str] = field(default_factory=dict)
    """The first group of each, in words."""

    @property
    def length(self) -> int:
        return sum(self.reasons.values())

    def trainable(self) -> None:
        """A group finished that teaches something."""
        self.reasons.clear()
        self.first.clear()

    def untrainable(self, group_id: int, reason: Untrainable, detail: str = "") -> bool:
        """A group finished that teaches nothing. `detail`: the error, the reward that all rollouts got, the filter's
        name: whatever helps to find the cause. Returns whether the limit is reached and nearly all counted groups were
        solved. Raises NothingToTrain: the limit is reached and more were not solved. Gives the count and the first
        group of each reason."""
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        self.first.setdefault(reason, f"group {group_id}" + (f": {detail}" if detail else ""))
        if self.length < self.batches * self.groups_per_step:
            return False
        if self.reasons.get(Untrainable.SOLVED, 0) < SOLVED_SHARE * self.length:
            raise NothingToTrain(self.describe())
        return True

    def describe(self) -> str:
        by_count = sorted(self.reasons.items(), key=lambda each: -each[1])
        reasons = "; ".join(f"{count} {reason} (first {self.first[reason]})" for reason, count in by_count)
        batches = f"{self.length / self.groups_per_step:g} batches of {self.groups_per_step}"
        return f"the last {self.length} groups in a row ({batches}) taught nothing: {reasons or 'none'}"
