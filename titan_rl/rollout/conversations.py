"""Finds the conversation that a program continues: messages in, the sampled tokens that they stand for out.

- Two messages are equal if their role, text and tool calls (name and arguments) are equal. Fields that clients drop or
  invent do not count: ids, names, refusals, reasoning.
- The beginning of a conversation is known if it consists of the messages of an answered call and its answer, with the
  same tools. Then the tokens of that call are used and nothing is rendered again. If several calls match, the latest
  one counts.

Pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from titan_rl.errors import TaskError
from titan_rl.types import Message, ToolSpec


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


class Conversations:
    """The answered calls of one session."""

    def __init__(self) -> None:
        self._said: dict[tuple[bytes, bytes], Said] = {}
        self._asked: set[bytes] = set()

    def place(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Place:
        """Look the messages up; remembers nothing. Raises TaskError if a call's arguments are nested too deeply."""
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

    def remember(self, place: Place, answer: Message, said: Said) -> None:
        """Remember an answered call."""
        self._asked.add(place.asked)
        self._said[(place.tools, _digest(place.asked, _meaning(answer)))] = said


def _meaning(message: Message) -> list[Any]:
    return [message.role, message.content, [[call.name, call.arguments] for call in message.tool_calls]]


def _digest(before: bytes, added: list[Any]) -> bytes:
    """Digest of a list that is extended by `added`; `before` is its digest without that."""
    try:
        text = json.dumps(added, sort_keys=True)
    except RecursionError as error:
        raise TaskError("the arguments of a tool call are nested too deeply") from error
    return hashlib.blake2b(before + text.encode(), digest_size=20).digest()
