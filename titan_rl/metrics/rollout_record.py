"""The record of a rollout: one struct in the worker, in a group's report, in RUN/rollouts.jsonl and for its readers.

    worker:      numbers: reward, reason of the end, lengths          of every rollout, as in a report
                 messages, turns, branches with their tokens          of the few that are recorded (`rollout.report`)
    controller:  step, why it is recorded, the trainer's scores       then `to_line` for the file
    readers:     `read_record`                                        report, watch, replay

`README.md` says what a line holds. Besides:

- `logprobs`, `trainer_logprobs` and `weights` are of trained tokens only: null, and 0 for weights, everywhere else. A
  rollout that was not trained (of an evaluation, or failed) has null in the place of the last two lists; its sampled
  tokens count as `trained`.
- Numbers that came as float32 are the shortest decimal that reads back as the same float32. What is not finite is null.
- Lines of the file are written together or not at all.
"""

import json
import logging
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from titan_rl.metrics.json_lines import JsonLines, json_lines
from titan_rl.types import EXACT_MATCH, FailureKind, Purpose, StopReason

ROLLOUTS = "rollouts.jsonl"
GROUP = "group"
"""Why a rollout is recorded (`kept`): it belongs to a group that is recorded whole."""

_log = logging.getLogger(__name__)

Failed = tuple[FailureKind, str]
"""What failed a rollout, and the first line of its error without the prompt's number: equal for equal causes."""

_PROMPT = re.compile(r"(?<=prompt) \d+")

PlainMessage = dict[str, Any]
"""Role and content, and as far as there are any: reasoning, name, tool_calls (name, arguments, raw)."""


class TurnRecord(msgspec.Struct, frozen=True):
    request: str = ""
    seed: int = 0
    generator: str = ""
    finish: str = ""
    """Why the engine's completion ended."""
    tokens: int = 0
    """Sampled ones."""
    role: str = ""
    reward: float | None = None
    """That the task gave for it."""


class BranchRecord(msgspec.Struct, frozen=True):
    token_ids: list[int]
    trained: list[int]
    """1 where trained."""
    sample: int = 0
    """As `TrainingSample.sample`."""
    texts: list[str] | None = None
    logprobs: list[float | None] | None = None
    trainer_logprobs: list[float | None] | None = None
    weights: list[int | float | None] | None = None  # 0 where not trained
    versions: list[str] | None = None
    """Of the policy that sampled the token; empty where none did."""
    advantages: list[float | None] | None = None
    """None: all trained tokens have the rollout's."""


class RolloutRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout. Reports have everything down to `metrics`; lines of the file have the rest too."""

    purpose: Purpose
    group: int
    attempt: int = 0
    sample: int
    """Number within the group."""
    reward: float = 0.0
    reward_parts: dict[str, float] = {}
    """Unweighted value of each reward function by name."""
    stop_reason: StopReason = StopReason.ERROR
    error: str = ""
    """Non-empty when the rollout failed; such a one is reported, never trained, and its reward means nothing."""
    failure: FailureKind | None = None
    """What failed; None if and only if there is no error."""
    truncated: bool = False
    """Whether its last turn was cut off."""
    turn_count: int = 0
    sampled_tokens: int = 0
    branch_count: int = 0
    """Samples that its tokens make; more than 1 if a history was edited, forked or rendered anew."""
    rendered_anew: int = 0
    """Prompts that continue a sampled turn but had to be rendered again, because they could not be made by extending
    its tokens."""
    metrics: dict[str, float] = {}
    """The engines' metrics of its completions, averaged over its turns."""

    step: int = 0
    """That trained it, or of the version that was evaluated."""
    kept: tuple[str, ...] = ()
    advantage: float | None = None
    """None: it was not trained."""
    wanted: str = ""
    """The reference answer."""
    messages: list[PlainMessage] = []
    side_conversations: list[list[PlainMessage]] = []
    turns: list[TurnRecord] = []
    branches: list[BranchRecord] = []

    def __post_init__(self) -> None:
        if self.error and self.failure is None:  # made by a user's rollouter, or read from an older file
            late = self.stop_reason is StopReason.TIMEOUT
            msgspec.structs.force_setattr(self, "failure", FailureKind.TIMEOUT if late else FailureKind.TASK)

    @property
    def exact_match(self) -> float:
        """By the part of that name. Without one the reward is that of one function, and at least 1 counts."""
        return self.reward_parts.get(EXACT_MATCH, float(self.reward >= 1.0))

    @property
    def failed(self) -> Failed | None:
        return (self.failure, _PROMPT.sub("", self.error.partition("\n")[0])) if self.failure else None

    @property
    def evaluated(self) -> bool:
        return self.purpose is not Purpose.TRAIN


def to_line(record: RolloutRecord, **more: Any) -> bytes:
    """A line of the file, with more fields in front."""
    line = more | msgspec.to_builtins(record) | {"exact_match": record.exact_match}
    line["metrics"] = {name: value for name, value in record.metrics.items() if math.isfinite(value)}
    return json.dumps(line, allow_nan=False).encode() + b"\n"


def read_record(line: Mapping[str, Any]) -> RolloutRecord:
    """The record that a line of the file says; null is not finite. Raises LookupError, ValueError: it is none."""
    parts = {name: math.nan if value is None else value for name, value in line["reward_parts"].items()}
    reward = math.nan if line["reward"] is None else line["reward"]
    try:
        return msgspec.convert({**line, "reward": reward, "reward_parts": parts}, RolloutRecord, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


def read_records(path: Path) -> Iterator[RolloutRecord]:
    """The records of a file in their order, of a run that may be going on: a last line that is torn is skipped. Raises
    OSError, LookupError, ValueError: it cannot be read."""
    return (read_record(line) for _, line in json_lines(path, strict=True))


class RolloutWriter:
    """Appends records. Thread-safe; never raises."""

    def __init__(
        self, directory: Path, *, keep_bytes: int = 0, warn: Callable[[str], None] = lambda text: None
    ) -> None:
        """`keep_bytes`: of a file that is there; what follows them is cut off before the first record is written.
        `warn`: called once, when something is not recorded."""
        self._path = directory / ROLLOUTS
        self._keep_bytes = keep_bytes
        self._lock = threading.Lock()
        self._warn = warn
        self._failed = False

    @cached_property
    def _file(self) -> JsonLines:
        file = JsonLines(self._path)
        try:
            file.cut(self._keep_bytes)
        except OSError as error:
            self.failed(error)
        return file

    def write(self, records: Iterable[RolloutRecord]) -> None:
        try:
            lines = b"".join(map(to_line, records))
            with self._lock:
                try:
                    self._file.append(lines)
                except FileNotFoundError as error:  # somebody removed it: a new one holds what follows
                    self.failed(error)
                    self._file = JsonLines(self._path)
                    self._file.append(lines)
        except Exception as error:  # also of what a loss or an environment of the user gave
            self.failed(error)

    def failed(self, error: Exception) -> None:
        _log.warning("not recorded", exc_info=error)
        if not self._failed:
            self._failed = True
            self._warn(f"{self._path}: rollouts are missing, the run goes on: {type(error).__name__}: {error}")

    @property
    def nbytes(self) -> int:
        with self._lock:
            return self._file.nbytes
