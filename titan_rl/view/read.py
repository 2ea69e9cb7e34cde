"""What a run directory says, as plain data.

Files may be missing, cut off in the middle of a line, or from an older run. Whatever is there is read; a line that is
not whole JSON is left out. Values of other types than a run writes are not looked for.
"""

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import tomli

from titan_rl.directories import CONFIG, METRICS, SUMMARY
from titan_rl.metrics.json_lines import json_lines, json_object
from titan_rl.metrics.rollout_record import ROLLOUTS, RolloutRecord, read_record
from titan_rl.overrides import flat
from titan_rl.view.timelines import Timeline, read_timelines

MOST_ROLLOUTS_BYTES = 400 << 20
"""Of a larger `rollouts.jsonl` only every n-th line is parsed, so that a report takes seconds, not minutes."""

Series = dict[int, float | None]
"""One metric: step → value; None where it was NaN or infinite."""

PER_TOKEN = ("token_ids", "texts", "trained", "logprobs", "trainer_logprobs", "weights", "versions")


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
    last_turn: int = 0
    """Tokens that it sampled in its last turn; 0: nothing says."""


@dataclass(frozen=True)
class Run:
    directory: Path
    config: Mapping[str, Any]
    """Setting, as `trainer.optimizer.lr` → value."""
    summary: Mapping[str, Any]
    """Empty where the run is not done."""
    series: Mapping[str, Series]
    timelines: list[Timeline] = field(default_factory=list)
    rollouts: list[ListedRollout] = field(default_factory=list)
    """Of every recorded rollout, in the order of the file."""
    recorded: int = 0
    """Rollouts in the file; more than `rollouts` where the file is too large to parse whole."""

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def steps(self) -> int:
        """Finished optimizer steps."""
        return max(self.series.get("train/loss", ()), default=0)

    @cached_property
    def seconds(self) -> dict[int, float]:
        """Seconds since the start of the run's process, by step: what `seconds/step` adds up to."""
        spent = {step: value or 0.0 for step, value in self.series.get("seconds/step", {}).items()}
        return dict(zip(spent, accumulate(spent.values()), strict=True))

    def values(self, name: str) -> list[float]:
        """The finite values of a metric, in the order of the steps."""
        return [value for value in self.series.get(name, {}).values() if value is not None]


def read_run(directory: Path, *, brief: bool = False) -> Run:
    """Read everything but the tokens of the rollouts; brief: in a moment, with fewer rollouts and no timelines."""
    rollouts, recorded = _read_rollouts(directory / ROLLOUTS, MOST_ROLLOUTS_BYTES >> (8 * brief))
    config: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        config = tomli.loads((directory / CONFIG).read_text(encoding="utf-8"))
    return Run(
        directory=directory,
        config=dict(flat(config)),
        summary=json_object(directory / SUMMARY),
        series=_read_series(directory / METRICS),
        timelines=[] if brief else read_timelines(directory),
        rollouts=rollouts,
        recorded=recorded,
    )


def read_listed(line: Mapping[str, Any], offset: int) -> ListedRollout:
    """Raises ValueError or LookupError where a line of the file is no rollout."""
    record = read_record(line)
    if not math.isfinite(record.reward):
        raise ValueError(f"a reward that is not finite: group {record.group}")
    for branch in record.branches:
        if len({len(each) for name in PER_TOKEN if (each := getattr(branch, name)) is not None}) != 1:
            raise ValueError(f"the lists of a branch differ in length: group {record.group}")
    pairs = (zip(each.logprobs or (), each.trainer_logprobs or (), strict=False) for each in record.branches)
    gaps = [abs(b - a) for branch in pairs for a, b in branch if a is not None and b is not None]
    messages = record.messages
    answers = [at for at, message in enumerate(messages) if message.get("role") == "assistant"]
    asked = (answers[0] if answers else len(messages)) - 1
    numbers = msgspec.structs.asdict(record) | {"messages": [], "side_conversations": [], "turns": [], "branches": []}
    return ListedRollout(
        **numbers,
        offset=offset,
        prompt=str(messages[asked].get("content") or "") if asked >= 0 else "",
        answer=str(messages[answers[-1]].get("content") or "") if answers else "",
        gap=max(gaps, default=None),
        last_turn=record.turns[-1].tokens if record.turns else 0,
    )


def rollout_at(file: BinaryIO, rollout: ListedRollout) -> RolloutRecord:
    file.seek(rollout.offset)
    return read_record(json.loads(file.readline(), parse_constant=lambda name: None))


def _read_rollouts(path: Path, most_bytes: int) -> tuple[list[ListedRollout], int]:
    size = path.stat().st_size if path.is_file() else 0
    every = 1 + size // most_bytes
    rollouts = []
    for offset, line in json_lines(path, every):
        with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):  # not a rollout as we know it
            rollouts.append(read_listed(line, offset))
    return rollouts, len(rollouts) * every


def _read_series(path: Path) -> dict[str, Series]:
    series: dict[str, Series] = {}
    for _, line in json_lines(path):
        step = line.pop("step", None)
        if not isinstance(step, int):
            continue
        for name, value in line.items():
            if value is None or isinstance(value, (int, float)):
                series.setdefault(name, {})[step] = None if value is None or abs(value) == math.inf else value
    return {name: dict(sorted(values.items())) for name, values in series.items()}
