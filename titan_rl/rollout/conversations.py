"""Which conversation a list of messages goes on with, so that sampled tokens are never rendered again.

Two messages are equal if their role, text and tool calls (name and arguments) are equal: clients drop or invent other
fields, such as ids and reasoning. The beginning of a conversation is known if it consists of the messages of an
answered call and its answer, with the same tools. If several calls match, the latest one counts.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from titan_rl.chat.renderer import Renderer
from titan_rl.errors import TaskError
from titan_rl.types import Message, SamplingParams, ToolSpec


class Said(NamedTuple):
    """An answered call in tokens."""

    prompt: np.ndarray  # [T] int32
    sampled: np.ndarray  # [T] int32


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The position of a list of messages among the known conversations."""

    asked: bytes
    """Digest of all its messages."""
    tools: bytes
    """Digest of the tools."""
    known: int
    """How many messages are known: all up to and including the last assistant message, or 0."""
    said: Said | None
    """The tokens of the known messages."""
    goes_on: bool
    """Whether an assistant message follows the messages of an answered call: the program continues that conversation,
    even if it changed the answer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """The prompt of one or several choices."""

    token_ids: np.ndarray  # [T] int32
    messages: tuple[Message, ...] = ()
    """The same prompt as messages."""
    tools: Sequence[ToolSpec] | None = None
    """Of a chat. None: it is no chat, and no conversation can go on from it."""
    place: Place | None = None
    """The position of a chat's messages among the known conversations, if they were looked up."""
    anew: bool = False
    """See `Turn.anew`."""
    servable: dict[tuple[SamplingParams, int], SamplingParams] = field(default_factory=dict, repr=False)
    """Validated sampling parameters by what was asked for and the most tokens: the rollouts of a group ask alike."""


def first_prompt(renderer: Renderer, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Prompt:
    """The prompt of a conversation without sampled turns. Rollouts may share it."""
    token_ids = np.asarray(renderer.render(messages, tools), dtype=np.int32)
    return Prompt(token_ids=token_ids, messages=tuple(messages), tools=tools)


_digesting = threading.Lock()  # one for all sessions: each makes its own only where a conversation goes on


class Conversations:
    """The answered calls of one session. They are digested when the next one is looked up: most conversations have one
    turn only."""

    def __init__(self) -> None:
        self._said: dict[tuple[bytes, bytes], Said] = {}
        self._asked: set[bytes] = set()
        self._undigested: list[tuple[Prompt, Message, np.ndarray]] = []

    def remember(self, prompt: Prompt, answer: Message, sampled: np.ndarray) -> None:
        """Remember an answered call of a chat."""
        self._undigested.append((prompt, answer, sampled))

    def place(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Place:
        """Look the messages up. Raises TaskError if a call's arguments are nested too deeply."""
        with _digesting:
            while self._undigested:
                prompt, answer, sampled = self._undigested.pop(0)
                place = prompt.place or self._look_up(prompt.messages, prompt.tools or ())
                self._asked.add(place.asked)
                answered = _digest(place.asked, _meaning(answer))
                self._said[place.tools, answered] = Said(prompt.token_ids, sampled)
            return self._look_up(messages, tools)

    def _look_up(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Place:
        tools_digest = _digest(b"", [list(tool) for tool in tools])
        digest, digests, known, goes_on = b"", [b""], 0, False
        for number, message in enumerate(messages, start=1):
            if message.role == "assistant":
                known = number
                goes_on = goes_on or digest in self._asked
            digest = _digest(digest, _meaning(message))
            digests.append(digest)
        said = self._said.get((tools_digest, digests[known])) if known else None
        return Place(asked=digest, tools=tools_digest, known=0 if said is None else known, said=said, goes_on=goes_on)


def extends(longer: Sequence[Message], shorter: Sequence[Message]) -> bool:
    """Whether a conversation goes on with all messages of another one."""
    if len(longer) <= len(shorter):
        return False
    pairs = zip(longer, shorter, strict=False)
    return all(one is other or _meaning(one) == _meaning(other) for one, other in pairs)


def _meaning(message: Message) -> list[Any]:
    return [message.role, message.content, [[call.name, call.arguments] for call in message.tool_calls]]


def _digest(before: bytes, added: list[Any]) -> bytes:
    """Digest of a list that is extended by `added`; `before` is its digest without that."""
    try:
        text = json.dumps(added, sort_keys=True)
    except RecursionError as error:
        raise TaskError("the arguments of a tool call are nested too deeply") from error
    return hashlib.blake2b(before + text.encode(), digest_size=20).digest()
