"""Runs user code behind one object: every call returns a value or raises `TaskError`, whatever the code does.

    rollout worker (this module) ──▶ host, which makes the environment ──fork──▶ up to 4 processes that answer calls
                                                                       ──fork──▶ one process per program

- Every call is answered exactly once, even if a process hangs, exits, crashes or cannot be started.
- Calls made in one tick of the event loop travel in one message. `Scheduler` decides which process runs them.
- A call that runs longer than `step_seconds` fails, and its process is killed. If a process dies for another reason,
  the call that may have killed it is tried again, alone in a fresh process, and fails if that process dies too.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Collection, Coroutine
from dataclasses import dataclass
from typing import Any

from titan_rl.errors import ActorGone, TaskError, TaskTimeout, TitanError
from titan_rl.observability.activity import Together, activity
from titan_rl.one_line import escaped
from titan_rl.sandbox.host_process import ForkedProcess, HostGone, HostProcess
from titan_rl.sandbox.scheduler import MAX_PROCESSES, SLACK_SECONDS, Scheduler, Worker
from titan_rl.sandbox.wire import VALUES, Answer, BadFrame, Call, CallKind, EnvironmentSetup, TaskInfo
from titan_rl.types import Endpoint, Purpose

GRADING = frozenset({CallKind.SCORE, CallKind.SCORE_GROUP})

LONGEST_TRACEBACK = 1 << 16
"""Characters at the end of a traceback of user code that are logged."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Pending:
    """A call that somebody waits for."""

    call: Call
    future: asyncio.Future[Any]

    @property
    def over(self) -> bool:
        return self.future.done()


class Sandbox:
    """Runs the user code of one environment."""

    def __init__(self, setup: EnvironmentSetup):
        self._setup = setup
        self._host: HostProcess | None = None
        self._starting = asyncio.Lock()
        self._closed = "not started"
        self._unanswered: set[_Pending] = set()
        self._scheduler: Scheduler[_Pending]
        self._asynchronous: frozenset[CallKind] = frozenset()
        self._processes: dict[Worker[_Pending], ForkedProcess] = {}
        self._timers: dict[Worker[_Pending], asyncio.TimerHandle] = {}
        self._attending: asyncio.Handle | None = None
        self._environment, self._grading = Together("environment"), Together("grader")
        self._tasks: set[asyncio.Task[None]] = set()
        self._one_more_try = asyncio.Semaphore(MAX_PROCESSES)
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
        info = await self._host.start()
        self._asynchronous = info.asynchronous
        self._scheduler = Scheduler(
            info.asynchronous, slow_seconds=self._setup.slow_seconds, step_seconds=self._setup.step_seconds
        )
        self._closed = ""
        return info

    @property
    def pid(self) -> int | None:
        """Process id of the host, while there is one."""
        return self._host.pid if self._host is not None else None

    @property
    def busy(self) -> bool:
        """Whether a call is not answered yet."""
        return bool(self._unanswered)

    async def call(self, call: Call) -> Any:
        """Run one call. `CallKind` describes its value.

        Raises:
            TaskError: user code raised or ended its process; or this object is closed.
            TaskTimeout: user code took too long.
        """
        if self._closed:
            raise TaskError(f"{call}: {self._closed}")
        pending = _Pending(call, asyncio.get_running_loop().create_future())
        self._unanswered.add(pending)
        self._scheduler.submit(pending)
        self._attend_soon()
        try:
            with self._grading if call.kind in GRADING else self._environment:
                return await pending.future
        finally:
            self._unanswered.discard(pending)

    async def run_program(
        self, purpose: Purpose, index: int, endpoint: Endpoint, started: asyncio.Event | None = None
    ) -> bytes | None:
        """Run the environment's `play` for a prompt in its own process, without a time limit; returns a pickled state.

        When this returns, all processes that it started are gone. A cancellation ends it.

        Args:
            started: set when the process is there; it may have waited for others to be forked.

        Raises:
            TaskError: it raised or ended its process; or this object is closed.
            ActorGone: the process that it was forked from has died: the rollout is lost, and is to be played again.
        """
        call = Call(CallKind.PLAY, purpose, index, endpoint=endpoint)
        try:
            with activity("program", prompt=index):
                return self._value(call, await self._run_alone(call, None, started))
        except HostGone as error:
            raise ActorGone(f"{call}: {error}") from None
        except TaskError as error:
            raise type(error)(f"{call}: {error}") from None

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
        """Send waiting calls to processes that can take them, and start processes."""
        self._attending = None
        if self._closed:
            return
        lists, to_start = self._scheduler.plan()
        for worker, pending in lists:
            self._send(worker, pending)
        for worker in to_start:
            self._spawn(self._add(worker))

    async def _add(self, worker: Worker[_Pending]) -> None:
        """Start a worker's process."""
        try:
            process = self._processes[worker] = await self._fork()
        except (TitanError, OSError) as error:
            logger.warning("environment %s: no further process can be started: %s", self._setup.name, error)
            lost = self._scheduler.not_started(worker)
            self._fail(lost, f"could not be run, its environment does not start again: {error}")
            return
        process.on_answers = lambda answers: self._hear(worker, answers)
        process.ended.add_done_callback(lambda ended: self._worker_ended(worker, ended.result()))
        self._scheduler.started(worker)
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
            host = self._host
        return await host.fork()

    def _send(self, worker: Worker[_Pending], numbered: dict[int, _Pending]) -> None:
        try:
            self._processes[worker].send([(number, pending.call) for number, pending in numbered.items()])
        except Exception:  # a rollouter's messages may hold objects that do not pickle
            for pending in numbered.values():
                try:
                    pickle.dumps(pending.call)
                except Exception as error:
                    self._fail([pending], f"cannot be sent to its process: {error}")
            self._scheduler.not_sent(worker, numbered)
            self._attend_soon()
        self._watch(worker)

    def _watch(self, worker: Worker[_Pending]) -> None:
        """Restart the timer that limits how long a worker may take for its next answer."""
        if (timer := self._timers.pop(worker, None)) is not None:
            timer.cancel()
        if (limit := self._scheduler.limit(worker)) is not None:
            self._timers[worker] = asyncio.get_running_loop().call_later(limit, self._limit_passed, worker)

    def _limit_passed(self, worker: Worker[_Pending]) -> None:
        if self._scheduler.limit_passed(worker):
            self._processes[worker].kill()
        else:
            self._processes[worker].send([])  # it is to leave the calls behind the slow one
        self._watch(worker)
        self._attend_soon()

    def _hear(self, worker: Worker[_Pending], answers: list[Answer | None]) -> None:
        for answer in answers:
            if answer is None:
                self._scheduler.list_done(worker)
                self._attend_soon()
            elif (pending := self._scheduler.answered(worker, answer.number)) is not None:
                self._settle(pending, answer)
        self._watch(worker)

    def _worker_ended(self, worker: Worker[_Pending], how: str) -> None:
        del self._processes[worker]
        if (timer := self._timers.pop(worker, None)) is not None:
            timer.cancel()
        if self._closed:
            return
        self.restarts += 1
        suspects, late = self._scheduler.worker_ended(worker)
        why = " because a call took too long" if late else ""
        logger.warning("environment %s: a process %s%s", self._setup.name, how, why)
        for pending in suspects:
            if late:
                self._fail_late(pending)
            else:
                self._spawn(self._try_alone(pending))
        self._attend_soon()

    async def _try_alone(self, pending: _Pending) -> None:
        """Run a call again that may have ended its process, alone in a new one."""
        kind = pending.call.kind
        slack = SLACK_SECONDS if kind in self._asynchronous else 0.0
        async with self._one_more_try:
            if pending.over:
                return
            if self._scheduler.hopeless(kind):
                self._fail_untried([pending])
                return
            try:
                answer = await self._run_alone(pending.call, self._setup.step_seconds + slack)
            except TaskTimeout:
                self._fail_late(pending)
            except (TitanError, OSError) as error:
                self._fail([pending], str(error))
            else:
                self._scheduler.in_time(pending.call)
                self._settle(pending, answer)
                return
            self.restarts += 1

    async def _run_alone(self, call: Call, seconds: float | None, started: asyncio.Event | None = None) -> Answer:
        """Run one call in its own process. When this returns, the process and all that it started are gone."""
        process = await self._fork()
        if started is not None:
            started.set()
        answered: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
        process.on_answers = lambda answers: None if answered.done() else answered.set_result(answers[0])
        either: list[asyncio.Future[Any]] = [answered, process.ended]
        try:
            process.send([(0, call)])
            await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            late = not process.ended.done()
            process.kill()
        await asyncio.wait([process.ended])
        if answered.done() and (answer := answered.result()) is not None:
            return answer
        if late and seconds is not None:
            raise TaskTimeout("took too long")
        gone = HostGone if process.lost_host and not self._closed else TaskError
        raise gone(self._closed or f"its process {process.ended.result()} and returned nothing")

    def _settle(self, pending: _Pending, answer: Answer) -> None:
        try:
            value = self._value(pending.call, answer)
        except TaskError as error:
            self._fail([pending], str(error), type(error))
        else:
            if not pending.over:
                pending.future.set_result(value)

    def _value(self, call: Call, answer: Answer) -> Any:
        """The answer's value. Raises TaskError if user code failed. The traceback is logged once per place, because the
        same grader may fail hundreds of times a step."""
        failure = answer.failure
        if failure is None:
            try:
                value = VALUES[call.kind](bytes(answer.value))
            except BadFrame as error:
                raise TaskError(f"its process answered something else than was asked for: {error}") from None
            if call.kind is CallKind.SCORE_GROUP and len(value) != len(call.group):
                raise TaskError(f"its process answered {len(value)} scores for {len(call.group)} rollouts")
            return value
        if failure.place not in self._shown:
            self._shown.add(failure.place)
            logger.info("%s failed:\n%s", call, escaped(failure.traceback[-LONGEST_TRACEBACK:].rstrip(), keep="\n"))
        raise (TaskTimeout if failure.late else TaskError)(escaped(failure.description, keep="\n"))

    def _fail_late(self, pending: _Pending) -> None:
        """Fail a call that was killed for taking too long. If all of its kind did, fail the waiting ones too."""
        late = f"did not finish within {self._setup.step_seconds:g} s and was killed"
        self._fail([pending], late, TaskTimeout)
        self._fail_untried(self._scheduler.late(pending.call))

    def _fail_untried(self, calls: Collection[_Pending]) -> None:
        seconds = self._setup.step_seconds
        untried = (
            f"was not tried: no such call has ever finished, and those of {MAX_PROCESSES} prompts took {seconds:g} s"
        )
        self._fail(calls, untried, TaskTimeout)

    def _fail(self, calls: Collection[_Pending], reason: str, kind: type[TaskError] = TaskError) -> None:
        for pending in calls:
            if not pending.over:
                pending.future.set_exception(kind(f"{pending.call}: {reason}"))

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
