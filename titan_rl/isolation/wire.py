"""Messages between a rollout worker, the fork server of its environment, and the processes that are forked from it.

- A frame is its length (8 bytes, little endian) and a body. The worker pickles what it sends: whoever reads that runs
  user code anyway. What processes of user code send is MessagePack, and the worker reads it as data of the expected
  types, up to a length: no bytes that user code may write can run code in the worker. Objects of user code (a state, an
  exception) travel as bytes or text, which the worker hands on and does not read.
- Worker → fork server: the path of imports and `EnvironmentSetup`, as a pickle; then one byte with the sockets of each
  fork. Back: `SetupResult`, and nothing after it.
- Worker → forked process: `(number, UserCall)`. Back: one `CallResult` per call, as soon as it is there.
"""

import pickle
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import msgspec

from titan_rl.environments.base import Demonstration, EnvironmentReply
from titan_rl.environments.rubric import LARGEST_REWARD, Transcript
from titan_rl.rollout.config import EnvironmentConfig
from titan_rl.types import Endpoint, Message, Purpose, ToolSpec

LONGEST_SHOWN = 160
"""Characters of a prompt, an answer or a reference answer that are displayed."""

LARGEST_RESULT = 16 << 20
"""Bytes. A longer one fails its call: rendering it would hold up all rollouts of the worker."""

T = TypeVar("T")

_LENGTH = struct.Struct("<Q")


def pack_order(message: Any) -> bytes:
    """A frame of the worker."""
    return _framed(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def pack_report(message: Any) -> bytes:
    """A frame of a process that runs user code. Raises what msgspec does where the message is no plain data."""
    return _framed(msgspec.msgpack.encode(message))


def _framed(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


class BadFrame(Exception):
    """A process of user code wrote something else than the messages that it may send."""


class Frames(Generic[T]):
    """Bytes in, whole messages out.

    Args:
        read: makes a message of a frame's body; `pickle.loads` only of what the worker wrote.
        longest: bytes of a body.
    """

    def __init__(self, read: Callable[[bytes], T], longest: float = float("inf")):
        self._read, self._longest = read, longest
        self._received = bytearray()

    def feed(self, data: bytes) -> Iterator[T]:
        """The messages that `data` completes. Raises BadFrame in the place of a bad one; what comes after it is no
        message either."""
        self._received += data
        start = 0
        while len(self._received) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received, start)
            if length > self._longest:
                raise BadFrame(f"a frame of {length} bytes; the bound is {self._longest:g}")
            end = start + _LENGTH.size + length
            if len(self._received) < end:
                break
            yield self._read(bytes(self._received[start + _LENGTH.size : end]))
            start = end
        del self._received[:start]


def reader(kind: Any) -> Callable[[bytes], Any]:
    """Reads the body of a report, or an answer's value, of this type; it raises BadFrame where that is another one."""
    decode = msgspec.msgpack.Decoder(kind).decode

    def read(body: bytes) -> Any:
        try:
            return decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise BadFrame(str(error)) from error

    return read


class CallKind(StrEnum):
    EXAMPLE = "example"
    """→ `ExamplePrompt`."""
    RESPOND = "respond"
    """→ `EnvironmentReply`, its state pickled."""
    CALL_TOOLS = "tool calls"
    """→ one message of role "tool" per tool call of the last message."""
    SCORE = "score"
    """→ (reward, parts)."""
    SCORE_GROUP = "score of the group"
    """→ one (reward, parts) per conversation of `group`."""
    CHECK = "check"
    """→ TaskCheck, with the first `prompt_index` training prompts."""
    DEMONSTRATE = "demonstrate"
    """→ `Demonstration`, of its answer only whether it has one. `prompt_index` is the demonstration's number."""
    CLEAN_UP = "clean-up"
    """→ None."""
    PLAY = "play"
    """→ the program's pickled state; None if it returned None."""


GRADING = frozenset({CallKind.SCORE, CallKind.SCORE_GROUP})
"""Calls that `environment.grade_seconds` bounds; `step_seconds` bounds the others, but for `PLAY`."""


@dataclass(kw_only=True, slots=True)
class EnvironmentSetup(EnvironmentConfig):
    """Everything needed to make the environment. A restarted fork server gets the same."""

    run_seed: int
    imports: tuple[str, ...] = ()
    """Modules and files to import first."""
    held_out: int = 0
    """Held-out prompts to ask for."""
    prompts: int = 0
    """Distinct training prompts to use; 0: the environment's own number."""

    def seconds(self, kind: CallKind) -> float:
        """Longest time of a call."""
        return self.grade_seconds if kind in GRADING else self.step_seconds

    def late(self, kind: CallKind) -> str:
        setting = "grade_seconds" if kind in GRADING else "step_seconds"
        return f"did not finish within {self.seconds(kind):g} s (environment.{setting})"


class TaskInfo(NamedTuple):
    """A fork server's description of the environment that it made."""

    size: int | None
    """Distinct training prompts; None: endless."""
    held_out: int
    """Number of held-out prompts, at most the requested number."""
    multi_turn: bool
    """Whether the environment defines `respond`, which answers the policy."""
    tools: tuple[ToolSpec, ...] = ()
    scores_groups: bool = False
    """Whether the rubric has group rewards, so that `SCORE_GROUP` must be called."""
    plays: bool = False
    """Whether the environment defines `play`, so that its program plays the rollouts."""
    cleans_up: bool = False
    """Whether the environment defines `clean_up`, so that `CLEAN_UP` must be called."""
    asynchronous: frozenset[CallKind] = frozenset()
    """Kinds of calls that run `async def` functions, many at a time in one process."""


class ExamplePrompt(NamedTuple):
    prompt: tuple[Message, ...]
    wanted: str = ""
    """Its reference answer as text, for display."""


Number = Annotated[float, msgspec.Meta(ge=-LARGEST_REWARD, le=LARGEST_REWARD)]


class TaskCheck(NamedTuple):
    training: tuple[tuple[Message, ...], ...]
    """The first prompts of the stream."""
    held_out: tuple[tuple[Message, ...], ...]
    held_out_again: tuple[tuple[Message, ...], ...]
    """The prompts that a second call returned."""
    answers: tuple[str, ...]
    """Reference answers of these training prompts, then of the first held-out one; "" if not a text or a number."""
    warning: str


class UserCall(NamedTuple):
    """One call of user code about one prompt, or one conversation over it, whose state is pickled by the process that
    made it."""

    kind: CallKind
    purpose: Purpose
    prompt_index: int
    """In the training stream or the held-out list."""
    conversation: Transcript = Transcript()
    group: tuple[Transcript, ...] = ()
    """All finished conversations of the prompt, for `SCORE_GROUP`."""
    endpoint: Endpoint | None = None

    def __str__(self) -> str:
        if self.kind is CallKind.CHECK:
            return "a look at its prompts"
        if self.kind is CallKind.DEMONSTRATE:
            return f"demonstration {self.prompt_index}"
        return f"{self.kind} of {self.purpose} prompt {self.prompt_index}"


class Failure(NamedTuple):
    """An exception of user code as text."""

    place: str
    """Equal for exceptions of the same type from the same line."""
    description: str
    """One line."""
    traceback: str
    late: bool = False
    """The call took longer than the time limit."""


class CallResult(NamedTuple):
    number: int
    value: msgspec.Raw = msgspec.Raw(b"\xc0")
    """To be read by `VALUES`; unread until then: None."""
    failure: Failure | None = None
    last: bool = False
    """Its memory was used up, and the process ends after it. What else it was sent can be asked of another one."""


_Score = tuple[Number, dict[str, float]]

VALUES = {
    CallKind.EXAMPLE: reader(ExamplePrompt),
    CallKind.RESPOND: reader(EnvironmentReply),
    CallKind.CALL_TOOLS: reader(tuple[tuple[Message, ...], bytes | None]),
    CallKind.SCORE: reader(_Score),
    CallKind.SCORE_GROUP: reader(tuple[_Score, ...]),
    CallKind.CHECK: reader(TaskCheck),
    CallKind.DEMONSTRATE: reader(Demonstration),
    CallKind.CLEAN_UP: reader(None),
    CallKind.PLAY: reader(bytes | None),
}

read_result = reader(CallResult)


class SetupResult(NamedTuple):
    """The fork server's first frame: the environment that it has made, or why it could not."""

    info: TaskInfo | None
    refusal: str = ""
    kind: Literal["task", "config", "absent"] = "task"
    """Whose fault that is: the environment's, its arguments', or something that is missing on this host."""


read_setup_result = reader(SetupResult)

FORKED = b"+"
"""A reaper's first word. What follows before the end of its stream is how the process ended, such as "exited with code
3"; without it the process could not be forked."""
