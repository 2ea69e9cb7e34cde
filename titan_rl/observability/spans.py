"""Reads the timelines of a run (`timeline`), and puts those of all hosts on one clock.

- What cannot be read is left out: the last line of a process that was killed, for example.
- The processes of one host share its clock. Hosts are aligned by their time of day.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from titan_rl.observability.json_lines import json_lines
from titan_rl.observability.timeline import MAIN, SPANS


class Recorded(NamedTuple):
    """One span."""

    name: str
    lane: str
    began: float
    """Seconds since the epoch."""
    seconds: float
    waits_for: str = ""
    """Empty: it is work."""
    ids: dict[str, Any] = {}

    @property
    def ended(self) -> float:
        return self.began + self.seconds


@dataclass(slots=True)
class Life:
    """One process, from its birth to its last write."""

    process: str
    mesh: str
    rank: int
    host: str
    pid: int
    epoch: float
    main: list[Recorded] = field(default_factory=list)
    """In order, without an overlap."""
    others: list[Recorded] = field(default_factory=list)

    @property
    def began(self) -> float:
        return self.main[0].began if self.main else 0.0

    @property
    def ended(self) -> float:
        return max((span.ended for span in (*self.main[-1:], *self.others)), default=0.0)

    @property
    def named_share(self) -> float:
        """How much of its wall time the main lane names."""
        seconds = self.ended - self.began
        return sum(span.seconds for span in self.main) / seconds if seconds else 1.0


def read_spans(run: Path) -> list[Life]:
    """All processes of a run, also those that were replaced, in order of their files' names."""
    lives = [life for file in sorted((run / SPANS).glob("*.jsonl")) for life in _lives(file)]
    epochs: dict[str, float] = {}
    for life in sorted(lives, key=lambda each: each.began):
        shift = epochs.setdefault(life.host, life.epoch)
        if abs(shift - life.epoch) > _BOOT_SECONDS:
            shift = epochs[life.host] = life.epoch
        life.main = [span._replace(began=span.began + shift) for span in life.main]
        life.others = [span._replace(began=span.began + shift) for span in life.others]
    return lives


_BOOT_SECONDS = 5.0
"""If the time of day at monotonic 0 moves by more, the host was started again: a run went on there."""


def _lives(file: Path) -> Iterator[Life]:
    life: Life | None = None
    for _, line in json_lines(file):
        with suppress(KeyError, TypeError):
            if "process" in line:
                if life is not None:
                    yield life
                life = Life(**line)
            elif life is not None:
                span = Recorded(line["n"], line["l"], line["t"], line["d"], line.get("w", ""), line.get("a", {}))
                (life.main if span.lane == MAIN else life.others).append(span)
    if life is not None:
        yield life
