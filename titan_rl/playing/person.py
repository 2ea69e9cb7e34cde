"""A policy that a person types, turn by turn."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from rich.console import Console

from titan_rl.errors import ConfigError, TitanError
from titan_rl.rollout.report import plain_message
from titan_rl.rollout.trajectory import extends
from titan_rl.types import FinishReason, GenerationRequest, Message, ToolCall, ToolSpec
from titan_rl.view.conversation import draw_messages

HOW_TO_TYPE = "type the policy's turns; a line that ends in \\ goes on; /TOOL NAME=VALUE … calls a tool; Ctrl-D ends"


class InputEnded(TitanError):
    """The person at the terminal has ended it."""


class Person:
    """A policy that a person types. Shows what was said meanwhile, each message once."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._echoes = sys.stdin.isatty()
        self.shown = 0
        """Messages of the conversation that were shown."""
        self._conversation: list[Message] = []
        self.ended = False
        self._typed: asyncio.Future[str | None] | None = None  # of the thread that reads a line
        self._one_at_a_time = asyncio.Lock()

    def begin(self) -> None:
        """The next rollout's conversation begins."""
        self.shown = 0
        self._conversation = []

    async def next_message(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], request: GenerationRequest
    ) -> tuple[Message, FinishReason]:
        """
        Raises:
            InputEnded: there is no further line.
        """
        async with self._one_at_a_time:  # what is shown last is what is answered
            if self.shown and not extends(messages, self._conversation[: self.shown]):
                self._show(self._conversation[self.shown :])
                # a program edited its history, or asks beside it
                self._console.print("another conversation:", style="dim")
                self.shown = 0
            self._show(messages[self.shown :])
            self.shown, self._conversation = len(messages), [*messages]
            while True:
                text = await self._line()
                try:
                    said = read_turn(text, tools)
                except ConfigError as error:
                    self._console.print(str(error), style="red", highlight=False, soft_wrap=True)
                    continue
                self.shown += self._echoes  # the terminal shows it
                self._conversation = [*messages, said]
                return said, FinishReason.STOP

    def _show(self, messages: Sequence[Message]) -> None:
        if messages:
            self._console.print(draw_messages([*map(plain_message, messages)]), soft_wrap=True)

    async def _line(self) -> str:
        """What is typed. It is read in a thread of its own, so that Ctrl-C and a program's time limit still work. What
        a turn did not wait for is the next turn's."""
        if self._typed is None:
            self._typed = self._read()
        text = await asyncio.shield(self._typed)
        self._typed = None
        if text is None:
            self.ended = True
            self._console.print()
            raise InputEnded("the input is over")
        return text

    def _read(self) -> asyncio.Future[str | None]:
        """The next line; None: there is none."""
        loop = asyncio.get_running_loop()
        typed: asyncio.Future[str | None] = loop.create_future()

        def read() -> None:
            try:
                lines = [input("assistant> " * self._echoes)]
                while lines[-1].endswith("\\"):
                    lines[-1] = lines[-1][:-1]
                    lines.append(input("         > " * self._echoes))
                text: str | None = "\n".join(lines)
            except (EOFError, OSError, ValueError):
                text = None
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(typed.set_result, text)

        threading.Thread(target=read, name="terminal", daemon=True).start()
        return typed


def read_turn(text: str, tools: Sequence[ToolSpec]) -> Message:
    r"""What somebody typed as a message: `/add first=1 second=2` or `/add {"first": 1}` calls a tool, all else is text.

    Raises:
        ConfigError: a call that cannot be read.
    """
    called = re.match(r"/(\w+)\s*(.*)", text, re.DOTALL)
    if called is None or not tools:
        return Message("assistant", text)
    name, rest = called.groups()
    known = {tool.name: tool for tool in tools}
    if name not in known:
        raise ConfigError(f"there is no tool {name!r}; there are {', '.join(known)}")
    try:
        arguments = json.loads(rest) if rest.startswith("{") else dict(_assignments(rest, known[name]))
    except ValueError as error:
        names = " ".join(f"{each}=…" for each in known[name].parameters.get("properties", {}))
        raise ConfigError(f"that call cannot be read ({error}): /{name} {names}") from error
    return Message("assistant", "", (ToolCall(name, arguments),))


def _assignments(text: str, tool: ToolSpec) -> Iterator[tuple[str, Any]]:
    """`first=1 second=2`; the value alone where the tool has one argument."""
    names = list(tool.parameters.get("properties", {}))
    for word in shlex.split(text):
        name, equals, value = word.partition("=")
        if not equals or name not in names:
            if len(names) != 1:
                raise ValueError(f"{word!r} is no NAME=VALUE of its arguments")
            name, value = names[0], text.strip()
        kind = tool.parameters["properties"][name].get("type", "string")
        yield name, value if kind == "string" else _value(value)
        if value == text.strip():
            return


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:  # for the tool to refuse, as it would the policy's
        return text
