"""When groups of a deterministic run are admitted, and which version plays them: logical time.

Groups are decided in order of ids, whatever the order in which they end: a group that finishes is trainable, one that
is filtered or has failed is not. Logical time is (groups decided, t of them trainable). In logical time ⌊t/P⌋ steps are
trained and published, although the trainer may be behind. A group is admitted to a slot that is free in logical time,
and played by exactly the version that is the newest in logical time.

So a group's version, and the batch that trains it, are functions of the outcomes of earlier groups alone. They do not
depend on who is fast, on the number of generators, or on losses: a lost group is played again by the same version.
`README.md` proves the bound, S, and that nobody waits for itself.
"""

from dataclasses import dataclass, field

from titan_rl.errors import RollbackNeeded
from titan_rl.scheduling.config import StalenessLimits


@dataclass(slots=True)
class LogicalTime:
    """Of one run, whose limits are handed in. `admitted` counts ids from 0, so it is the next id."""

    decided: int = 0
    """Groups that are decided: all with smaller ids."""
    trainable: int = 0
    """Of these."""
    ended: dict[int, bool] = field(default_factory=dict)
    """Groups that are not decided yet: whether trainable."""

    def step(self, limits: StalenessLimits) -> int:
        """Of the newest version."""
        return self.trainable // limits.groups_per_step

    def free_slots(self, limits: StalenessLimits, admitted: int) -> int:
        return limits.slots - (admitted - self.decided) - self.trainable % limits.groups_per_step

    def expected(self, admitted: int) -> int:
        return self.trainable + admitted - self.decided

    def end(self, group_id: int, *, trainable: bool) -> None:
        """A group has ended. One that was lost after its decision ends again, and in the same way. Raises
        RollbackNeeded: it was decided to be trainable, and is not now."""
        if group_id >= self.decided:
            self.ended[group_id] = trainable
        elif not trainable:
            lost = f"group {group_id} was lost after later groups had been admitted because it could be trained"
            raise RollbackNeeded(f"{lost}, and now it cannot; a deterministic run cannot go on without it")

    def decide(self) -> int | None:
        """Decide the next group, by id; None: it has not ended yet."""
        group_id = self.decided
        if group_id not in self.ended:
            return None
        self.trainable += self.ended.pop(group_id)
        self.decided += 1
        return group_id
