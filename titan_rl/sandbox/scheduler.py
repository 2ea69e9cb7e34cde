"""Decides, in the rollout worker, which process of user code runs which calls. Pure: no processes, clock or event loop.

    FREE ──all waiting calls──▶ BUSY ────────────────────list done──▶ FREE
                                  │ a call is slow
                                  ▼
    WARY ◀──────list done────── STUCK ──a call is late──▶ KILLED
     └──one call──▶ TRYING ──slow──▲
                      └──────────────────────────────────list done──▶ FREE

- A call that was submitted leaves exactly once: it is answered, or a caller of `worker_ended` or `late` gets it.
- Plain calls of one list run one after the other. If one is slow, the calls behind it go back to the queue, and another
  worker is started: up to `MAX_PROCESSES` run side by side. Calls of `async def` functions go to one concurrent worker,
  as soon as they come.
- Calls about a prompt of which one was late come after the others. Calls are given up untried only if those of their
  kind were late for `MAX_PROCESSES` prompts, and none was ever answered: a reward that always hangs is noticed after
  about one time limit, and one that hangs for some prompts costs the others nothing but time.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from titan_rl.sandbox.wire import Call, CallKind
from titan_rl.types import Purpose

MAX_PROCESSES = 4
"""Processes for plain calls. With fewer, slow calls hold up the others. With one, a reward that hangs would block the
whole rollout worker for `step_seconds` per rollout."""
SLACK_SECONDS = 5.0
"""Extra time for the process of `async def` functions. It enforces the time limit itself, and coroutines may be slow to
react to their cancellation."""


class Job(Protocol):
    """A call that somebody waits for."""

    call: Call

    @property
    def over(self) -> bool:
        """Whether nobody waits for it any more."""


class State(StrEnum):
    STARTING = "starting"
    """Is being forked."""
    FREE = "free"
    """Takes all waiting calls. A concurrent worker stays free while it runs calls."""
    BUSY = "busy"
    """Runs a list of calls, none of them slow so far."""
    STUCK = "stuck"
    """Runs a slow call. The calls behind it went back to the queue."""
    WARY = "wary"
    """Is done with a list in which a call was slow: takes one call."""
    TRYING = "trying"
    """Runs that one call."""
    KILLED = "killed"
    """A call was late, and its process is ending."""


_SLOW = frozenset({State.STUCK, State.WARY, State.TRYING, State.KILLED})

J = TypeVar("J", bound=Job)

Prompt = tuple[Purpose, int]


@dataclass(slots=True, eq=False)
class Worker(Generic[J]):
    """A process that answers calls, and the calls that it was sent."""

    concurrent: bool
    """Runs `async def` functions, many at a time."""
    state: State = State.STARTING
    jobs: dict[int, J] = field(default_factory=dict)
    """Unanswered ones by number, in the order in which they were sent."""


class Scheduler(Generic[J]):
    """The workers of one environment, and the calls that wait for them.

    Args:
        asynchronous: kinds of calls that run `async def` functions.
        slow_seconds: a call that takes longer is slow.
        step_seconds: a call that takes longer is late.
    """

    def __init__(self, asynchronous: Collection[CallKind], *, slow_seconds: float, step_seconds: float):
        self._asynchronous = asynchronous
        self._slow_seconds = slow_seconds
        self._step_seconds = step_seconds
        self._numbers = itertools.count()
        self._workers: list[Worker[J]] = []
        self._waiting: list[J] = []
        self._answered: set[CallKind] = set()  # kinds of which a call was ever answered
        self._late: defaultdict[CallKind, set[Prompt]] = defaultdict(set)  # prompts, by kind

    def submit(self, job: J) -> None:
        """Add a call to the queue."""
        self._waiting.append(job)

    def plan(self) -> tuple[list[tuple[Worker[J], dict[int, J]]], list[Worker[J]]]:
        """Give waiting calls to workers that can take them.

        Returns:
            Numbered calls to send, and workers to start. A worker is started if all others are slow, one at a time.
        """
        lists: list[tuple[Worker[J], dict[int, J]]] = []
        to_start: list[Worker[J]] = []
        queues: dict[bool, list[J]] = {False: [], True: []}
        for job in sorted(self._waiting, key=lambda job: job.call.prompt in self._late[job.call.kind]):
            if not job.over:
                queues[job.call.kind in self._asynchronous].append(job)
        self._waiting = []
        for concurrent, jobs in queues.items():
            workers = [worker for worker in self._workers if worker.concurrent is concurrent]
            for worker in workers:
                if jobs and worker.state in (State.FREE, State.WARY):
                    most = len(jobs) if worker.state is State.FREE else 1
                    numbered = {next(self._numbers): job for job in jobs[:most]}
                    jobs = jobs[most:]
                    worker.jobs |= numbered
                    if not concurrent:
                        worker.state = State.BUSY if worker.state is State.FREE else State.TRYING
                    lists.append((worker, numbered))
            self._waiting += jobs
            room = len(workers) < (1 if concurrent else MAX_PROCESSES)
            if jobs and room and all(worker.state in _SLOW for worker in workers):
                to_start.append(Worker(concurrent))
        self._workers += to_start
        return lists, to_start

    def started(self, worker: Worker[J]) -> None:
        """The worker's process can be sent calls. It is wary if there are others: they are slow."""
        others = any(each.concurrent is worker.concurrent for each in self._workers if each is not worker)
        worker.state = State.WARY if others else State.FREE

    def not_started(self, worker: Worker[J]) -> list[J]:
        """The worker has no process. Returns the waiting calls that no other worker will take."""
        self._workers.remove(worker)
        if any(each.concurrent is worker.concurrent for each in self._workers):
            return []
        return [job for job in self._waiting if (job.call.kind in self._asynchronous) is worker.concurrent]

    def not_sent(self, worker: Worker[J], numbered: Collection[int]) -> None:
        """A list of `plan` did not reach the worker: its calls wait again."""
        self._put_back([worker.jobs.pop(number) for number in numbered])
        worker.state = State.FREE

    def limit(self, worker: Worker[J]) -> float | None:
        """Seconds that the worker may take for its next answer; None: nothing is expected from it."""
        match worker.state:
            case State.FREE if worker.concurrent and worker.jobs:
                return self._step_seconds + SLACK_SECONDS
            case State.BUSY | State.TRYING if worker.jobs:
                return self._slow_seconds
            case State.STUCK:  # also if its call was answered: it may have gone on with calls that were taken from it
                return self._step_seconds - self._slow_seconds
        return None

    def limit_passed(self, worker: Worker[J]) -> bool:
        """The worker did not answer within its limit. Returns whether to kill its process."""
        if worker.concurrent or worker.state is State.STUCK:
            worker.state = State.KILLED
            return True
        (number, slow), *behind = worker.jobs.items()
        worker.jobs = {number: slow}
        worker.state = State.STUCK
        self._put_back([job for _, job in behind], last=slow)
        return False

    def answered(self, worker: Worker[J], number: int) -> J | None:
        """A call was answered. None if another worker has it by now."""
        job = worker.jobs.pop(number, None)
        if job is not None:
            self.in_time(job.call)
        return job

    def list_done(self, worker: Worker[J]) -> None:
        """The worker is done with its list. Calls that it did not answer wait again: it may have heard that its current
        call is slow before it began that call."""
        self._put_back(list(worker.jobs.values()))
        worker.jobs = {}
        if worker.state is not State.KILLED:
            worker.state = State.WARY if worker.state is State.STUCK else State.FREE

    def worker_ended(self, worker: Worker[J]) -> tuple[list[J], bool]:
        """The worker's process has ended.

        Returns:
            The calls that may have ended it, and whether they were late. If not, each has to be run again alone.
        """
        self._workers.remove(worker)
        jobs = list(worker.jobs.values())
        if worker.concurrent:  # when it was killed, any of them may have blocked the others
            return jobs, False
        if jobs:
            self._put_back(jobs[1:], last=jobs[0])
        return jobs[:1], worker.state is State.KILLED

    def late(self, call: Call) -> list[J]:
        """A call was late. Returns the waiting calls to give up: all of its kind, if `hopeless`."""
        self._late[call.kind].add(call.prompt)
        return [job for job in self._waiting if job.call.kind is call.kind] if self.hopeless(call.kind) else []

    def in_time(self, call: Call) -> None:
        """A call was answered."""
        self._answered.add(call.kind)
        self._late[call.kind].discard(call.prompt)

    def hopeless(self, kind: CallKind) -> bool:
        """Whether calls of this kind were never answered, and late for so many prompts that no others need be tried."""
        return kind not in self._answered and len(self._late[kind]) >= MAX_PROCESSES

    def _put_back(self, jobs: list[J], last: J | None = None) -> None:
        """Put calls back at the front of the queue. Calls about the prompt of `last` go to the end: they may be slow or
        deadly too."""
        self._waiting[:0] = jobs
        if last is not None:
            self._waiting.sort(key=lambda job: job.call.prompt == last.call.prompt)
