"""What travels between a rollout worker and the child process that runs its user code.

- A frame is its length (8 bytes, little endian) and a pickle. Frames hold plain data of this package only: whatever
  user code made (a state, an error) crosses as bytes or text, so the worker never runs or imports user code to read
  one.
- One batch of calls is under way at a time. Its answers come in any order, over any number of frames; the frame None
  ends it. Calls that it was late for are not begun and get no answer.
- The progress cell is written by the child on every change of what it runs and read by the worker only when it
  doubts the child: it names the call to blame without a message per call.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from titan_rl.types import FinishReason, Message, Purpose, ToolSpec

FRAME_LENGTH = struct.Struct("<Q")
LONGEST_SHOWN = 160
"""Characters of a prompt, an answer or a wanted answer that a person is shown."""


def pack_frame(message: Any) -> bytes:
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return FRAME_LENGTH.pack(len(body)) + body


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSetup:
    """Everything a child needs to make the environment; a restarted child gets the same."""

    name: str
    """Short name, `pkg.mod:Class` or `file.py:Class`."""
    kwargs: dict[str, Any]
    run_seed: int
    imports: tuple[str, ...] = ()
    """Modules and files to import first."""
    step_seconds: float = 30.0
    start_seconds: float = 300.0
    slow_seconds: float = 1.0
    """A batch that lasts longer begins no further call: what is left of it goes to another process."""
    held_out: int = 0
    """Held-out prompts to ask for."""
    prompts: int = 0
    """Distinct training prompts to use; 0: the environment's own number."""

    def __post_init__(self) -> None:
        # well below the time limit, so that calls that reach it have run together and not one after the other
        object.__setattr__(self, "slow_seconds", min(self.slow_seconds, self.step_seconds / 4))


class TaskInfo(NamedTuple):
    """What a child says about its environment once it is made."""

    size: int | None
    """Distinct training prompts; None: endless."""
    held_out: int
    """Held-out prompts there are, at most as many as were asked for."""
    multi_turn: bool
    """Whether the environment answers the policy, so that `respond` has to be called."""
    tools: tuple[ToolSpec, ...] = ()
    """What the policy may call."""
    scores_groups: bool = False
    """Whether the rubric compares the rollouts of a group, so that `SCORE_GROUP` has to be called."""
    plays: bool = False
    """Whether a program of the environment plays its rollouts, so that `play` has to be called."""


class CallKind(StrEnum):
    EXAMPLE = "example"
    """→ `Asked`."""
    RESPOND = "respond"
    """→ (messages, done, pickled state)."""
    CALL_TOOLS = "tool calls"
    """→ one message of role "tool" per tool call of the last message."""
    SCORE = "score"
    """→ (reward, parts)."""
    SCORE_GROUP = "score of the group"
    """→ one (reward, parts) per conversation of `group`."""
    CHECK = "check"
    """→ TaskCheck, for which `prompt_index` training prompts are compared with the held-out ones."""
    DEMONSTRATE = "demonstrate"
    """→ (prompt, messages that follow it), two tuples of Message. `prompt_index` is the demonstration's number."""


class Asked(NamedTuple):
    """An example, as far as the worker may see it."""

    prompt: tuple[Message, ...]
    wanted: str = ""
    """Its answer as text, for a person to read; of a held-out example only."""


class TaskCheck(NamedTuple):
    """What a look at a task's prompts found."""

    training: tuple[tuple[Message, ...], ...]
    """The first prompts of the stream."""
    held_out: tuple[tuple[Message, ...], ...]
    held_out_again: tuple[tuple[Message, ...], ...]
    """What a second call gave."""
    overlap: tuple[int, int] | None
    """A training prompt and the held-out prompt that it equals."""
    answers: tuple[str, str]
    """Of the first training prompt and the first held-out one, where they are texts or numbers."""


class Conversation(NamedTuple):
    """One finished conversation of a group."""

    messages: tuple[Message, ...]
    finish_reasons: tuple[FinishReason, ...]
    state: bytes | None
    """Pickled by the child that made it."""


class Call(NamedTuple):
    """One call of user code about one prompt, or one conversation over it."""

    kind: CallKind
    purpose: Purpose
    prompt_index: int
    """In the training stream or the held-out list."""
    messages: tuple[Message, ...] = ()
    finish_reasons: tuple[FinishReason, ...] = ()
    state: bytes | None = None
    """Pickled by the child that made it."""
    group: tuple[Conversation, ...] = ()

    def __str__(self) -> str:
        if self.kind is CallKind.CHECK:
            return "a look at its prompts"
        return f"{self.kind} of {self.purpose} prompt {self.prompt_index}"

    @property
    def prompt(self) -> tuple[Purpose, int]:
        return self.purpose, self.prompt_index


class Answer(NamedTuple):
    """What came of the call at `position` of the batch."""

    position: int
    error: str
    """Non-empty when user code failed."""
    value: Any = None


class ProgressCell:
    """Two words of memory shared by worker and child: which call runs, and since when.

    The clock is CLOCK_MONOTONIC, the same in all processes of a host.
    """

    NOBODY = -1
    _BYTES = 16

    def __init__(self, fd: int):
        self.fd = fd
        self._memory = mmap.mmap(fd, self._BYTES)
        self._words = memoryview(self._memory).cast("q")

    @classmethod
    def create(cls) -> ProgressCell:
        fd = os.memfd_create("titan_rl_progress")
        os.ftruncate(fd, cls._BYTES)
        return cls(fd)

    def mark(self, position: int) -> None:
        """The call at `position` (or `NOBODY`) runs from now on."""
        # the time first: a reader in between sees an old position that seems young, and lets it be
        self._words[1] = time.monotonic_ns()
        self._words[0] = position

    def read(self) -> tuple[int, float]:
        """(position, seconds since it was marked)."""
        return self._words[0], (time.monotonic_ns() - self._words[1]) / 1e9

    def close(self) -> None:
        self._words.release()
        self._memory.close()
        os.close(self.fd)
