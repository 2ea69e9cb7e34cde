"""The process that runs user code: `python -m titan_rl.sandbox.environment_child SOCKET_FD CELL_FD PARENT_PID`.

- Whatever user code does, no exception of its own leaves this process other than as the `error` of the one call that
  raised it; `exit()` is an exception like any other.
- While user code runs, the progress cell names the call; the worker kills the process when one call runs too long.
- Plain functions run one after the other. `async def` ones of a batch run together, each under the time limit.
- It holds nothing that it could not make again: examples are cached, never owned.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from typing import Any

from titan_rl.environments.base import Demonstration, Environment, EnvironmentReply
from titan_rl.environments.rubric import Rubric, Score, is_asynchronous
from titan_rl.environments.tools import Toolbox, ToolError, checked_text
from titan_rl.environments.transcript import Transcript
from titan_rl.errors import TaskError
from titan_rl.one_line import one_line
from titan_rl.sandbox.child_side import Failure, Tracebacks, Worker
from titan_rl.sandbox.environment_wire import (
    LONGEST_SHOWN,
    Answer,
    Asked,
    Call,
    CallKind,
    Conversation,
    EnvironmentSetup,
    ProgressCell,
    TaskInfo,
)
from titan_rl.sandbox.task import Examples, make_environment, plain
from titan_rl.types import Message, Purpose, ToolCall

FLUSH_SECONDS = 0.05
"""Answers wait at most so long for others to travel with, once the next call begins."""
CANCEL_SECONDS = 2.0
"""What a cancelled coroutine may still take; past it the process has to go."""


class _Tracked:
    """Awaits a coroutine and marks the cell around each of its steps, so that one that blocks the loop is known."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], cell: ProgressCell, position: int):
        self._coroutine, self._cell, self._position = coroutine, cell, position

    def __await__(self) -> Generator[Any, Any, Any]:
        resume: Callable[[Any], Any] = self._coroutine.send
        value: Any = None
        while True:
            self._cell.mark(self._position)
            try:
                awaited = resume(value)
            except StopIteration as end:
                return end.value
            finally:
                self._cell.mark(ProgressCell.NOBODY)
            try:
                resume, value = self._coroutine.send, (yield awaited)
            except BaseException as error:  # thrown in by the event loop; the coroutine decides what becomes of it
                resume, value = self._coroutine.throw, error


class EnvironmentHost:
    """Runs calls against one environment."""

    def __init__(self, setup: EnvironmentSetup, cell: ProgressCell):
        self._environment = make_environment(setup)
        self._examples = Examples(self._environment, setup)
        self._rubric = self._environment.rubric()
        if not isinstance(self._rubric, Rubric):
            raise TaskError(f"rubric returned {type(self._rubric).__name__}, expected Rubric")
        self._tools = Toolbox(self._environment.tools())
        self._cell = cell
        self._step_seconds = setup.step_seconds
        self._slow_seconds = setup.slow_seconds
        self._tracebacks = Tracebacks()
        self._runner = asyncio.Runner()
        self._asynchronous = {
            CallKind.EXAMPLE: False,
            CallKind.DEMONSTRATE: False,
            CallKind.CHECK: False,
            CallKind.RESPOND: is_asynchronous(self._environment.respond),
            CallKind.CALL_TOOLS: self._tools.asynchronous,
            CallKind.SCORE: self._rubric.asynchronous,
            CallKind.SCORE_GROUP: self._rubric.group_asynchronous,
        }
        self.info = TaskInfo(
            size=self._examples.size,
            held_out=self._examples.held_out,
            multi_turn=type(self._environment).respond is not Environment.respond,
            tools=self._tools.specs,
            scores_groups=bool(self._rubric.group_rewards),
            plays=type(self._environment).play is not Environment.play,
        )

    def serve(
        self, calls: Sequence[Call], send: Callable[[list[Answer] | None], None], *, at_once: bool = False
    ) -> bool:
        """Run a batch; `send` gets the answer of every call that is begun, then None. No call is begun past
        `slow_seconds`. False when this process can not go on after it.

        Args:
            at_once: an answer is sent before the next call begins.
        """
        outbox = _Outbox(send, seconds=0.0 if at_once else FLUSH_SECONDS)
        began = time.monotonic()
        together = []
        slow = False
        for position, call in enumerate(calls):
            if self._asynchronous[call.kind]:
                together.append((position, call))
            elif not slow:
                outbox.flush_if_due()
                self._cell.mark(position)
                outbox.put(self._run(position, call))
                slow = time.monotonic() - began >= self._slow_seconds
        self._cell.mark(ProgressCell.NOBODY)
        survived = self._runner.run(self._serve_together(together, outbox)) if together and not slow else True
        outbox.flush()
        if survived:
            send(None)
        return survived

    def _run(self, position: int, call: Call) -> Answer:
        try:
            return Answer(position, "", self._perform(call))
        except BaseException as error:  # user code may raise anything, SystemExit and KeyboardInterrupt included
            return self._failed(position, call, error)

    def _perform(self, call: Call) -> Any:
        if call.kind is CallKind.DEMONSTRATE:
            return _demonstration(self._environment.demonstration(call.prompt_index))
        if call.kind is CallKind.CHECK:
            return self._examples.check(call.prompt_index)
        if call.kind is CallKind.CALL_TOOLS:
            return tuple(_told(self._answer(each)) for each in call.messages[-1].tool_calls)
        example = self._examples.find(call.purpose, call.prompt_index)
        if call.kind is CallKind.EXAMPLE:
            wanted = _as_text(example.answer) if call.purpose is Purpose.EVALUATE else ""
            return Asked(plain(example.prompt), wanted)
        if call.kind is CallKind.SCORE_GROUP:
            return tuple(map(tuple, self._rubric.score_group(example, [_transcript(each) for each in call.group])))
        transcript = _transcript(call)
        if call.kind is CallKind.SCORE:
            return tuple(self._rubric.score(example, transcript))
        return _reply(self._environment.respond(example, transcript))

    def _answer(self, call: ToolCall) -> str:
        if problem := self._tools.problem(call):
            return self._environment.tool_error(problem)
        try:
            return checked_text(call, self._tools.run(call))
        except ToolError as error:
            return self._environment.tool_error(str(error))

    async def _answer_async(self, call: ToolCall) -> str:
        if problem := self._tools.problem(call):
            return self._environment.tool_error(problem)
        try:
            return await self._tools.run_async(call)
        except ToolError as error:
            return self._environment.tool_error(str(error))

    async def _perform_async(self, call: Call) -> Any:
        if call.kind is CallKind.CALL_TOOLS:
            return tuple([_told(await self._answer_async(each)) for each in call.messages[-1].tool_calls])
        example = self._examples.find(call.purpose, call.prompt_index)
        if call.kind is CallKind.SCORE_GROUP:
            scores = await self._rubric.score_group_async(example, [_transcript(each) for each in call.group])
            return tuple(map(tuple, scores))
        transcript = _transcript(call)
        if call.kind is CallKind.SCORE:
            score: Score = await self._rubric.score_async(example, transcript)
            return tuple(score)
        reply = self._environment.respond(example, transcript)
        return _reply(await reply if inspect.isawaitable(reply) else reply)

    async def _serve_together(self, numbered: list[tuple[int, Call]], outbox: _Outbox) -> bool:
        async def one(position: int, call: Call) -> None:
            try:
                value = await _Tracked(self._perform_async(call), self._cell, position)
                answer = Answer(position, "", value)
            except asyncio.CancelledError:
                answer = Answer(position, self._too_long())
            except BaseException as error:
                answer = self._failed(position, call, error)
            outbox.put(answer)
            outbox.flush_soon()

        tasks = {asyncio.ensure_future(one(position, call)): position for position, call in numbered}
        _, late = await asyncio.wait(tasks, timeout=self._step_seconds)
        for task in late:
            task.cancel()
        stuck = (await asyncio.wait(late, timeout=CANCEL_SECONDS))[1] if late else set()
        for task in stuck:
            outbox.put(Answer(tasks[task], self._too_long() + ", nor when cancelled"))
        return not stuck

    def _too_long(self) -> str:
        return f"did not finish within {self._step_seconds:g} s"

    def _failed(self, position: int, call: Call, error: BaseException) -> Answer:
        failure = Failure.of(error)
        self._tracebacks.show(f"{call} failed", failure)
        return Answer(position, failure.description)


class _Outbox:
    """Answers on their way, sent in few frames and none of them late."""

    def __init__(self, send: Callable[[list[Answer] | None], None], *, seconds: float):
        self._send = send
        self._seconds = seconds
        self._answers: list[Answer] = []
        self._flushed = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None

    def put(self, answer: Answer) -> None:
        self._answers.append(answer)

    def flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._answers:
            self._send(self._answers)
            self._answers = []
        self._flushed = time.monotonic()

    def flush_if_due(self) -> None:
        if self._answers and time.monotonic() - self._flushed >= self._seconds:
            self.flush()

    def flush_soon(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self.flush)


def _transcript(conversation: Call | Conversation) -> Transcript:
    state = None if conversation.state is None else pickle.loads(conversation.state)
    return Transcript(conversation.messages, conversation.finish_reasons, state)


def _as_text(answer: Any) -> str:
    text = "" if answer is None else answer if isinstance(answer, str) else repr(answer)
    return one_line(text, LONGEST_SHOWN)


def _told(answer: str) -> Message:
    if not isinstance(answer, str):
        raise TaskError(f"tool_error returned {type(answer).__name__}, expected str")
    return Message("tool", answer)


def _demonstration(shown: Demonstration) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    if not isinstance(shown, Demonstration):
        raise TaskError(f"demonstration returned {type(shown).__name__}, expected Demonstration")
    prompt, messages = plain(shown.prompt), plain(shown.messages)
    if not prompt or not messages or messages[0].role != "assistant":
        raise TaskError('a demonstration is a prompt and then, first of all, a message of role "assistant"')
    return prompt, messages


def _reply(reply: EnvironmentReply | Awaitable[EnvironmentReply]) -> tuple[tuple[Message, ...], bool, bytes | None]:
    if not isinstance(reply, EnvironmentReply):
        raise TaskError(f"respond returned {type(reply).__name__}, expected EnvironmentReply")
    if not reply.done and not reply.messages:
        raise TaskError("respond returned neither messages nor done: the policy would speak to itself")
    return plain(reply.messages), reply.done, None if reply.state is None else pickle.dumps(reply.state)


def main(arguments: Sequence[str]) -> None:
    socket_fd, cell_fd, worker_pid = map(int, arguments)
    os.set_inheritable(cell_fd, False)
    cell = ProgressCell(cell_fd)
    with Worker(socket_fd, worker_pid) as worker:
        host = worker.make(lambda setup: EnvironmentHost(setup, cell))
        if host is None:
            return
        worker.send(host.info)
        while (batch := worker.receive()) is not None:
            calls, at_once = batch
            if not host.serve(calls, worker.send, at_once=at_once):
                os._exit(1)  # a coroutine that ignores its cancellation would also hold up an orderly exit


if __name__ == "__main__":
    main(sys.argv[1:])
