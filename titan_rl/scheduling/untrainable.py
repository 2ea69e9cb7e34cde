"""Stops a run that learns nothing, and says why: everything is learned, or something is wrong.

Always true: a group that teaches something resets the count, so a run continues as long as one group in every k batches
teaches something.

Nothing is left to learn if every counted group was solved. Equal rewards do not prove that: they may be equally poor,
and the best possible reward is unknown. So a rollout counts as solved if evaluation would count it as an exact match.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

from titan_rl.errors import NothingToTrain


class Untrainable(StrEnum):
    """Why a group teaches nothing."""

    SOLVED = "solved"
    """All its rollouts got the same reward, and each is an exact match."""
    EQUAL_REWARDS = "all rewards equal"
    """Every advantage is 0: it is trained, but moves nothing."""
    FILTERED = "filtered"
    """A filter refused it."""
    FAILED = "failed"
    """None of its rollouts could be played to the end."""
    EMPTY = "no sampled token"
    """Nothing of it can be trained."""


class UntrainableStreak:
    """Counts groups in a row, in the order in which they finish, that teach nothing."""

    def __init__(self, *, groups_per_step: int, batches: int) -> None:
        """
        Args:
            groups_per_step: P.
            batches: k: the run ends after k·P such groups in a row.
        """
        if batches < 1:
            raise ValueError(f"batches must be at least 1, got {batches}")
        self._groups_per_step = groups_per_step
        self._batches = batches
        self._reasons: Counter[Untrainable] = Counter()
        self._first: dict[Untrainable, str] = {}

    @property
    def length(self) -> int:
        """Groups in a row, so far."""
        return self._reasons.total()

    def trainable(self) -> None:
        """A group finished that teaches something."""
        self._reasons.clear()
        self._first.clear()

    def untrainable(self, group_id: int, reason: Untrainable, detail: str = "") -> bool:
        """A group finished that teaches nothing.

        Args:
            detail: the error, the reward that all rollouts got, the filter's name: whatever helps to find the cause.

        Returns:
            Whether the limit is reached and all counted groups were solved.

        Raises:
            NothingToTrain: the limit is reached and some were not solved. Gives the count and the first group of each
                reason.
        """
        self._reasons[reason] += 1
        self._first.setdefault(reason, f"group {group_id}" + (f": {detail}" if detail else ""))
        if self.length < self._batches * self._groups_per_step:
            return False
        if self._reasons.keys() != {Untrainable.SOLVED}:
            raise NothingToTrain(self.describe())
        return True

    def describe(self) -> str:
        """The streak in one sentence."""
        reasons = "; ".join(
            f"{count} {reason} (first {self._first[reason]})" for reason, count in self._reasons.most_common()
        )
        return (
            f"the last {self.length} groups in a row ({self.length / self._groups_per_step:g} batches of "
            f"{self._groups_per_step}) taught nothing: {reasons or 'none'}"
        )
