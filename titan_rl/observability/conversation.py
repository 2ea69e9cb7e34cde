"""Recorded rollouts (`rollout.record`) for a person at a terminal: what was said, the reward, why it ended.

What a policy wrote cannot control the terminal: control characters are shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from titan_rl.one_line import counted, one_line

LONGEST_LINE, LONGEST_WANTED = 2000, 240
"""Characters of a line; of the wanted answer."""

Record = Mapping[str, Any]

_STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
_WIDTH = max(map(len, _STYLES)) + 2


def draw_rollout(record: Record) -> Text:
    """A whole rollout. Of one that was restored from a checkpoint the text of its tokens."""
    what = f"{record['purpose']}, step {record['step']}, group {record['group']}, sample {record['sample']}"
    tokens = sum(turn["tokens"] for turn in record["turns"])
    head = Text(f"── {', '.join(record['kept'])} ── {what} ── {counted(tokens, 'token')}", "bold")
    restored = [{"role": "", "content": "".join(branch["texts"])} for branch in record["branches"]]
    messages = draw_conversations(record) if record["messages"] else draw_messages(restored)
    return Text("\n").join(part for part in (head, messages, draw_end(record)) if part)


def draw_conversations(record: Record, *, seen: int = 0) -> Text:
    """All conversations of a rollout; the one that was graded is the last.

    Args:
        seen: messages of the graded one that are left out, if it is the only one.
    """
    sides = record.get("side_conversations", ())  # older records have none
    if not sides:
        return draw_messages(record["messages"][seen:])
    shown = []
    for number, messages in enumerate([*sides, record["messages"]]):
        graded = " (graded)" * (number == len(sides))
        shown += [Text(f"conversation {number + 1} of {len(sides) + 1}{graded}", "dim")]
        shown += [draw_messages(messages)]
    return Text("\n").join(shown)


def draw_messages(messages: Sequence[Record]) -> Text:
    """Each with its role in front; reasoning dim, tool calls as `→ name(argument=…)`."""
    shown = []
    for message in messages:
        style = _STYLES.get(message["role"], "blue")
        parts = [Text(_lines(text), how and f"{how} {style}" or style) for text, how in parts_of(message)]
        role = Text(f"{message['role']} {message.get('name', '')}".strip().ljust(_WIDTH - 1) + " ", f"bold {style}")
        shown.append(role + Text(f"\n{' ' * _WIDTH}").join(parts or [Text("(nothing)", "dim")]))
    return Text("\n").join(shown)


def parts_of(message: Record) -> Iterator[tuple[str, str]]:
    """Reasoning, content and tool calls of a message, as far as there are any; and how each is set."""
    if message.get("reasoning"):
        yield message["reasoning"], "dim italic"
    if message["content"]:
        yield message["content"], ""
    for call in message.get("tool_calls", ()):
        given = call["arguments"]
        named = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in given.items())
        yield call.get("raw") or f"→ {call['name']}({', '.join(named)})", "bold"


def draw_end(record: Record) -> Text:
    """Reward with its parts and the reason why it ended, or what failed; the wanted answer if it was not given."""
    wanted = f"  wanted: {one_line(record['wanted'], LONGEST_WANTED)}" if record["wanted"] else ""
    stopped = f"stopped: {record['stop_reason']}"
    if record["error"]:
        said = _lines(record["error"])
        return Text.assemble(
            ("error".ljust(_WIDTH), "bold red"), said, (f"\n{' ' * _WIDTH}{stopped}; not graded", "dim")
        )
    reward, parts = record["reward"], record["reward_parts"]
    told = ", ".join(name if value is None else f"{name} {value:g}" for name, value in parts.items())
    return Text.assemble(
        ("reward".ljust(_WIDTH), "bold"),
        ("not finite" if reward is None else f"{reward:.3f}", "bold magenta"),
        f"  ({told})" if told else "",
        (f"  {stopped}", "dim"),
        ("" if reward is not None and reward >= 1 else wanted, "dim"),
    )


def _lines(text: str) -> str:
    return f"\n{' ' * _WIDTH}".join(one_line(line, LONGEST_LINE) for line in text.split("\n"))
