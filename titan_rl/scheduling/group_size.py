"""How many rollouts a group has: twice as many after a step most of whose groups taught nothing.

A group's size follows from the step of the version that it was admitted under. So one that is played again is as large
as before, and a deterministic run repeats.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class GroupSize:
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
