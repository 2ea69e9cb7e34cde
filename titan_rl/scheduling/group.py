"""Groups, batches and the stream of prompts, as plain values and one counter.

Always true of a `PromptStream`:

- a prompt is its index in the stream; indices are handed out once each, in order, without gaps, over epoch
  boundaries too. Texts may repeat, indices never do;
- every index that was handed out is pending or has exactly one outcome;
- memory does not grow with the run: every index below `low_water` has an outcome, and individual outcomes are kept only
  for indices from `low_water` on, the oldest pending one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from titan_rl.types import PolicyVersion

MAX_ATTEMPTS = 4
"""If a group's samples are lost this many times from stores that live, the run ends: the cause is not going to go
away."""


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
    """An optimizer step has used it."""
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
    """How often it was lost so far."""
    min_version: PolicyVersion
    """The newest published version when it was admitted: no older policy may sample it."""
    oldest: PolicyVersion | None = None
    """Oldest policy among its trained tokens; None before it has finished, or if it has none."""

    def __str__(self) -> str:
        again = f", attempt {self.attempt + 1}" if self.attempt else ""
        return f"group {self.group_id} ({self.state}{again}, admitted at {self.min_version})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one optimizer step trains."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Groups so far. `admitted == trained + filtered + failed + active`."""

    admitted: int
    trained: int
    filtered: int
    failed: int
    waiting: int
    running: int
    finished: int
    taken: int

    @property
    def active(self) -> int:
        return self.waiting + self.running + self.finished + self.taken


class PromptStream:
    """Hands out prompt indices and remembers their outcomes."""

    def __init__(self, next_index: int = 0) -> None:
        """
        Args:
            next_index: the first index to hand out; those before count as settled elsewhere.
        """
        self._next = next_index
        self._low_water = next_index
        self._outcomes: dict[int, Outcome] = {}  # at or above the mark

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"next": self._next, "low_water": self._low_water, "outcomes": dict(self._outcomes)}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> PromptStream:
        stream = cls()
        stream._next, stream._low_water = state["next"], state["low_water"]
        stream._outcomes = {int(index): Outcome(outcome) for index, outcome in state["outcomes"].items()}
        return stream

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
