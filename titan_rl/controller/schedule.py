"""When versions are published and evaluated, how many groups are let in, and when the run is over.

Always true:

- the versions of step 0, of every `every`-th step and of the last step are evaluated, and the trainer passes none of
  them over unpublished;
- what an evaluation needs the fleet to serve stays the newest version until `let_go`;
- no group is admitted that the steps up to the last one do not train.

Pure: reads the versions of a `GroupBuffer` and changes nothing there.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

from titan_rl.scheduling.group_buffer import GroupBuffer
from titan_rl.types import PolicyVersion
from titan_rl.weights.manifest import Publication


class Schedule:
    """Of one run. What it answers None to may be answered after the next change; False: there will be nothing more."""

    def __init__(self, buffer: GroupBuffer, *, steps: int, every: int) -> None:
        """
        Args:
            every: steps between two evaluations; 0: only before and after.
        """
        self._buffer = buffer
        self._every = every
        self._due: deque[Publication] = deque()  # to be evaluated
        self._kept: PolicyVersion | None = None  # what an evaluation needs the fleet to serve
        self._evaluated = -1  # the newest step of which an evaluation is over
        self.last = steps
        """The step after which the run is over."""

    def is_due(self, version: PolicyVersion) -> bool:
        """Whether this version is to be evaluated."""
        return version.step in (0, self.last) or bool(self._every and version.step % self._every == 0)

    def make_due(self, publication: Publication) -> None:
        """It is served, and waits for its evaluation."""
        self._kept = publication.version
        self._due.append(publication)

    def next_due(self) -> Publication | Literal[False] | None:
        """What to evaluate next."""
        if self._due:
            return self._due.popleft()
        return False if self._evaluated >= self.last else None

    def let_go(self, version: PolicyVersion) -> None:
        """The evaluation of `version` needs the fleet no more; that of a later version may."""
        if self._kept == version:
            self._kept = None

    def evaluated(self, version: PolicyVersion) -> None:
        """Its evaluation is over, however it ended."""
        self._evaluated = version.step

    def may_publish(self) -> bool | None:
        """Whether the trainer's version is to be published now."""
        if self._buffer.published_version.step >= self.last:
            return False
        behind = self._buffer.published_version < self._buffer.trainer_version
        return True if behind and self._kept is None else None

    def publisher_waits_for(self) -> str:
        """Why there is nothing to publish."""
        if self._buffer.published_version < self._buffer.trainer_version:
            return f"the evaluation of {self._kept}"
        return "the trainer's next version"

    def must_be_published(self) -> bool:
        """Whether the trainer holds a version that is due for evaluation and would be passed over."""
        version = self._buffer.trainer_version
        return self.is_due(version) and version > self._buffer.published_version

    def admissible(self) -> int:
        """Groups to let in now: never more than the remaining steps train."""
        counts = self._buffer.counts
        wanted = self.last * self._buffer.knobs.groups_per_step
        return max(0, min(self._buffer.free_slots, wanted - counts.trained - counts.active))

    def over(self) -> bool:
        """Whether all steps are trained."""
        return self._buffer.trainer_version.step >= self.last

    def stop_early(self, served: Publication | None) -> bool:
        """The step that is under way, or else the one before it, becomes the last. What follows is as after every last
        step: its version is published and evaluated.

        Args:
            served: the newest publication, if groups are played under it.

        Returns:
            Whether that has become due just now.
        """
        was_due = served is not None and self.is_due(served.version)
        self.last = self._buffer.trainer_version.step + (self._buffer.batch is not None)
        if served is None or was_due or not self.is_due(served.version):
            return False
        self.make_due(served)
        return True
