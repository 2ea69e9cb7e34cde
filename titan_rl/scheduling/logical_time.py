"""When groups of a deterministic run are admitted, and which version plays them: logical time.

Groups are decided in order of ids, whatever the order in which they end: a group that finishes is trainable, one that
is filtered or has failed is not. Logical time is (groups decided, t of them trainable). In logical time ⌊t/P⌋ steps are
trained and published, although the trainer may be behind. A group is admitted to a slot that is free in logical time,
and played by exactly the version that is the newest in logical time.

So a group's version, and the batch that trains it, are functions of the outcomes of earlier groups alone. They do not
depend on who is fast, on the number of generators, or on losses: a lost group is played again by the same version.
`README.md` proves the bound, S, and that nobody waits for itself.
"""

from __future__ import annotations

from typing import Any

from titan_rl.errors import RollbackNeeded
from titan_rl.scheduling.config import StalenessLimits


class LogicalTime:
    """Of one run. `admitted` counts ids from 0, so it is the next id."""

    def __init__(self, limits: StalenessLimits) -> None:
        self._limits = limits
        self._decided = 0  # groups that are decided: all with smaller ids
        self._trainable = 0  # of these
        self._ended: dict[int, bool] = {}  # not decided yet: whether trainable

    def state_dict(self) -> dict[str, Any]:
        return {"decided": self._decided, "trainable": self._trainable, "ended": dict(self._ended)}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any], limits: StalenessLimits) -> LogicalTime:
        time = cls(limits)
        time._decided, time._trainable = state["decided"], state["trainable"]
        time._ended = {int(group_id): trainable for group_id, trainable in state["ended"].items()}
        return time

    @property
    def step(self) -> int:
        """Of the newest version."""
        return self._trainable // self._limits.groups_per_step

    def free_slots(self, admitted: int) -> int:
        return self._limits.slots - (admitted - self._decided) - self._trainable % self._limits.groups_per_step

    def expected(self, admitted: int) -> int:
        return self._trainable + admitted - self._decided

    def end(self, group_id: int, *, trainable: bool) -> None:
        """A group has ended. One that was lost after its decision ends again, and in the same way. Raises
        RollbackNeeded: it was decided to be trainable, and is not now."""
        if group_id >= self._decided:
            self._ended[group_id] = trainable
        elif not trainable:
            raise RollbackNeeded(
                f"group {group_id} was lost after later groups had been admitted because it could be trained, and now "
                "it cannot; a deterministic run cannot go on without it"
            )

    def waits(self, group_id: int) -> bool:
        return group_id in self._ended

    def decide(self) -> int | None:
        """Decide the next group, by id; None: it has not ended yet."""
        group_id = self._decided
        if group_id not in self._ended:
            return None
        self._trainable += self._ended.pop(group_id)
        self._decided += 1
        return group_id
