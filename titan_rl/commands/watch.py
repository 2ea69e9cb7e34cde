"""`titan-rl watch RUN`: the newest recorded rollouts, in a terminal, while the run goes on.

It only reads `RUN/rollouts.jsonl`. What a policy wrote cannot control the terminal: control characters are shown.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from titan_rl.errors import ConfigError
from titan_rl.launch.resume import CONFIG, lock_run
from titan_rl.observability.recorder import ROLLOUTS, records_in
from titan_rl.one_line import one_line
from titan_rl.overrides import Command, Verb

PAUSE_SECONDS = 1.0
"""Between two looks at the file."""

LONGEST_LINE = 2000
"""Characters of one line of a message."""

COLOURS = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}

ABOUT = """
usage: {prog} RUN [--once]

Show the rollouts that a run records: what was said, the reward, why it ended. Goes on while the run does; Ctrl-C ends
it. RUN is a run directory, or one that holds run directories: then it is the newest of them."""

Record = Mapping[str, Any]


def main(argv: Sequence[str], *, prog: str) -> int:
    """Show rollouts; returns the exit code."""
    words = list(argv)
    run = words.pop(0) if words and not words[0].startswith("-") else "runs"

    def act(command: Command, prog: str) -> int:
        if command.given:
            raise ConfigError(f"takes no settings; leave out {', '.join(sorted(command.given))}")
        console = Console()
        file = newest_run(Path(run)) / ROLLOUTS
        try:
            for records in _looks(file, once="--once" in command.flags):
                for record in newest(records):
                    console.print(rendered(record), soft_wrap=True)
        except KeyboardInterrupt:
            pass
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"{file} cannot be read: {type(error).__name__}: {error}") from error
        return 0

    return Verb(act=act, about=ABOUT, options={"--once": "show what is there, and end"}).run(words, prog=prog)


def newest_run(directory: Path) -> Path:
    """`directory` itself, if it is a run, else the newest run in it. Raises ConfigError if there is none."""
    directory = directory.expanduser()
    if (directory / CONFIG).is_file():
        return directory
    runs = sorted(directory.glob(f"*/{CONFIG}"), key=lambda config: config.stat().st_mtime)
    if not runs:
        raise ConfigError(f"{directory} is no run directory, and holds none")
    return runs[-1].parent


def newest(records: Sequence[Record]) -> list[Record]:
    """Those of the last step, and of the last evaluation, in the order of the file."""
    last = {record["purpose"]: record["step"] for record in records}
    return [record for record in records if record["step"] == last[record["purpose"]]]


def rendered(record: Record) -> Text:
    """One rollout for a person to read."""
    what = f"{record['purpose']}, step {record['step']}, group {record['group']}, sample {record['sample']}"
    tokens = sum(turn["tokens"] for turn in record["turns"])
    end = f"reward {record['reward']:.3f}, {record['stop_reason']}, {tokens} tokens"
    text = Text(f"── {', '.join(record['kept'])} ── {what} ── {end}\n", style="bold")
    if record["error"]:
        text.append(f"  {one_line(record['error'], LONGEST_LINE)}\n", style="not bold red")
    for message in record["messages"]:
        said = [*(message.get("reasoning"), message["content"]), *map(_call, message.get("tool_calls", ()))]
        name = f" {message['name']}" if "name" in message else ""
        text.append(f"  {message['role']}{name}: ", style=f"not bold {COLOURS.get(message['role'], 'blue')}")
        text.append(_indented("\n".join(filter(None, said))) + "\n", style="not bold")
    if not record["messages"]:  # finished before the run was resumed
        tokens_as_text = "\n\n".join("".join(branch["texts"]) for branch in record["branches"])
        text.append(f"  {_indented(tokens_as_text)}\n", style="not bold")
    if record["wanted"]:
        text.append(f"  wanted: {record['wanted']}\n", style="not bold dim")
    return text


def _call(call: Record) -> str:
    return call.get("raw") or f"{call['name']}({json.dumps(call['arguments'])})"


def _indented(text: str) -> str:
    return "\n    ".join(one_line(line, LONGEST_LINE) for line in text.split("\n"))


def _looks(path: Path, *, once: bool) -> Iterator[list[Record]]:
    """What is new at each look, until the run is over."""
    start = 0
    while True:
        over = once or _is_over(path.parent)  # before the look, so that nothing is missed
        if path.exists():
            with open(path, "rb") as file:
                file.seek(start if start <= path.stat().st_size else 0)  # it was cut: the run went on from a checkpoint
                yield [*records_in(file)]
                start = file.tell()
        if over:
            return
        time.sleep(PAUSE_SECONDS)


def _is_over(run: Path) -> bool:
    try:
        os.close(lock_run(run))
    except ConfigError:
        return False
    return True
