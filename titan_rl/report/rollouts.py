"""Rollouts for the page: the facts of each, its tokens as a graph, and which of them fit.

- A token that several branches share is stored once. It is shown as the branch that trains it has it.
- Where not all rollouts fit, every step keeps some: the first of each step come before the second of any.
- A chunk holds some rollouts and is compressed by itself, so that the page opens only those that are looked at.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from titan_rl.one_line import one_line

PREVIEW = 60
"""Characters of an answer in the list of rollouts."""
CHUNK = 100_000
"""Characters of JSON in a chunk; opening one takes some milliseconds."""

PER_TOKEN = ("token_ids", "texts", "trained", "logprobs", "trainer_logprobs", "weights", "versions")

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Facts:
    """What the list and the findings need of a rollout."""

    offset: int
    """Of its line in the file."""
    step: int
    evaluated: bool
    group: int
    attempt: int
    sample: int
    kept: tuple[str, ...]
    reward: float
    advantage: float | None
    stop: str
    error: str
    wanted: str
    prompt: str
    """The last message before the policy's first."""
    answer: str
    """The policy's last message."""
    tokens: int
    """Sampled by the policy."""
    gap: float | None
    """Largest difference between the logprobs of trainer and generator; None: there is none."""

    @classmethod
    def of(cls, record: Record, offset: int) -> Facts:
        branches = record["branches"]
        for branch in branches:
            lists = [branch["token_ids"], branch["trained"], *(branch.get(name) for name in PER_TOKEN)]
            if len({len(each) for each in lists if each is not None}) != 1:
                raise ValueError(f"the lists of a branch differ in length: group {record['group']}")
        gaps = [gap for branch in branches for gap in _gaps(branch) if gap is not None]
        messages = record["messages"]
        said = [at for at, message in enumerate(messages) if message.get("role") == "assistant"]
        asked = (said[0] if said else len(messages)) - 1
        return cls(
            offset=offset,
            step=int(record["step"]),
            evaluated=record["purpose"] != "train",
            group=int(record["group"]),
            attempt=int(record.get("attempt") or 0),
            sample=int(record["sample"]),
            kept=tuple(map(str, record.get("kept") or ())),
            reward=float(record["reward"]),
            advantage=record.get("advantage"),
            stop=str(record.get("stop_reason") or ""),
            error=str(record.get("error") or ""),
            wanted=str(record.get("wanted") or "") if messages else "",  # a group that was restored has no answer here
            prompt=str(messages[asked].get("content") or "") if asked >= 0 else "",
            answer=str(messages[said[-1]].get("content") or "") if said else "",
            tokens=sum(int(turn.get("tokens") or 0) for turn in record.get("turns") or ())
            or sum(sum(map(bool, branch["trained"])) for branch in branches),
            gap=max(map(abs, gaps)) if gaps else None,
        )


def _gaps(branch: Record) -> list[float | None]:
    """Trainer's minus generator's logprob of every token that has both."""
    theirs, ours = branch.get("logprobs"), branch.get("trainer_logprobs")
    if not theirs or not ours:
        return []
    return [None if a is None or b is None else b - a for a, b in zip(theirs, ours, strict=False)]


def in_turns(facts: Sequence[Facts]) -> list[Facts]:
    """The first of every step, then the second of every step, …; training and evaluation apart."""
    ordered = sorted(facts, key=lambda each: (each.evaluated, each.step))
    ranked = [
        (rank, number, each)
        for number, (_, same) in enumerate(groupby(ordered, key=lambda each: (each.evaluated, each.step)))
        for rank, each in enumerate(same)
    ]
    return [each for _, _, each in sorted(ranked, key=lambda entry: entry[:2])]


def chunks(
    facts: Sequence[Facts], read: Callable[[Facts], Record], most_bytes: int
) -> Iterator[tuple[list[Facts], str]]:
    """Rollouts with their packed details, until `most_bytes` are full."""
    used = size = 0
    chunk: list[Facts] = []
    details: list[str] = []
    for number, each in enumerate(facts):
        text = json.dumps(detail(read(each)), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        chunk.append(each)
        details.append(text)
        size += len(text)
        if size >= CHUNK or number == len(facts) - 1:
            block = packed(f"[{','.join(details)}]")
            used += len(block)
            if used > most_bytes:
                return
            yield chunk, block
            chunk, size, details = [], 0, []


def detail(record: Record) -> Record:
    """What the page shows of one rollout when it is chosen."""
    segments, leaves = graph(record["branches"])
    return {
        "messages": record["messages"],
        "turns": record.get("turns") or [],
        "parts": record.get("reward_parts") or {},
        "segments": segments,
        "branches": [
            {"sample": branch.get("sample"), "end": leaf}
            for branch, leaf in zip(record["branches"], leaves, strict=True)
        ],
    }


def graph(branches: Sequence[Record]) -> tuple[list[Record], list[int]]:
    """The token graph of some branches: segments, each after its parent, and the last segment of every branch.

    >>> shared = {"token_ids": [1, 2, 3], "trained": [0, 0, 1]}
    >>> segments, leaves = graph([shared, {"token_ids": [1, 2, 9], "trained": [0, 0, 1]}])
    >>> [(each["parent"], each["ids"]) for each in segments], leaves
    ([(-1, [1, 2]), (0, [3]), (0, [9])], [1, 2])
    """
    segments: list[Record] = []
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
            ids, trained = branches[member]["token_ids"], branches[member]["trained"]
            if len(ids) == end:
                leaves[member] = here
            else:  # equal tokens that were both sampled are two samples
                apart.setdefault((ids[end], member if trained[end] else -1), []).append(member)
        todo += [(rest, end, here) for rest in reversed(apart.values())]
    return segments, leaves


def _common(branches: Sequence[Record], members: Sequence[int], start: int) -> int:
    """Where the members, equal up to `start`, stop being equal."""
    if len(members) == 1:
        return len(branches[members[0]]["token_ids"])
    end = start
    for tokens in zip(*(branches[member]["token_ids"][start:] for member in members), strict=False):
        if len({*tokens}) > 1 or sum(bool(branches[member]["trained"][end]) for member in members) > 1:
            break
        end += 1
    return end


def _segment(members: Sequence[Record], start: int, end: int, parent: int) -> Record:
    """Tokens `start` to `end`. Where one member trains a token, its values count."""
    where = range(start, end)
    owners = [next((each for each in members if each["trained"][at]), members[0]) for at in where]

    def column(name: str) -> list[Any]:
        return [each[name][at] if each.get(name) else None for each, at in zip(owners, where, strict=True)]

    generator, trainer = column("logprobs"), column("trainer_logprobs")
    gaps = [None if a is None or b is None else _short(b - a, 3) for a, b in zip(generator, trainer, strict=True)]
    return {
        "parent": parent,
        "ids": members[0]["token_ids"][start:end],
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


def preview(text: str) -> str:
    return one_line(text, PREVIEW)
