"""All that the controller knows about a run and that outlives its process, as objects and as plain data.

`Ledger.decode(ledger.encode())` is an equal ledger but for what a resume begins anew: evaluations that are under way.
The encoded form is MessagePack (JSON has no NaN) without names of classes: code may be renamed, and a file runs none.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec

from titan_rl.config import RunConfig
from titan_rl.errors import CheckpointError
from titan_rl.loop.records import RunSummary
from titan_rl.metrics.json_lines import json_object
from titan_rl.metrics.rollout_record import Failed
from titan_rl.rollout.report import GroupReport
from titan_rl.scheduling.group_buffer import GroupBuffer
from titan_rl.scheduling.schedule import Schedule, Untrainable, UntrainableStreak
from titan_rl.types import PolicyVersion

T = TypeVar("T")

LEDGER = "ledger.msgpack"
PACKAGES = "packages.json"
"""Of a checkpoint; the second holds the versions of the packages that wrote it."""


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """What an ended group teaches."""

    untrainable: Untrainable | None
    """Why nothing; None: something."""
    detail: str
    rollouts: tuple[Failed | None, ...] = ()
    """What failed of each rollout; None: nothing."""


@dataclass(slots=True, kw_only=True)
class Ledger:
    buffer: GroupBuffer
    schedule: Schedule
    streak: UntrainableStreak
    summary: RunSummary = field(default_factory=RunSummary)
    reports: dict[int, GroupReport] = field(default_factory=dict)
    """Of groups that are finished and not yet released, by group id."""
    outcomes: dict[int, GroupOutcome] = field(default_factory=dict)
    """Of groups that have ended and are not decided, by group id."""
    grown: list[int] = field(default_factory=list)
    """Of `GroupSize`."""
    older: dict[PolicyVersion, set[str]] = field(default_factory=dict)
    """Only in a checkpoint: versions before the trainer's that are still needed, and their holders."""
    metrics_bytes: int = 0
    rollouts_bytes: int = 0
    """Only in a checkpoint: lengths of `metrics.jsonl` and `rollouts.jsonl`."""

    def encode(self) -> bytes:
        state = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return msgspec.msgpack.encode(state | {"schedule": self.schedule.state_dict()})

    @classmethod
    def decode(cls, encoded: bytes) -> Ledger:
        """Raises where something is missing, unknown or of another type."""
        state, kinds = msgspec.msgpack.decode(encoded), get_type_hints(cls)
        older = msgspec.convert(state["older"], kinds.pop("older"))  # sets have no order in which they can be compared
        del kinds["schedule"]
        whole = {name: _as_written(state[name], kind) for name, kind in kinds.items()}
        return cls(**whole, older=older, schedule=Schedule.from_state_dict(state["schedule"], whole["buffer"]))

    def replay(self, until: int, steps: int) -> None:
        """Play finished groups again, and end after step `until` of a run of so many `steps`, as if nothing had been
        written."""
        for group_id in self.reports:
            self.buffer.lost(group_id)
        self.reports.clear()
        self.schedule.change_settings(steps, 0)
        self.schedule.end_after(until)
        self.metrics_bytes = self.rollouts_bytes = 0


def _as_written(plain: Any, kind: type[T]) -> T:
    """Raises ValueError where this version of titan_rl would not have written these data."""
    value = msgspec.convert(plain, kind, dec_hook=lambda counter, counts: counter(counts))
    if msgspec.msgpack.encode(value) != msgspec.msgpack.encode(plain):
        raise ValueError(f"something of a {kind.__name__} is missing or unknown")
    return value


def new_ledger(config: RunConfig, incarnation: int = 0) -> Ledger:
    loop = config.loop
    version = PolicyVersion(incarnation, 0)
    buffer = GroupBuffer(config.staleness_limits(), trainer_version=version, published_version=version)
    return Ledger(
        buffer=buffer,
        schedule=Schedule(buffer, steps=loop.steps, every=config.evaluation.every),
        streak=UntrainableStreak(groups_per_step=loop.groups_per_step, batches=loop.untrainable_batches),
    )


def read_ledger(directory: Path) -> Ledger:
    """The ledger of a checkpoint that is as it was written. Raises CheckpointError: this version of titan_rl cannot
    read it."""
    try:
        return Ledger.decode((directory / LEDGER).read_bytes())
    except Exception as error:  # whatever the data of another version leads to
        theirs = ", ".join(f"{name} {version}" for name, version in json_object(directory / PACKAGES).items())
        why = f"{type(error).__name__}: {error}; it was written with {theirs or 'nobody knows what'}"
        raise CheckpointError(f"{directory / LEDGER} cannot be read: {why}") from error
