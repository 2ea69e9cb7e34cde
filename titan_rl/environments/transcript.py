"""A conversation as user code sees it.

- `messages` starts with the example's prompt; the policy's turns have the role "assistant".
- `finish_reasons[i]` says how the i-th turn of the policy ended, so a grader can tell a finished answer (the policy
  sampled its stop token) from one that was cut off. The stop token itself is never part of a message's text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from titan_rl.types import FinishReason, Message


@dataclass(frozen=True, slots=True)
class Transcript:
    """One conversation so far, or finished."""

    messages: tuple[Message, ...]
    finish_reasons: tuple[FinishReason, ...]
    """One per turn of the policy, in order."""
    state: Any = None
    """What `Environment.respond` last returned as its state; None before that."""

    @property
    def answer(self) -> str:
        """The text of the policy's last turn; empty when it has said nothing."""
        return next((message.content for message in reversed(self.messages) if message.role == "assistant"), "")

    @property
    def stopped(self) -> bool:
        """Whether the policy ended its last turn itself, by a stop token."""
        return bool(self.finish_reasons) and self.finish_reasons[-1] is FinishReason.STOP
