"""Conversations on a terminal: messages as they are said, tools, and how a rollout ended.

What a policy or a task wrote cannot control the terminal: control characters are shown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.text import Text

from titan_rl.one_line import printable
from titan_rl.rollout.report import Rollout
from titan_rl.types import Message, ToolSpec

_STYLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}
_WIDTH = max(map(len, _STYLES)) + 2


def show_messages(console: Console, messages: Sequence[Message]) -> None:
    """Each with its role in front; reasoning dim, tool calls as `name(argument=…)`."""
    for message in messages:
        style = _STYLES.get(message.role, "")
        parts = [
            _text(message.reasoning, "dim italic") if message.reasoning else None,
            _text(message.content, style) if message.content else None,
            *(_text(written(call.name, call.arguments, call.raw), "bold " + style) for call in message.tool_calls),
        ]
        lines = Text("\n").join([part for part in parts if part is not None] or [Text("(nothing)", "dim")])
        for number, line in enumerate(lines.split("\n")):
            head = message.role if number == 0 else ""
            console.print(Text(head.ljust(_WIDTH), f"bold {style}") + line, soft_wrap=True)


def _text(text: str, style: str) -> Text:
    return Text("\n".join(map(printable, text.split("\n"))), style)


def written(name: str, arguments: Mapping[str, object], raw: str = "") -> str:
    """A tool call for a person to read."""
    given = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False, default=str)}" for key, value in arguments.items())
    return raw or f"→ {name}({given})"


def show_tools(console: Console, tools: Sequence[ToolSpec]) -> None:
    """A line per tool: name, arguments and what it does."""
    for tool in tools:
        arguments = ", ".join(tool.parameters.get("properties", {}))
        about = tool.description.strip().partition("\n")[0]
        console.print(Text(f"  {tool.name}({arguments})", "yellow") + Text(f"  {about}", "dim"), soft_wrap=True)


def show_end(console: Console, rollout: Rollout, *, wanted: str = "") -> None:
    """Reward with its parts and the reason why it ended; or what failed."""
    if rollout.error:
        console.print(Text("error".ljust(_WIDTH), "bold red") + Text(printable(rollout.error)), soft_wrap=True)
        console.print(Text(" " * _WIDTH + f"stopped: {rollout.stop_reason}; not graded", "dim"), soft_wrap=True)
        return
    parts = ", ".join(f"{name} {value:g}" for name, value in rollout.reward_parts.items())
    line = Text("reward".ljust(_WIDTH), "bold") + Text(f"{rollout.reward:.3f}", "bold magenta")
    line += Text(f"  ({parts})" if parts else "") + Text(f"  stopped: {rollout.stop_reason}", "dim")
    if wanted and rollout.reward < 1:
        line += Text(f"  wanted: {printable(wanted)}", "dim")
    console.print(line, soft_wrap=True)
