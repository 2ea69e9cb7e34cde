"""The newest rollouts of a run, as the live display shows them: read from the end of `rollouts.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from titan_rl.one_line import one_line

TAIL_BYTES = 1 << 20
"""Of the file that are read: a longer rollout is not shown."""
SHOWN = 3
"""Rollouts."""
LONGEST_MESSAGE = 240
"""Characters."""


def newest(path: Path, count: int = SHOWN) -> list[dict[str, Any]]:
    """The rollouts of the newest step in the file, at most so many; none where there is no file."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().split(b"\n")[0 if size <= TAIL_BYTES else 1 : -1]
    except OSError:
        return []
    found: list[dict[str, Any]] = []
    for line in reversed(lines):
        record = json.loads(line)
        if len(found) == count or (found and record["step"] != found[0]["step"]):
            break
        found.append(record)
    return found[::-1]


def draw_rollouts(records: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Each with its reward, why it ended, and its messages in one line each."""
    if not records:
        return Text("no rollouts are recorded yet", style="dim")
    table = Table.grid(padding=(0, 2))
    for record in records:
        table.add_row(Text(f"{record['reward']:.3f}", style="bold"), _about(record))
        for message in record["messages"]:
            style = "cyan" if message["role"] == "assistant" else ""
            table.add_row(Text(message["role"], style="dim"), Text(_said(message), style=style))
    return table


def _about(record: Mapping[str, Any]) -> Text:
    about = f"step {record['step']}, {record['purpose']} group {record['group']}, sample {record['sample']}"
    kept = f" ({', '.join(record['kept'])})" if record["kept"] else ""
    wanted = f", wanted {one_line(str(record['wanted']), LONGEST_MESSAGE)!r}" if record["wanted"] else ""
    return Text(f"{about}{kept}: {record['error'] or record['stop_reason']}{wanted}", style="dim")


def _said(message: Mapping[str, Any]) -> str:
    calls = (
        each.get("raw") or f"{each['name']}({json.dumps(each['arguments'])})" for each in message.get("tool_calls", ())
    )
    return one_line(" ".join(filter(None, (message.get("reasoning"), message["content"], *calls))), LONGEST_MESSAGE)
