"""Runs user code behind one object: every call returns a value or raises `TaskError`, whatever the code does.

    worker ──▶ host, which makes the environment once ──fork──▶ up to 4 processes that answer calls
                                                     ──fork──▶ one process per program that plays

- Every call is answered exactly once, even if a process hangs, exits, crashes or cannot be started.
- Calls made in one tick of the event loop travel in one message and are answered in order. If one of them is slow, the
  calls behind it go to another process; up to `MAX_PROCESSES` run side by side. Calls of `async def` functions run
  concurrently in one further process.
- A call that runs longer than `step_seconds` fails, and its process is killed. If a process dies for another reason,
  the call that may have killed it is tried again, alone in a fresh process, and fails if that process dies too.
- After `MAX_PROCESSES` calls of one kind in a row were late, the waiting calls of that kind fail too. So a reward that
  always hangs is noticed after about one time limit, however many rollouts wait for it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Collection, Coroutine
from dataclasses import dataclass
from typing import Any

from titan_rl.errors import TaskError, TitanError
from titan_rl.sandbox.host_process import ForkedProcess, HostProcess
from titan_rl.sandbox.wire import Answer, Call, CallKind, EnvironmentSetup, TaskInfo
from titan_rl.types import Endpoint, Purpose

MAX_PROCESSES = 4
"""Processes for plain calls. With fewer, slow calls hold up the others. With one, a reward that hangs would block the
whole worker for `step_seconds` per rollout."""
SLACK_SECONDS = 5.0
"""Extra time for the process of `async def` functions. It enforces the time limit itself, and coroutines may be slow to
react to their cancellation."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Pending:
    """A call that somebody waits for."""

    call: Call
    future: asyncio.Future[Any]


class _Late(Exception):
    """A call did not finish within `step_seconds`."""


class _Worker:
    """A forked process and the calls that it was sent."""

    def __init__(self, process: ForkedProcess, *, concurrent: bool, slow: bool):
        self.process = process
        self.concurrent = concurrent  # runs `async def` functions
        self.calls: dict[int, _Pending] = {}  # by number, in the order in which they were sent
        self.slow = slow  # a call of its last or current list is slow
        self.blocked = False  # a call of its current list is slow
        self.over = True  # it is done with its last list
        self.killed = False  # because a call was late
        self.timer: asyncio.TimerHandle | None = None


class Sandbox:
    """Runs the user code of one environment."""

    def __init__(self, setup: EnvironmentSetup):
        self._setup = setup
        self._info = TaskInfo(size=None, held_out=0, multi_turn=False)
        self._host: HostProcess | None = None
        self._starting = asyncio.Lock()
        self._closed = "not started"
        self._numbers = itertools.count()
        self._unanswered: set[_Pending] = set()
        self._waiting: list[_Pending] = []  # unanswered calls that were not sent to a process
        self._workers: list[_Worker] = []
        self._adding: set[bool] = set()  # kinds of workers (concurrent or not) that are being started
        self._attending: asyncio.Handle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._one_more_try = asyncio.Semaphore(MAX_PROCESSES)
        self._late_in_a_row: Counter[CallKind] = Counter()
        self._shown: set[str] = set()  # places whose traceback was logged
        self.restarts = 0
        """How many processes died or were killed because a call was late."""

    async def start(self) -> TaskInfo:
        """Make the environment.

        Raises:
            TaskError: the environment could not be made; says why.
            ConfigError: the environment refuses its arguments.
        """
        self._host = HostProcess(self._setup)
        self._info = await self._host.start()
        self._closed = ""
        return self._info

    @property
    def pid(self) -> int | None:
        """Process id of the host, while there is one."""
        return self._host.pid if self._host is not None else None

    async def call(self, call: Call) -> Any:
        """Run one call. `CallKind` describes its value.

        Raises:
            TaskError: user code raised, took too long or ended its process; or this object is closed.
        """
        if self._closed:
            raise TaskError(f"{call}: {self._closed}")
        pending = _Pending(call, asyncio.get_running_loop().create_future())
        self._unanswered.add(pending)
        self._waiting.append(pending)
        self._attend_soon()
        try:
            return await pending.future
        finally:
            self._unanswered.discard(pending)

    async def run_program(self, purpose: Purpose, index: int, endpoint: Endpoint) -> bytes | None:
        """Run the environment's `play` for a prompt in its own process, without a time limit; returns a pickled state.

        When this returns, all processes that it started are gone. A cancellation ends it.

        Raises:
            TaskError: it raised or ended its process; or this object is closed.
        """
        call = Call(CallKind.PLAY, purpose, index, endpoint=endpoint)
        try:
            return self._value(call, await self._run_alone(call, None))
        except TaskError as error:
            raise TaskError(f"{call}: {error}") from None

    async def close(self) -> None:
        """End all processes; calls still waiting fail."""
        self._end("closed")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._host is not None:
            await self._host.stop()

    def _attend_soon(self) -> None:
        """Schedule `_attend` for the end of this tick, when all its calls are here."""
        if self._attending is None:
            self._attending = asyncio.get_running_loop().call_soon(self._attend)

    def _attend(self) -> None:
        """Send waiting calls to idle processes. If all processes are slow, start one more."""
        self._attending = None
        waiting = [pending for pending in self._waiting if not pending.future.done()]  # callers may be gone
        self._waiting = []
        if self._closed:
            return
        for concurrent in (False, True):
            calls = [each for each in waiting if (each.call.kind in self._info.asynchronous) is concurrent]
            workers = [worker for worker in self._workers if worker.concurrent is concurrent]
            for worker in workers:
                if calls and (concurrent or worker.over) and not worker.killed:
                    most = 1 if worker.slow else len(calls)
                    self._send(worker, calls[:most])
                    calls = calls[most:]
            self._waiting += calls
            room = len(workers) < (1 if concurrent else MAX_PROCESSES)
            if calls and room and all(worker.slow for worker in workers) and concurrent not in self._adding:
                self._adding.add(concurrent)
                self._spawn(self._add(concurrent, slow=bool(workers)))

    async def _add(self, concurrent: bool, *, slow: bool) -> None:
        try:
            worker = _Worker(await self._fork(), concurrent=concurrent, slow=slow)
            worker.process.on_answers = lambda answers: self._hear(worker, answers)
            worker.process.ended.add_done_callback(lambda ended: self._worker_ended(worker, ended.result()))
            self._workers.append(worker)
        except (TitanError, OSError) as error:
            logger.warning("environment %s: no further process can be started: %s", self._setup.name, error)
            if not self._workers:  # otherwise the existing workers will take the waiting calls
                self._fail(self._waiting, f"could not be run, its environment does not start again: {error}")
        finally:
            self._adding.discard(concurrent)
            self._attend_soon()

    async def _fork(self) -> ForkedProcess:
        async with self._starting:
            if self._closed or self._host is None:
                raise TaskError(self._closed)
            if self._host.exited:
                self.restarts += 1
                logger.warning("environment %s: its host has died; starting a new one", self._setup.name)
                await self._host.stop()
                self._host = HostProcess(self._setup)
                await self._host.start()
                if self._closed:
                    await self._host.stop()
            return await self._host.fork()

    def _send(self, worker: _Worker, calls: list[_Pending]) -> None:
        numbered = {next(self._numbers): pending for pending in calls}
        worker.calls |= numbered
        worker.over = False
        worker.process.send([(number, pending.call) for number, pending in numbered.items()])
        self._watch(worker)

    def _watch(self, worker: _Worker) -> None:
        """Restart the timer that limits how long a worker may take for its next answer."""
        if worker.timer is not None:
            worker.timer.cancel()
            worker.timer = None
        if worker.calls and not worker.killed:
            limit = self._setup.step_seconds + SLACK_SECONDS if worker.concurrent else self._setup.slow_seconds
            late = self._kill_late if worker.concurrent else self._let_others_pass
            worker.timer = asyncio.get_running_loop().call_later(limit, late, worker)

    def _hear(self, worker: _Worker, answers: list[Answer | None]) -> None:
        for answer in answers:
            if answer is None:
                self._put_back(worker.calls.values())  # calls that the process did not begin
                worker.slow = worker.blocked or bool(worker.calls)
                worker.calls, worker.blocked, worker.over = {}, False, True
                self._attend_soon()
            elif (pending := worker.calls.pop(answer.number, None)) is not None:
                self._late_in_a_row[pending.call.kind] = 0
                self._settle(pending, answer)
        self._watch(worker)

    def _let_others_pass(self, worker: _Worker) -> None:
        """The first call of a worker is slow: send its other calls elsewhere."""
        (number, slow), *others = worker.calls.items()
        worker.calls = {number: slow}
        worker.slow = worker.blocked = True
        self._put_back([pending for _, pending in others], last=slow.call)
        left = self._setup.step_seconds - self._setup.slow_seconds
        worker.timer = asyncio.get_running_loop().call_later(left, self._kill_late, worker)
        self._attend_soon()

    def _kill_late(self, worker: _Worker) -> None:
        worker.killed = True
        worker.process.kill()

    def _worker_ended(self, worker: _Worker, how: str) -> None:
        if worker.timer is not None:
            worker.timer.cancel()
        self._workers.remove(worker)
        if self._closed:
            return
        self.restarts += 1
        late = " because a call took too long" if worker.killed else ""
        logger.warning("environment %s: a process %s%s", self._setup.name, how, late)
        calls = list(worker.calls.values())
        suspects = calls if worker.concurrent else calls[:1]
        if suspects and not worker.concurrent:
            self._put_back(calls[1:], last=suspects[0].call)
        for pending in suspects:
            if worker.killed and not worker.concurrent:
                self._fail_late(pending)
            else:
                self._spawn(self._try_alone(pending))
        self._attend_soon()

    async def _try_alone(self, pending: _Pending) -> None:
        """Run a call again that may have ended its process, alone in a new one."""
        kind = pending.call.kind
        slack = SLACK_SECONDS if kind in self._info.asynchronous else 0.0
        async with self._one_more_try:
            if pending.future.done():
                return
            if self._late_in_a_row[kind] >= MAX_PROCESSES:
                self._fail([pending], self._untried(kind))
                return
            try:
                answer = await self._run_alone(pending.call, self._setup.step_seconds + slack)
            except _Late:
                self._fail_late(pending)
            except (TitanError, OSError) as error:
                self._fail([pending], str(error))
            else:
                self._late_in_a_row[kind] = 0
                self._settle(pending, answer)
                return
            self.restarts += 1

    async def _run_alone(self, call: Call, seconds: float | None) -> Answer:
        """Run one call in its own process. When this returns, the process and all that it started are gone."""
        process = await self._fork()
        answered: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
        process.on_answers = lambda answers: None if answered.done() else answered.set_result(answers[0])
        process.send([(0, call)])
        either: list[asyncio.Future[Any]] = [answered, process.ended]
        try:
            await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            late = not process.ended.done()
            process.kill()
        await asyncio.wait([process.ended])
        if answered.done() and (answer := answered.result()) is not None:
            return answer
        if late and seconds is not None:
            raise _Late
        raise TaskError(self._closed or f"its process {process.ended.result()} and returned nothing")

    def _settle(self, pending: _Pending, answer: Answer) -> None:
        try:
            value = self._value(pending.call, answer)
        except TaskError as error:
            self._fail([pending], str(error))
        else:
            if not pending.future.done():
                pending.future.set_result(value)

    def _value(self, call: Call, answer: Answer) -> Any:
        """The answer's value. Raises TaskError if user code failed. The traceback is logged once per place, because the
        same grader may fail hundreds of times a step."""
        failure = answer.failure
        if failure is None:
            return answer.value
        if failure.place not in self._shown:
            self._shown.add(failure.place)
            logger.info("%s failed:\n%s", call, failure.traceback.rstrip())
        raise TaskError(failure.description)

    def _fail_late(self, pending: _Pending) -> None:
        """Fail a call that was killed for taking too long. If all calls of its kind do, fail the waiting ones too."""
        kind = pending.call.kind
        self._fail([pending], f"did not finish within {self._setup.step_seconds:g} s and was killed")
        self._late_in_a_row[kind] += 1
        if self._late_in_a_row[kind] >= MAX_PROCESSES:
            self._fail([each for each in self._waiting if each.call.kind is kind], self._untried(kind))

    def _untried(self, kind: CallKind) -> str:
        seconds = self._setup.step_seconds
        return f"was not tried after {self._late_in_a_row[kind]} in a row did not finish within {seconds:g} s"

    def _put_back(self, calls: Collection[_Pending], last: Call | None = None) -> None:
        """Put calls back at the front of the queue. Calls about the prompt of `last` go to the end: they may be slow or
        deadly too."""
        self._waiting[:0] = calls
        if last is not None:
            self._waiting.sort(key=lambda pending: pending.call.prompt == last.prompt)

    def _fail(self, calls: Collection[_Pending], reason: str) -> None:
        for pending in calls:
            if not pending.future.done():
                pending.future.set_exception(TaskError(f"{pending.call}: {reason}"))

    def _end(self, reason: str) -> None:
        """Fail all open calls, and refuse new ones."""
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
            self._end(f"its sandbox crashed: {error!r}")
