"""Recorded rollouts for a person at a terminal: what was said, the reward, why it ended.

What a policy wrote cannot control the terminal: control characters are shown.
"""

import json
import math
from collections.abc import Iterator, Sequence
from itertools import takewhile

from rich.text import Text

from titan_rl.metrics.rollout_record import PlainMessage, RolloutRecord
from titan_rl.one_line import counted, one_line
from titan_rl.types import FinishReason

LONGEST_LINE, LONGEST_WANTED, LONGEST_TEXT = 2000, 240, 160
"""Characters of a line; of the wanted answer; of a transcript's prompt or answer."""

_STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
_WIDTH = max(map(len, _STYLES)) + 2


def draw_rollout(record: RolloutRecord) -> Text:
    """A whole rollout. Of one that was restored from a checkpoint the text of its tokens."""
    what = f"{record.purpose}, step {record.step}, group {record.group}, sample {record.sample}"
    head = Text(f"── {', '.join(record.kept)} ── {what} ── {counted(record.sampled_tokens, 'token')}", "bold")
    restored = [{"role": "", "content": "".join(branch.texts or ())} for branch in record.branches]
    messages = draw_conversations(record) if record.messages else draw_messages(restored)
    return Text("\n").join(part for part in (head, messages, draw_end(record)) if part)


def draw_conversations(record: RolloutRecord, *, seen: int = 0) -> Text:
    """All conversations of a rollout; the one that was graded is the last. If it is the only one, so many messages of
    it that were seen are left out."""
    sides = record.side_conversations
    if not sides:
        return draw_messages(record.messages[seen:])
    shown = []
    for number, messages in enumerate([*sides, record.messages]):
        graded = " (graded)" * (number == len(sides))
        shown += [Text(f"conversation {number + 1} of {len(sides) + 1}{graded}", "dim")]
        shown += [draw_messages(messages)]
    return Text("\n").join(shown)


def draw_messages(messages: Sequence[PlainMessage]) -> Text:
    """Each with its role in front; reasoning dim, tool calls as `→ name(argument=…)`."""
    shown = []
    for message in messages:
        style = _STYLES.get(message["role"], "blue")
        parts = [Text(_lines(text), how and f"{how} {style}" or style) for text, how in parts_of(message)]
        role = Text(f"{message['role']} {message.get('name', '')}".strip().ljust(_WIDTH - 1) + " ", f"bold {style}")
        shown.append(role + Text(f"\n{' ' * _WIDTH}").join(parts or [Text("(nothing)", "dim")]))
    return Text("\n").join(shown)


def parts_of(message: PlainMessage) -> Iterator[tuple[str, str]]:
    """Reasoning, content and tool calls of a message, as far as there are any; and how each is set."""
    if message.get("reasoning"):
        yield message["reasoning"], "dim italic"
    if message["content"]:
        yield message["content"], ""
    for call in message.get("tool_calls", ()):
        given = call["arguments"]
        named = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in given.items())
        yield call.get("raw") or f"→ {call['name']}({', '.join(named)})", "bold"


def draw_end(record: RolloutRecord) -> Text:
    """Reward with its parts and the reason why it ended, or what failed; the wanted answer if it was not given."""
    wanted = f"  wanted: {one_line(record.wanted, LONGEST_WANTED)}" if record.wanted else ""
    stopped = f"stopped: {record.stop_reason}"
    if record.error:
        end = f"\n{' ' * _WIDTH}failed: {record.failure}; {stopped}; not graded"
        return Text.assemble(("error".ljust(_WIDTH), "bold red"), _lines(record.error), (end, "dim"))
    parts = ", ".join(f"{name} {value:g}" for name, value in record.reward_parts.items())
    return Text.assemble(
        ("reward".ljust(_WIDTH), "bold"),
        (f"{record.reward:.3f}" if math.isfinite(record.reward) else "not finite", "bold magenta"),
        f"  ({parts})" if parts else "",
        (f"  {stopped}", "dim"),
        ("" if record.exact_match >= 1 else wanted, "dim"),
        (_turns(record), "dim"),
    )


def _turns(record: RolloutRecord) -> str:
    """Role and reward of each turn, where the task gave some."""
    rewards = ["" if turn.reward is None else f"{turn.reward:g}" for turn in record.turns]
    said = [f"{turn.role} {reward}".strip() for turn, reward in zip(record.turns, rewards, strict=True)]
    return f"\n{' ' * _WIDTH}turns: {', '.join(each or '–' for each in said)}" if any(said) else ""


def transcript(record: RolloutRecord) -> str:
    """A record of an evaluation in one line."""
    prompt = [*takewhile(lambda message: message["role"] != "assistant", record.messages)]
    verdict, answer = record.kept[0], _in_one_line(record.messages[len(prompt) :])
    cut = " (cut off)" if record.turns and record.turns[-1].finish == FinishReason.LENGTH else ""
    wanted = f", wanted '{record.wanted}'" if record.wanted and verdict == "wrong" else ""
    return f"{verdict}  '{_in_one_line(prompt)}' → '{answer}'{cut}{wanted}, reward {record.reward:.3f}"


def _in_one_line(messages: Sequence[PlainMessage]) -> str:
    texts = []
    for message in messages:
        role = f"{message['role']}: " if len(messages) > 1 else ""
        texts.append(role + " ".join(text for text, _ in parts_of(message)))
    return one_line("  ".join(texts), LONGEST_TEXT)


def _lines(text: str) -> str:
    return f"\n{' ' * _WIDTH}".join(one_line(line, LONGEST_LINE) for line in text.split("\n"))
