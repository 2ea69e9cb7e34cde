"""Runs user code behind one object: every call returns a value or raises `TaskError`, whatever the code does.

- Every call is answered exactly once, even if a process hangs, exits, crashes or cannot be started.
- When a process ends, the first call of its list that it did not answer fails. It never began those behind, which wait
  again. In the process of `async def` functions each open call may be to blame, so all of them fail.
"""

import asyncio
import itertools
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from titan_rl.errors import (
    ActorGone,
    GraderFailed,
    InfrastructureFailed,
    TaskError,
    TaskTimeout,
    TitanError,
    ToolFailed,
)
from titan_rl.isolation.fork_server_client import ForkedProcess, ForkServerClient
from titan_rl.isolation.wire import (
    VALUES,
    BadFrame,
    CallKind,
    CallResult,
    EnvironmentSetup,
    TaskInfo,
    UserCall,
    pack_order,
)
from titan_rl.metrics.activity import activity
from titan_rl.one_line import escaped
from titan_rl.types import Endpoint, Purpose

BLAMED: dict[CallKind, type[TaskError]] = {
    CallKind.CALL_TOOLS: ToolFailed,
    CallKind.SCORE: GraderFailed,
    CallKind.SCORE_GROUP: GraderFailed,
}
"""What a call raises whose code failed; `TaskError` where it is of another kind."""
MAX_PROCESSES = 4
"""Processes for plain calls, started one by one where calls wait. With fewer, slow calls hold up the others. With one,
a reward that hangs would block the whole rollout worker for `grade_seconds` per rollout. Each costs 5 MiB (`copy`) to
15 MiB."""
QUICK_SECONDS, QUICK_LIST = 0.001, 16
"""Where calls of a kind take no longer than this, so many of them are one list: handing a call over costs a worker
40 µs of a core in lists of two, 10 µs in long ones."""
SLACK_SECONDS = 5.0
"""Extra time for the process of `async def` functions. It enforces the time limit itself, and coroutines may be slow to
react to their cancellation."""
PAUSE_SECONDS = 10.0
"""How long no further process of a kind is tried after one could not be made, as where there are too many on the
host."""
FORK_TRIES = 3
"""Of a process whose fork server dies while it is made: those who wait for it lose nothing."""
LONGEST_TRACEBACK = 1 << 16
"""Characters at the end of a traceback of user code that are logged."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Pending:
    number: int
    call: UserCall
    frame: bytes
    future: asyncio.Future[Any]


@dataclass(slots=True, eq=False)
class _Fork:
    process: ForkedProcess
    concurrent: bool
    """Runs `async def` functions, many at a time."""
    calls: dict[int, _Pending] = field(default_factory=dict)
    """Unanswered ones by number, in the order in which they were sent."""
    since: float = 0.0
    """Time of its last answer to a call, or of the first call after it had none."""
    late: bool = False
    """Was killed because it did not answer in time."""
    ends: bool = False
    """Ends after a call that is answered: nothing that it was sent is to blame."""

    @property
    def free(self) -> bool:
        return self.process.alive and not self.late and not self.ends and (self.concurrent or not self.calls)


class UserCodePool:
    def __init__(self, setup: EnvironmentSetup):
        self._setup = setup
        self._shortest = min(setup.step_seconds, setup.grade_seconds)
        self._server: ForkServerClient | None = None
        self._starting = asyncio.Lock()
        self._closed = "not started"
        self.info: TaskInfo
        """What the environment says about itself; there after `start`."""
        self._numbers = itertools.count()
        self._waiting: dict[bool, list[_Pending]] = {False: [], True: []}  # by whether they go to the concurrent fork
        self._forks: list[_Fork] = []
        self._forking: dict[bool, asyncio.Task[None]] = {}  # at most one of each kind at a time
        self._quick: set[CallKind] = set()  # kinds of which the last answers took `QUICK_SECONDS` at most
        self._timer: asyncio.TimerHandle | None = None  # for the next time limit
        self._dispatching: asyncio.Handle | None = None
        self._logged: set[str] = set()  # places whose traceback was logged
        self.restarts = 0
        """How many processes died, or were killed because a call was late; a report takes them along."""

    async def start(self) -> TaskInfo:
        """Make the environment; raises as `ForkServerClient.start`."""
        self._server = ForkServerClient(self._setup)
        self.info = await self._server.start()
        self._closed = ""
        return self.info

    @property
    def pid(self) -> int | None:
        """Process id of the fork server, while there is one."""
        return self._server.pid if self._server is not None else None

    @property
    def busy(self) -> bool:
        return any(self._waiting.values()) or any(fork.calls for fork in self._forks)

    async def call(self, call: UserCall) -> Any:
        """Run one call. `CallKind` describes its value. Raises TaskError: user code raised, took too long or ended its
        process; ActorGone: the fork server died during the call, which is no fault of user code."""
        if self._closed:
            raise InfrastructureFailed(f"{call}: {self._closed}")
        number = next(self._numbers)
        try:
            frame = pack_order((number, call))
        except Exception as error:  # a rollouter's messages may hold objects that do not pickle
            raise TaskError(f"{call}: cannot be sent to its process: {error}") from error
        pending = _Pending(number, call, frame, asyncio.get_running_loop().create_future())
        self._waiting[call.kind in self.info.asynchronous].append(pending)
        self._dispatch_soon()
        return await pending.future

    async def run_program(
        self, purpose: Purpose, index: int, endpoint: Endpoint, started: asyncio.Event | None = None
    ) -> bytes | None:
        """Run the environment's `play` for a prompt in its own process, without a time limit; returns a pickled state.

        When this returns, all processes that it started are gone. A cancellation ends it. `started`: set when the
        process is there; it may have waited for others to be forked. Raises as `call`: after ActorGone the rollout is
        lost, and is to be played again.
        """
        call = UserCall(CallKind.PLAY, purpose, index, endpoint=endpoint)
        try:
            with activity("program", prompt=index):
                process = await self._fork()
                if started is not None:
                    started.set()
                first: asyncio.Future[CallResult] = asyncio.get_running_loop().create_future()
                process.on_results = lambda results: None if first.done() else first.set_result(results[0])
                either: list[asyncio.Future[Any]] = [first, process.ended]
                try:
                    process.send(pack_order((0, call)))
                    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    process.kill()
                await asyncio.wait([process.ended])
                if first.done():
                    return self._value(call, first.result())
                gone = ActorGone if process.lost_server and not self._closed else InfrastructureFailed
                raise gone(self._closed or f"its process {process.ended.result()} and returned nothing")
        except (ActorGone, TaskError) as error:
            raise type(error)(f"{call}: {error}") from None

    async def close(self) -> None:
        """End all processes; calls still waiting fail."""
        self._closed = "closed"
        for calls in (*self._waiting.values(), *(fork.calls.values() for fork in self._forks)):
            self._fail(calls, self._closed)
        if self._timer is not None:
            self._timer.cancel()
        tasks = list(self._forking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.stop()

    def _dispatch_soon(self) -> None:
        """Schedule `_dispatch` for the end of this tick, when all its calls are here."""
        if self._dispatching is None:
            self._dispatching = asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Give waiting calls to free forks. Start another fork, one at a time, where calls still wait."""
        self._dispatching = None
        if self._closed:
            return
        for concurrent, most in ((False, MAX_PROCESSES), (True, 1)):
            waiting = [each for each in self._waiting[concurrent] if not each.future.done()]
            forks = [each for each in self._forks if each.concurrent is concurrent]
            for fork in forks:
                if waiting and fork.free:
                    quick = all(each.call.kind in self._quick for each in waiting[:QUICK_LIST])
                    share = max(-(-len(waiting) // most), QUICK_LIST if quick else 1)
                    self._send(fork, waiting[:share])
                    del waiting[:share]
            self._waiting[concurrent] = waiting
            if waiting and len(forks) < most and concurrent not in self._forking:
                self._forking[concurrent] = asyncio.create_task(self._start_fork(concurrent))

    def _send(self, fork: _Fork, calls: list[_Pending]) -> None:
        if not fork.calls:
            fork.since = asyncio.get_running_loop().time()
        fork.calls |= {pending.number: pending for pending in calls}
        fork.process.send(b"".join(pending.frame for pending in calls))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._shortest, self._kill_late)

    def _limit(self, fork: _Fork) -> float:
        """When a fork with calls must have given its next answer."""
        seconds = [self._setup.seconds(pending.call.kind) for pending in fork.calls.values()]
        return fork.since + (max(seconds) + SLACK_SECONDS if fork.concurrent else seconds[0])

    def _kill_late(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        busy = [fork for fork in self._forks if fork.calls and not fork.late]
        for fork in busy:
            if self._limit(fork) <= now:
                fork.late = True
                fork.process.kill()
        if limits := [self._limit(fork) for fork in busy if not fork.late]:  # calls that come meanwhile may have less
            until = min(*limits, now + self._shortest)
            self._timer = asyncio.get_running_loop().call_at(until, self._kill_late)

    async def _start_fork(self, concurrent: bool) -> None:
        """If there can be none, waiting calls are left to the other forks, and this goes on for a while so that no
        further one is tried; without others the calls fail. To try again at once would end only when the host has room
        for a process, and nobody knows when that is. Where the fork server has died the others end as well: there is no
        need to pause."""
        try:
            process = await self._fork()
            fork = _Fork(process, concurrent)
            self._forks.append(fork)
            process.on_results = partial(self._receive, fork)
            process.ended.add_done_callback(lambda ended: self._fork_ended(fork, ended.result()))
        except Exception as error:
            defect = not isinstance(error, (TitanError, OSError))
            text = "environment %s: no further process can be started: %s"
            logger.warning(text, self._setup.name, error, exc_info=defect)
            gone = isinstance(error, ActorGone)
            if not any(each.concurrent is concurrent for each in self._forks):
                lost = ActorGone if gone else InfrastructureFailed
                self._fail(self._waiting[concurrent], f"could not be run: {error}", lost)
            elif not gone:
                await asyncio.sleep(PAUSE_SECONDS)
        finally:
            del self._forking[concurrent]
            self._dispatch_soon()

    async def _fork(self) -> ForkedProcess:
        for left in reversed(range(FORK_TRIES)):
            async with self._starting:
                if self._closed or self._server is None:
                    raise TaskError(self._closed)
                if self._server.gone:
                    self.restarts += 1
                    logger.warning("environment %s: its fork server has died; starting a new one", self._setup.name)
                    await self._server.stop()
                    self._server = ForkServerClient(self._setup)
                    await self._server.start()
                    if self._closed:
                        await self._server.stop()
                server = self._server
            try:
                return await server.fork()
            except ActorGone:  # it died just now, and nothing has run in what it was to fork
                if not left:
                    raise
        raise AssertionError

    def _receive(self, fork: _Fork, results: list[CallResult]) -> None:
        answered = [(fork.calls.pop(each.number), each) for each in results if each.number in fork.calls]
        if not answered:
            return  # user code may write answers that nobody asked for: they give it no more time
        before, fork.since = fork.since, asyncio.get_running_loop().time()
        note = self._quick.add if fork.since - before <= QUICK_SECONDS * len(answered) else self._quick.discard
        for pending, result in answered:
            note(pending.call.kind)
            if result.last:
                fork.ends = True
                fork.process.kill()  # it ends by itself, unless what it started keeps it
            try:
                value = self._value(pending.call, result)
            except TaskError as error:
                self._fail([pending], str(error), type(error))
            else:
                if not pending.future.done():
                    pending.future.set_result(value)
        self._dispatch_soon()

    def _fork_ended(self, fork: _Fork, how: str) -> None:
        if self._closed:
            return
        self._forks.remove(fork)
        self.restarts += 1
        why = " because a call took too long" if fork.late else ""
        logger.warning("environment %s: a process %s%s", self._setup.name, how, why)
        open_calls = list(fork.calls.values())
        failed = 0 if fork.ends and not fork.late else len(open_calls) if fork.concurrent else 1
        kind = TaskTimeout if fork.late else ActorGone if fork.process.lost_server else InfrastructureFailed
        self._waiting[fork.concurrent][:0] = open_calls[failed:]
        for each in open_calls[:failed]:
            late = f"{self._setup.late(each.call.kind)} and was killed"
            self._fail([each], late if fork.late else f"its process {how} and returned nothing", kind)
        self._dispatch_soon()

    def _value(self, call: UserCall, result: CallResult) -> Any:
        """The result's value. Raises TaskError if user code failed. The traceback is logged once per place, because the
        same grader may fail hundreds of times a step."""
        failure, blamed = result.failure, BLAMED.get(call.kind, TaskError)
        if failure is None:
            try:
                value = VALUES[call.kind](bytes(result.value))
            except BadFrame as error:
                raise blamed(f"its process answered something else than was asked for: {error}") from None
            if call.kind is CallKind.SCORE_GROUP and len(value) != len(call.group):
                raise blamed(f"its process answered {len(value)} scores for {len(call.group)} rollouts")
            return value
        if failure.place not in self._logged:
            self._logged.add(failure.place)
            logger.info("%s failed:\n%s", call, escaped(failure.traceback[-LONGEST_TRACEBACK:].rstrip(), keep="\n"))
        kind = TaskTimeout if failure.late else InfrastructureFailed if result.last else blamed
        raise kind(escaped(failure.description, keep="\n"))

    def _fail(self, calls: Iterable[_Pending], reason: str, kind: type[TitanError] = InfrastructureFailed) -> None:
        for pending in calls:
            if not pending.future.done():
                pending.future.set_exception(kind(f"{pending.call}: {reason}"))
