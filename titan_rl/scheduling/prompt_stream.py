"""The stream of prompts: which prompt is next, and the outcome of earlier ones.

Always true:

- a prompt is its index in the stream; indices are handed out once each, in order, without gaps, over epoch
  boundaries too. Texts may repeat, indices never do;
- every index that was handed out is pending or has exactly one outcome;
- memory does not grow with the run: every index below `low_water` has an outcome, and individual outcomes are kept only
  for indices from `low_water` on, the oldest pending one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from titan_rl.scheduling.group import Outcome


class PromptStream:
    """Hands out prompt indices and remembers their outcomes. `state` is all of it, for a resumed run."""

    def __init__(self, next_index: int = 0) -> None:
        """
        Args:
            next_index: the first index to hand out; those before count as settled elsewhere.
        """
        self._next = next_index
        self._low_water = next_index
        self._outcomes: dict[int, Outcome] = {}  # at or above the mark

    @property
    def next_index(self) -> int:
        """The first index not handed out yet."""
        return self._next

    @property
    def low_water(self) -> int:
        """Every index below this one has its outcome."""
        return self._low_water

    def take(self, count: int) -> list[int]:
        """The next `count` indices; they are pending now."""
        taken = list(range(self._next, self._next + count))
        self._next += count
        return taken

    def settle(self, index: int, outcome: Outcome) -> None:
        """The prompt's group has ended, for good.

        Raises:
            ValueError: the index was never handed out, or has an outcome already.
        """
        if not self.is_pending(index):
            ended = (
                "was never handed out" if index >= self._next else f"has ended ({self.outcome(index) or 'long ago'})"
            )
            raise ValueError(f"prompt {index} {ended}, it cannot become {outcome}")
        self._outcomes[index] = outcome
        while self._low_water in self._outcomes:
            del self._outcomes[self._low_water]
            self._low_water += 1

    def is_pending(self, index: int) -> bool:
        """Handed out and without an outcome."""
        return self._low_water <= index < self._next and index not in self._outcomes

    def outcome(self, index: int) -> Outcome | None:
        """How an index at or above `low_water` ended; None: it has not, or it is below."""
        return self._outcomes.get(index)

    def pending(self) -> Iterator[int]:
        """Indices without an outcome, in order."""
        return (index for index in range(self._low_water, self._next) if index not in self._outcomes)

    def state(self) -> dict[str, Any]:
        """Plain data (JSON) from which `from_state` makes a stream that goes on in the same way."""
        return {
            "next_index": self._next,
            "low_water": self._low_water,
            "outcomes": [[index, outcome.value] for index, outcome in sorted(self._outcomes.items())],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> PromptStream:
        stream = cls(state["next_index"])
        stream._low_water = state["low_water"]
        stream._outcomes = {index: Outcome(outcome) for index, outcome in state["outcomes"]}
        return stream
