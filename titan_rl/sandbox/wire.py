"""What travels between a rollout worker, the host of its environment, and the processes forked from that host.

- A frame is its length (8 bytes, little endian) and a pickle. Frames hold plain data of this package only: whatever
  user code made (a state, an exception) crosses as bytes or text, so the worker never imports user code to read one.
- Worker → host: `EnvironmentSetup`, then `Fork` and `Kill`. Host → worker: `TaskInfo` or an error, then `Ended`.
- Worker → forked process: lists of `(number, Call)`. Back: one `Answer` per call as soon as it is there, and None after
  each list whose calls run one after the other.
"""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from titan_rl.types import Endpoint, FinishReason, Message, Purpose, ToolSpec

LONGEST_SHOWN = 160
"""Characters of a prompt, an answer or a wanted answer that a person is shown."""

_LENGTH = struct.Struct("<Q")


def pack_frame(message: Any) -> bytes:
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Bytes in, whole messages out."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that `data` completes."""
        self._received += data
        messages, start = [], 0
        while len(self._received) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received, start)
            end = start + _LENGTH.size + length
            if len(self._received) < end:
                break
            messages.append(pickle.loads(self._received[start + _LENGTH.size : end]))
            start = end
        del self._received[:start]
        return messages


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSetup:
    """Everything that is needed to make the environment; a host that is started anew gets the same."""

    name: str
    """Short name, `pkg.mod:Class` or `file.py:Class`."""
    kwargs: dict[str, Any]
    run_seed: int
    imports: tuple[str, ...] = ()
    """Modules and files to import first."""
    step_seconds: float = 30.0
    start_seconds: float = 300.0
    slow_seconds: float = 0.25
    """After a call that takes longer, what waits behind it goes to another process."""
    held_out: int = 0
    """Held-out prompts to ask for."""
    prompts: int = 0
    """Distinct training prompts to use; 0: the environment's own number."""

    def __post_init__(self) -> None:
        # well below the time limit, so that calls that reach it have run together and not one after the other
        object.__setattr__(self, "slow_seconds", min(self.slow_seconds, self.step_seconds / 4))


class CallKind(StrEnum):
    EXAMPLE = "example"
    """→ `ExamplePrompt`."""
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
    PLAY = "play"
    """→ the pickled state that the program returned; None where it returned None."""


class TaskInfo(NamedTuple):
    """What a host says about its environment once it is made."""

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
    asynchronous: frozenset[CallKind] = frozenset()
    """Kinds of calls that run `async def` functions, many at a time in one process."""


class ExamplePrompt(NamedTuple):
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
    """Pickled by the process that made it."""


class Call(NamedTuple):
    """One call of user code about one prompt, or one conversation over it."""

    kind: CallKind
    purpose: Purpose
    prompt_index: int
    """In the training stream or the held-out list."""
    messages: tuple[Message, ...] = ()
    finish_reasons: tuple[FinishReason, ...] = ()
    state: bytes | None = None
    """Pickled by the process that made it."""
    group: tuple[Conversation, ...] = ()
    endpoint: Endpoint | None = None
    """Where a program that plays finds the policy."""

    def __str__(self) -> str:
        if self.kind is CallKind.CHECK:
            return "a look at its prompts"
        return f"{self.kind} of {self.purpose} prompt {self.prompt_index}"

    @property
    def prompt(self) -> tuple[Purpose, int]:
        return self.purpose, self.prompt_index


class Failure(NamedTuple):
    """An exception of user code as text."""

    place: str
    """The same for exceptions of one type from one line."""
    description: str
    """One line."""
    traceback: str


class Answer(NamedTuple):
    """What came of a call."""

    number: int
    value: Any = None
    failure: Failure | None = None
    """Not None when user code failed."""


class Fork(NamedTuple):
    """Make a process that answers calls on the socket that comes along with this frame; answered by one `Ended`."""

    number: int
    """Names the process; never used again."""


class Kill(NamedTuple):
    """End a process; of one that has ended already, nothing. Its `Ended` comes all the same."""

    number: int


class Ended(NamedTuple):
    """A process is gone, and all that it started."""

    number: int
    how: str
    """In words, such as "exited with code 3"."""
