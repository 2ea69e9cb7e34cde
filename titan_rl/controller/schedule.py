"""When versions are published and evaluated, how many groups are let in, and when the run is over.

Always true:

- the versions of step 0, of every `every`-th step and of the last step are evaluated, and the trainer does not train
  past one of them before it is published;
- a version that an evaluation needs the fleet to serve stays the newest published one until `let_go`;
- no group is admitted beyond those that the remaining steps train.

Pure: reads the versions of a `GroupBuffer` and changes nothing there.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

from titan_rl.scheduling.group_buffer import GroupBuffer
from titan_rl.types import PolicyVersion
from titan_rl.weights.manifest import Publication


class Schedule:
    """The schedule of one run. The answer None means: ask again after the next change. False means: nothing more will
    come."""

    def __init__(self, buffer: GroupBuffer, *, steps: int, every: int) -> None:
        """
        Args:
            every: steps between two evaluations; 0: only before and after.
        """
        self._buffer = buffer
        self._every = every
        self._due: deque[Publication] = deque()  # to be evaluated
        self._kept: PolicyVersion | None = None  # the version that an evaluation needs the fleet to serve
        self._evaluated = -1  # the newest step whose evaluation is over
        self.last = steps
        """The step after which the run is over."""

    def is_due(self, version: PolicyVersion) -> bool:
        """Whether this version is to be evaluated."""
        return version.step in (0, self.last) or bool(self._every and version.step % self._every == 0)

    def make_due(self, publication: Publication) -> None:
        """Queue a publication, which the fleet serves now, for evaluation."""
        self._kept = publication.version
        self._due.append(publication)

    def next_due(self) -> Publication | Literal[False] | None:
        """The publication to evaluate next."""
        if self._due:
            return self._due.popleft()
        return False if self._evaluated >= self.last else None

    def let_go(self, version: PolicyVersion) -> None:
        """The evaluation of `version` does not need the fleet any more; one of a later version may."""
        if self._kept == version:
            self._kept = None

    def evaluated(self, version: PolicyVersion) -> None:
        """The evaluation of `version` is over, however it ended."""
        self._evaluated = version.step

    def may_publish(self) -> bool | None:
        """Whether to publish the trainer's version now."""
        if self._buffer.published_version.step >= self.last:
            return False
        behind = self._buffer.published_version < self._buffer.trainer_version
        return True if behind and self._kept is None else None

    def publisher_waits_for(self) -> str:
        """Why nothing is published now."""
        if self._buffer.published_version < self._buffer.trainer_version:
            return f"the evaluation of {self._kept}"
        return "the trainer's next version"

    def must_be_published(self) -> bool:
        """Whether the trainer holds an unpublished version that is due for evaluation, so that it must not train on."""
        version = self._buffer.trainer_version
        return self.is_due(version) and version > self._buffer.published_version

    def admissible(self) -> int:
        """How many groups to admit now: never more than the remaining steps train."""
        counts = self._buffer.counts
        wanted = self.last * self._buffer.knobs.groups_per_step
        return max(0, min(self._buffer.free_slots, wanted - counts.trained - counts.active))

    def over(self) -> bool:
        """Whether all steps are trained."""
        return self._buffer.trainer_version.step >= self.last

    def stop_early(self, served: Publication | None) -> bool:
        """Make the running step, or else the previous one, the last. Its version is published and evaluated as usual.

        Args:
            served: the newest publication, if groups are played under it.

        Returns:
            Whether `served` became due for evaluation by this call.
        """
        was_due = served is not None and self.is_due(served.version)
        self.last = self._buffer.trainer_version.step + (self._buffer.batch is not None)
        if served is None or was_due or not self.is_due(served.version):
            return False
        self.make_due(served)
        return True
