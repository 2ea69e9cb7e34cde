"""Groups and batches, as plain values."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from titan_rl.types import PolicyVersion

MAX_ATTEMPTS = 4
"""If a group's samples are lost so often from stores that live, the run ends: the cause is not going to go away."""


class GroupState(StrEnum):
    """Where a group is between its admission and its end."""

    WAITING = "waiting"
    """Admitted; its rollouts are to be started."""
    RUNNING = "running"
    """Its rollouts are under way."""
    FINISHED = "finished"
    """Its samples are ready to be trained."""
    TAKEN = "taken"
    """Part of the batch that is being trained."""


class Outcome(StrEnum):
    """How a group ended, for good."""

    TRAINED = "trained"
    FILTERED = "filtered"
    """A filter refused it; another group takes its place."""
    FAILED = "failed"
    """It cannot be played; another group takes its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One admitted group at one moment."""

    group_id: int
    """The prompt's index in the stream."""
    state: GroupState
    attempt: int = 0
    min_version: PolicyVersion
    """No older policy may sample it: the newest published version when it was admitted. In a deterministic run the
    version that plays it, the newest one in logical time, which may not be published yet."""
    oldest: PolicyVersion | None = None
    """Oldest policy among its trained tokens; None before it has finished, or if it has none."""

    def __str__(self) -> str:
        again = f", attempt {self.attempt + 1}" if self.attempt else ""
        return f"group {self.group_id} ({self.state}{again}, admitted at {self.min_version})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    version: PolicyVersion
    """Of the trainer, before the step."""
    groups: tuple[Group, ...]
    """Exactly P, oldest first."""

    @property
    def group_ids(self) -> tuple[int, ...]:
        return tuple(group.group_id for group in self.groups)

    @property
    def ages(self) -> tuple[int, ...]:
        """Staleness in steps of each group that has a trained token."""
        return tuple(self.version.step - group.oldest.step for group in self.groups if group.oldest is not None)


@dataclass(slots=True, kw_only=True)
class GroupSize:
    """How many rollouts a group has: twice as many after a step most of whose groups taught nothing. It follows from
    the step of the version that a group was admitted under, so one that is played again is as large as before."""

    first: int
    most: int
    """0: groups do not grow."""
    grown: list[int] = field(default_factory=list)
    """Steps that were followed by larger groups."""

    def at(self, step: int) -> int:
        """Of groups that are admitted under the version of this step."""
        return max(self.first, min(self.most, self.first << bisect_right(self.grown, step)))

    def trained(self, step: int, groups: Sequence[tuple[int, bool]]) -> bool:
        """Whether groups are larger from this step on. `groups`: of those that were trained in it, the size, and
        whether equal rewards taught nothing although the prompt is not solved. Smaller groups of before do not count.
        """
        size = self.at(step)
        equal = [unsolved for count, unsolved in groups if count >= size]
        grows = size < self.most and 2 * sum(equal) > len(groups)
        if grows:
            self.grown.append(step)
        return grows
