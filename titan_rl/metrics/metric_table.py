"""Every number of `metrics.jsonl`, TensorBoard and W&B: its unit, its meaning, what a bad value looks like, what to do.

The table is `metrics.toml`. The report shows it beside each curve, and makes its findings of the limits. A new metric
is a line where it is measured, and a few lines there under the same name. Tests hold that every key that a run writes
is there, and that every entry without a `when` is in every run.
"""

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import tomli


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    """As in `metrics.jsonl`; `<…>` stands for one part of a name that differs from run to run."""
    meaning: str
    unit: str = ""
    """"s", "tokens", "nats", "bytes", …; "share" is 0..1; empty: a plain number."""
    bad: str = ""
    """What a bad value looks like, "{limit}" being the limit; empty: none is bad by itself."""
    do: str = ""
    change: dict[str, float | str] = field(default_factory=dict)
    """Settings: by what to multiply them, or what to set them to. A finding says what that is in its run."""
    when: str = ""
    """Which runs have it; empty: every run that finishes a step."""
    above: float | None = None
    """The report warns of a run whose mean over the last third of its steps is above this limit."""
    below: float | None = None
    """The same, below."""
    title: str = ""
    """Of that finding; empty: it is named by the metric."""

    @property
    def limit(self) -> float | None:
        return self.above if self.below is None else self.below


@cache
def metric_of(name: str) -> Metric | None:
    """The entry of a key such as `fleet/generator0/load`; None: there is none."""
    return next((each for each in METRICS if re.fullmatch(re.sub("<[^>]+>", "[^/]+", each.name), name)), None)


_TABLE: dict[str, dict[str, Any]] = tomli.loads(Path(__file__).with_name("metrics.toml").read_text(encoding="utf-8"))

METRICS = tuple(Metric(name, **fields) for name, fields in _TABLE.items())
