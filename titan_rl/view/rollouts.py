"""Rollouts for the page: the record of each, its tokens as a graph, and which of them fit.

- A token that several branches share is stored once. It is shown as the branch that trains it has it.
- Where not all rollouts fit, every step keeps some: the first of each step come before the second of any.
- A chunk holds some rollouts and is compressed by itself, so that the page opens only those that are looked at.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec

from titan_rl.metrics.rollout_record import BranchRecord, RolloutRecord, read_record

CHUNK = 100_000
"""Characters of JSON in a chunk; opening one takes some milliseconds."""

PER_TOKEN = ("token_ids", "texts", "trained", "logprobs", "trainer_logprobs", "weights", "versions")

Segment = dict[str, Any]


class ListedRollout(RolloutRecord, frozen=True, kw_only=True):
    """A record of the file without its tokens: what the list and the findings need."""

    offset: int
    """Of its line in the file."""
    prompt: str
    """The last message before the policy's first."""
    answer: str
    """The policy's last message."""
    gap: float | None
    """Largest difference between the logprobs of trainer and generator; None: there is none."""


def read_listed(line: Mapping[str, Any], offset: int) -> ListedRollout:
    """Raises ValueError or LookupError where a line of the file is no rollout."""
    record = read_record(line)
    if not math.isfinite(record.reward):
        raise ValueError(f"a reward that is not finite: group {record.group}")
    for branch in record.branches:
        if len({len(each) for name in PER_TOKEN if (each := getattr(branch, name)) is not None}) != 1:
            raise ValueError(f"the lists of a branch differ in length: group {record.group}")
    gaps = [gap for branch in record.branches for gap in _gaps(branch) if gap is not None]
    messages = record.messages
    answers = [at for at, message in enumerate(messages) if message.get("role") == "assistant"]
    asked = (answers[0] if answers else len(messages)) - 1
    numbers = msgspec.structs.asdict(record) | {"messages": [], "side_conversations": [], "turns": [], "branches": []}
    if not messages:
        numbers["wanted"] = ""  # a group that was restored has no answer here
    return ListedRollout(
        **numbers,
        offset=offset,
        prompt=str(messages[asked].get("content") or "") if asked >= 0 else "",
        answer=str(messages[answers[-1]].get("content") or "") if answers else "",
        gap=max(map(abs, gaps)) if gaps else None,
    )


def _gaps(branch: BranchRecord) -> list[float | None]:
    """Trainer's minus generator's logprob of every token that has both."""
    pairs = zip(branch.logprobs or (), branch.trainer_logprobs or (), strict=False)
    return [None if a is None or b is None else b - a for a, b in pairs]


def round_robin(rollouts: Sequence[ListedRollout]) -> list[ListedRollout]:
    """The first of every step, then the second of every step, …; training and evaluation apart."""
    ordered = sorted(rollouts, key=lambda each: (each.evaluated, each.step))
    ranked = [
        (rank, number, each)
        for number, (_, same) in enumerate(groupby(ordered, key=lambda each: (each.evaluated, each.step)))
        for rank, each in enumerate(same)
    ]
    return [each for _, _, each in sorted(ranked, key=lambda entry: entry[:2])]


def chunks(
    rollouts: Sequence[ListedRollout], read: Callable[[ListedRollout], RolloutRecord], most_bytes: int
) -> Iterator[tuple[list[ListedRollout], str]]:
    """Rollouts with their packed details, until `most_bytes` are full."""
    used = size = 0
    chunk: list[ListedRollout] = []
    details: list[str] = []
    for number, each in enumerate(rollouts):
        text = json.dumps(detail(read(each)), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        chunk.append(each)
        details.append(text)
        size += len(text)
        if size >= CHUNK or number == len(rollouts) - 1:
            block = packed(f"[{','.join(details)}]")
            used += len(block)
            if used > most_bytes:
                return
            yield chunk, block
            chunk, size, details = [], 0, []


def detail(record: RolloutRecord) -> dict[str, Any]:
    """What the page shows of one rollout when it is chosen."""
    segments, leaves = graph(record.branches)
    finite = {name: value if math.isfinite(value) else None for name, value in record.reward_parts.items()}
    return {
        "messages": record.messages,
        "turns": msgspec.to_builtins(record.turns),
        "parts": finite,
        "segments": segments,
        "branches": [
            {"sample": branch.sample, "end": leaf} for branch, leaf in zip(record.branches, leaves, strict=True)
        ],
    }


def graph(branches: Sequence[BranchRecord]) -> tuple[list[Segment], list[int]]:
    """The token graph of some branches: segments, each after its parent, and the last segment of every branch.

    >>> segments, leaves = graph([BranchRecord([1, 2, 3], [0, 0, 1]), BranchRecord([1, 2, 9], [0, 0, 1])])
    >>> [(each["parent"], each["ids"]) for each in segments], leaves
    ([(-1, [1, 2]), (0, [3]), (0, [9])], [1, 2])
    """
    segments: list[Segment] = []
    leaves = [-1] * len(branches)
    todo = [(list(range(len(branches))), 0, -1)]
    while todo:
        members, start, parent = todo.pop()
        end = _common(branches, members, start)
        here = parent
        if end > start:
            here = len(segments)
            segments.append(_segment([branches[member] for member in members], start, end, parent))
        apart: dict[Any, list[int]] = {}
        for member in members:
            ids, trained = branches[member].token_ids, branches[member].trained
            if len(ids) == end:
                leaves[member] = here
            else:  # equal tokens that were both sampled are two samples
                apart.setdefault((ids[end], member if trained[end] else -1), []).append(member)
        todo += [(rest, end, here) for rest in reversed(apart.values())]
    return segments, leaves


def _common(branches: Sequence[BranchRecord], members: Sequence[int], start: int) -> int:
    """Where the members, equal up to `start`, stop being equal."""
    if len(members) == 1:
        return len(branches[members[0]].token_ids)
    end = start
    for tokens in zip(*(branches[member].token_ids[start:] for member in members), strict=False):
        if len({*tokens}) > 1 or sum(bool(branches[member].trained[end]) for member in members) > 1:
            break
        end += 1
    return end


def _segment(members: Sequence[BranchRecord], start: int, end: int, parent: int) -> Segment:
    """Tokens `start` to `end`. Where one member trains a token, its values count."""
    where = range(start, end)
    owners = [next((each for each in members if each.trained[at]), members[0]) for at in where]

    def column(name: str) -> list[Any]:
        lists = (getattr(each, name) for each in owners)
        return [values[at] if values else None for values, at in zip(lists, where, strict=True)]

    generator, trainer = column("logprobs"), column("trainer_logprobs")
    gaps = [None if a is None or b is None else _short(b - a, 3) for a, b in zip(generator, trainer, strict=True)]
    return {
        "parent": parent,
        "ids": members[0].token_ids[start:end],
        "texts": [text or "" for text in column("texts")],
        "trained": _runs([int(bool(value)) for value in column("trained")]),
        "logprobs": [None if value is None else _short(value, 4) for value in generator],
        "gaps": gaps if any(gap is not None for gap in gaps) else None,
        "weights": _runs([None if value is None else _short(value, 4) for value in column("weights")]),
        "versions": _runs([value or "" for value in column("versions")]),
    }


def _short(value: float, digits: int) -> float:
    """Significant digits that a reader can use; the file has all."""
    return float(f"{value:.{digits}g}")


def _runs(values: Sequence[Any]) -> list[Any]:
    """Value, count, value, count, …"""
    return [part for value, same in groupby(values) for part in (value, sum(1 for _ in same))]


def packed(text: str) -> str:
    """JSON as data inside HTML, whose letters can neither end a script element nor begin one, whatever a policy wrote.
    The inverse is `unpack` in page/base.js."""
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), compresslevel=6, mtime=0)).decode("ascii")
