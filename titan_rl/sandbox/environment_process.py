"""User code behind one door: calls go in, values or a `TaskError` come out, whatever the code does.

- Every call is answered exactly once, also when a process hangs, exits, crashes or cannot be started.
- Calls made in one tick of the event loop travel as one batch; while a batch runs, later calls gather for the next.
- A call that takes long has its process to itself: the others of its batch go to another process, those about the same
  prompt last. There are at most `MAX_PROCESSES`; all but the first start only when they are needed.
- A call that runs longer than `step_seconds`, or under which a process dies twice, is the one that fails. When as many
  of one kind as there may be processes fail in a row, those that wait fail with them: that a reward always hangs is
  known after about one time limit, however many rollouts wait for it.

    process 1   score a, b, c, d       a answered; b does not return; killed when it is late, and b fails
    process 2   started after a second: c, d answered
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Coroutine
from dataclasses import dataclass
from typing import Any

from titan_rl.errors import TaskError, TitanError
from titan_rl.sandbox.child_process import ChildProcess, Death
from titan_rl.sandbox.environment_wire import Answer, Call, CallKind, EnvironmentSetup, TaskInfo

MAX_PROCESSES = 4
"""Each is a copy of the environment in memory. Fewer let calls that take long hold up the others; one would let a
reward that hangs stop a whole worker for `step_seconds` per rollout."""
MAX_DEATHS = 2
"""A call fails when so many processes died under it; the first may have been killed from outside."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Pending:
    """A call that somebody waits for."""

    call: Call
    future: asyncio.Future[Any]
    deaths: int = 0
    """Processes that died under it, or with it where it is not known under which call."""


class EnvironmentProcess:
    """Keeps a child process that runs one environment, more while calls take long, and new ones for those that die."""

    def __init__(self, setup: EnvironmentSetup):
        self._setup = setup
        self._unanswered: set[_Pending] = set()
        self._waiting: list[_Pending] = []  # those of them that no child has
        self._idle: list[ChildProcess] = []
        self._busy: list[ChildProcess] = []
        self._starting = False
        self._attending: asyncio.Handle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed_in_a_row: Counter[CallKind] = Counter()
        self._last_cause = ""
        self._closed = "not started"
        self.batches_sent = 0
        """Messages to children so far."""
        self.restarts = 0
        """Processes that died, or were killed because a call was late, so far."""

    async def start(self) -> TaskInfo:
        """Start a child and make the environment.

        Raises:
            TaskError: that failed; says why.
            ConfigError: the environment refuses its arguments.
        """
        child = await ChildProcess.start(self._setup)
        self._idle.append(child)
        self._closed = ""
        return child.info

    @property
    def pid(self) -> int | None:
        """Process id of the oldest child, while there is one."""
        return next((child.pid for child in (*self._busy, *self._idle)), None)

    async def call(self, call: Call) -> Any:
        """Run one call; its value is described at `CallKind`.

        Raises:
            TaskError: user code raised, took too long or killed its process; or this object is closed.
        """
        if self._closed:
            raise TaskError(f"environment {self._setup.name!r}: {self._closed}")
        pending = _Pending(call, asyncio.get_running_loop().create_future())
        self._unanswered.add(pending)
        self._waiting.append(pending)
        self._attend_soon()
        try:
            return await pending.future
        finally:
            self._unanswered.discard(pending)

    async def close(self) -> None:
        """End all children; calls still waiting fail."""
        self._end("closed")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        idle = [child.stop() for child in self._idle]
        busy = [child.stop(patient=False) for child in self._busy]
        await asyncio.gather(*idle, *busy)

    def _attend_soon(self) -> None:
        """Once all calls of this tick are here."""
        if self._attending is None:
            self._attending = asyncio.get_running_loop().call_soon(self._attend)

    def _attend(self) -> None:
        """Give what waits to a child that is idle. Where all have been busy for long, start one more."""
        self._attending = None
        self._waiting = [pending for pending in self._waiting if not pending.future.done()]  # callers may have gone
        if not self._waiting or self._closed:
            return
        if self._idle:
            child, batch, self._waiting = self._idle.pop(0), self._waiting, []
            self._busy.append(child)
            self._spawn(self._run(child, batch))
        elif not self._starting and len(self._busy) < MAX_PROCESSES and all(child.slow for child in self._busy):
            self._starting = True
            self._spawn(self._add())

    async def _add(self) -> None:
        try:
            self._idle.append(await ChildProcess.start(self._setup))
        except (TitanError, OSError) as error:
            logger.warning("environment %s: no further process can be started: %s", self._setup.name, error)
            if not self._busy:  # otherwise they will take what waits
                self._fail(self._waiting, f"could not be run, its environment does not start again: {error}")
        finally:
            self._starting = False
            self._attend_soon()

    async def _run(self, child: ChildProcess, batch: list[_Pending]) -> None:
        """One batch in one child, up to its end or the child's."""
        running = dict(enumerate(batch))  # what only this child can answer, by position
        was_dead = child.exited

        def deliver(answer: Answer) -> None:
            pending = batch[answer.position]
            running.pop(answer.position, None)
            self._failed_in_a_row[pending.call.kind] = 0
            if answer.error:
                self._fail([pending], answer.error)
            elif not pending.future.done():
                pending.future.set_result(answer.value)

        def on_slow(position: int) -> None:
            if (slow := running.pop(position, None)) is not None:
                self._put_back(running.values(), last=slow.call)
                running.clear()
                running[position] = slow
                self._give_up_hopeless(slow.call.kind)
            self._attend_soon()

        self.batches_sent += 1
        in_trouble = len(self._busy) > 1 or any(self._failed_in_a_row.values())
        death = await child.run([pending.call for pending in batch], deliver, on_slow, at_once=in_trouble)
        self._busy.remove(child)
        if death is None:
            self._idle.append(child)
            self._put_back(running.values())
        else:
            self.restarts += 1
            logger.warning("environment %s: %s; starting a new process", self._setup.name, death.cause)
            if was_dead:
                self._put_back(running.values())
            else:
                self._after_death(running, death)
        self._attend_soon()

    def _after_death(self, running: dict[int, _Pending], death: Death) -> None:
        blamed = running.get(death.blamed)
        suspects = list(running.values()) if blamed is None else [blamed]
        for pending in suspects:
            pending.deaths += 1
        guilty = [each for each in suspects if each.deaths >= MAX_DEATHS or (death.late and each is blamed)]
        innocent = [pending for pending in running.values() if pending not in suspects]
        self._put_back(innocent, last=None if blamed is None else blamed.call)
        self._put_back([pending for pending in suspects if pending not in guilty])  # first: to know whose fault it was
        self._fail(guilty, death.cause)
        self._last_cause = death.cause
        for kind in {pending.call.kind for pending in guilty}:
            self._failed_in_a_row[kind] += 1
            self._give_up_hopeless(kind)

    def _give_up_hopeless(self, kind: CallKind) -> None:
        """Fail what waits where everything of its kind fails."""
        if (failed := self._failed_in_a_row[kind]) >= MAX_PROCESSES:
            untried = [pending for pending in self._waiting if pending.call.kind is kind]
            self._fail(untried, f"was not tried after {failed} in a row failed, the last so: {self._last_cause}")

    def _put_back(self, calls: Collection[_Pending], last: Call | None = None) -> None:
        """To the front of what waits; but calls about the prompt of `last`, which may fare like it, to the end."""
        self._waiting[:0] = calls
        if last is not None:
            self._waiting.sort(key=lambda pending: pending.call.prompt == last.prompt)

    def _fail(self, calls: Collection[_Pending], reason: str) -> None:
        for pending in calls:
            if not pending.future.done():
                pending.future.set_exception(TaskError(f"{pending.call}: {reason}"))

    def _end(self, reason: str) -> None:
        """No call is answered any more."""
        self._closed = self._closed or reason
        self._fail(self._unanswered, self._closed)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=f"environment {self._setup.name}")
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s crashed", task.get_name(), exc_info=error)
            self._end(f"its server crashed: {error!r}")
