"""Which fault comes when, and what a run's log says of each. Pure.

- The schedule is a function of its arguments alone. Every kind comes once before any comes twice.
- A fault is detected when the controller's log first says so after it, and over when the log says that the part is back
  or, where nothing has to come back, at the next finished step.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple


class Kind(NamedTuple):
    """One kind of fault."""

    part: str = ""
    """Kind of the mesh that it hits; empty: none, or the controller."""
    hangs: bool = False
    """Whether what it hits stops instead of ending, so that its silence has to be noticed."""
    seen: str = ""
    """What the controller logs when it notices, where that is not the loss of a mesh. Empty: nothing."""


KINDS: dict[str, Kind] = {
    "generator rank killed": Kind("generator"),
    "generator killed": Kind("generator"),
    "generator stopped": Kind("generator", hangs=True),
    "rollout worker killed": Kind("rollout"),
    "rollout worker stopped": Kind("rollout", hangs=True),
    "environment killed": Kind(),
    "router killed": Kind("router"),
    "router stopped": Kind("router", hangs=True),
    "gateway killed": Kind("gateway"),
    "gateway stopped": Kind("gateway", hangs=True),
    "trainer rank killed": Kind("trainer"),
    "trainer stopped": Kind("trainer", hangs=True),
    "trainer killed, its copies damaged": Kind("trainer"),
    "fork server killed": Kind(),
    "controller killed": Kind(),
    "controller killed, newest checkpoint damaged": Kind(),
    "controller asked to stop": Kind(),
    "publication damaged": Kind(seen="is not what was published"),
    "sample damaged": Kind(seen="is played again"),
    "shared memory full": Kind(),
    "disk full": Kind(seen="no checkpoint of step"),
    "checkpoints not writable": Kind(seen="no checkpoint of step"),
    "file descriptors used up": Kind(),
    "HTTP clients vanish": Kind(),
    "kill host": Kind(seen="is lost: "),
    "cut link": Kind(seen="is lost: "),
    "join host": Kind(),
}
"""All but those of user code, which are in the task (`task.TROUBLES`)."""

NEEDS_MOUNT = {"shared memory full", "disk full"}
NEEDS_HOSTS = {"kill host", "cut link", "join host"}
ENDS_CONTROLLER = {kind for kind in KINDS if kind.startswith("controller")}
LASTING = {kind for kind, each in KINDS.items() if each.seen.startswith("no checkpoint")}
"""These go on until somebody notices."""


class Fault(NamedTuple):
    step: int
    """Comes after this step has finished."""
    kind: str
    luck: float
    """In [0, 1): picks which of several processes or files it hits."""


def schedule(seed: int, steps: int, every: int, kinds: Iterable[str] = KINDS) -> list[Fault]:
    """One fault in about `every` steps: none before the first `every` and none in the last `every` / 2 of `steps`."""
    stream = random.Random(f"chaos {seed}")
    names = sorted(kinds)
    left: list[str] = []
    faults = []
    for place in range(every, steps - every // 2 + 1, every):
        if not left:
            left = stream.sample(names, len(names))
        jitter = stream.randint(-(every // 4), every // 4)
        if place + every > steps - every // 2 and left[-1] in LASTING:  # it could outlast the run
            left.sort(key=lambda kind: kind not in LASTING)
        faults.append(Fault(min(place + jitter, steps - every // 2), left.pop(), stream.random()))
    return faults


class Line(NamedTuple):
    """A line of the controller's log."""

    at: float
    """Seconds since the epoch."""
    text: str


_STAMP = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) \w+ \S+ (.*)")


def read_log(text: str) -> list[Line]:
    """The lines that begin with a time; continuations are left out."""
    stamped = (_STAMP.match(line) for line in text.splitlines())
    return [
        Line(datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S,%f").timestamp(), found[2]) for found in stamped if found
    ]


@dataclass(slots=True, kw_only=True)
class Injected:
    """A fault that has happened, and what became of it."""

    fault: Fault
    what: str
    """What was hit, in words."""
    at: float
    """Seconds since the epoch."""
    mesh: str = ""
    """The mesh that it hit; empty: none."""
    until: float = 0.0
    """When it was taken back, where it is."""
    detected: float | None = None
    """Seconds after it."""
    recovered: float | None = None
    """Seconds after it."""
    known_until: float = float("inf")
    """When the controller ended that would have noticed it, or finished its last step."""
    steps_redone: int = 0
    groups_redone: int = 0


GROUPS_REDONE = re.compile(r"groups? (\d+(?:, \d+)*)(?: \(.*?\))? (?:is|were finished and are) played again")
STEPS_REDONE = re.compile(r"\b(\d+) finished steps? (?:is|are) done again")


def judge(faults: Sequence[Injected], log: Sequence[Line], steps: Iterable[float]) -> None:
    """Fill in when each fault was detected and over, as far as the log and the moments of finished steps tell. What the
    caller has filled in already stays."""
    finished = sorted(steps)
    ends = (*(each.at for each in faults[1:]), float("inf"))
    for place, (fault, end) in enumerate(zip(faults, ends, strict=False)):
        kind = KINDS[fault.fault.kind]
        restarts = (each.at for each in faults[place + 1 :] if each.fault.kind in ENDS_CONTROLLER)
        restart = next(restarts, float("inf"))
        fault.known_until = min([restart, *finished[-1:]])
        after = [line for line in log if fault.at - 0.001 <= line.at <= restart]
        lost = (f"lost {fault.mesh}: ", f"{fault.mesh} did not start again")  # it may be starting
        seen = lost if fault.mesh else (kind.seen,)
        if fault.detected is None and any(seen):
            noticed = (line.at for line in after if any(text in line.text for text in seen))
            fault.detected = _seconds(fault, noticed)
        if fault.recovered is None:
            back = (line.at for line in after if f"{fault.mesh} is back after" in line.text)
            since = max(fault.at + (fault.detected or 0.0), fault.until)
            fault.recovered = _seconds(fault, back if fault.mesh else (at for at in finished if at > since))
        before = [line.text for line in after if line.at < end]
        groups, steps_again = (filter(None, map(each.search, before)) for each in (GROUPS_REDONE, STEPS_REDONE))
        fault.groups_redone = sum(len(found[1].split(",")) for found in groups)
        fault.steps_redone += sum(int(found[1]) for found in steps_again)


def _seconds(fault: Injected, moments: Iterator[float]) -> float | None:
    first = next(moments, None)
    return None if first is None else max(0.0, first - fault.at)


NOTICE_SECONDS = 15.0
"""A controller that ends sooner after a fault need not have noticed it."""


def must_be_detected(fault: Injected) -> bool:
    if fault.known_until < fault.at + NOTICE_SECONDS:
        return False
    return bool(fault.mesh or KINDS[fault.fault.kind].seen or fault.fault.kind in ENDS_CONTROLLER)


HEADER = ("kind", "count", "detected after", "recovered after", "work redone")


def table(faults: Sequence[Injected], troubles: dict[str, int]) -> list[tuple[str, str, str, str, str]]:
    """A row by kind; times are the worst of the kind."""
    rows = []
    for kind in KINDS:
        if mine := [each for each in faults if each.fault.kind == kind]:
            redone = (
                _count(sum(each.steps_redone for each in mine), "step"),
                _count(sum(each.groups_redone for each in mine), "group"),
            )
            detected = _worst(each.detected for each in mine)
            recovered = _worst(each.recovered for each in mine)
            rows.append((kind, str(len(mine)), detected, recovered, ", ".join(filter(None, redone)) or "-"))
    for trouble, count in sorted(troubles.items()):
        rows.append((f"user code: {trouble}", str(count), "-", "-", "-"))
    return rows


def worst(seconds: Iterable[float | None]) -> float | None:
    return max((each for each in seconds if each is not None), default=None)


def _worst(seconds: Iterable[float | None]) -> str:
    found = worst(seconds)
    return "-" if found is None else f"{found:.2f} s"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number > 1)}" if number else ""
