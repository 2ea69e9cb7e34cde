"""Answers calls of user code, in a process forked from the environment's host.

- An exception of user code fails only the call that raised it; `exit()` is an exception like any other.
- Plain functions run one after the other, in the main thread and outside any event loop. Calls of `async def` functions
  run concurrently in one event loop, each under the time limit.
- The process holds no state that cannot be made again: examples are only cached.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import socket
import time
import traceback
from typing import Any

from titan_rl.environments.base import Demonstration, Environment, EnvironmentReply
from titan_rl.environments.rubric import Rubric, is_asynchronous, run_plain
from titan_rl.environments.tools import Toolbox, ToolError
from titan_rl.environments.transcript import Transcript
from titan_rl.errors import TaskError
from titan_rl.importing import describe
from titan_rl.one_line import one_line
from titan_rl.sandbox.task import Examples, make_environment, plain
from titan_rl.sandbox.wire import (
    LONGEST_SHOWN,
    Answer,
    Call,
    CallKind,
    Conversation,
    EnvironmentSetup,
    ExamplePrompt,
    Failure,
    Frames,
    TaskInfo,
    pack_frame,
)
from titan_rl.types import Message, Purpose, ToolCall

CANCEL_SECONDS = 2.0
"""How long to wait for a cancelled coroutine to end. After that it is left running."""

Numbered = tuple[int, Call]


class UserCode:
    """An environment and everything that is called on it."""

    def __init__(self, setup: EnvironmentSetup):
        self._environment = environment = make_environment(setup)
        self._examples = Examples(environment, setup)
        self._rubric = environment.rubric()
        if not isinstance(self._rubric, Rubric):
            raise TaskError(f"rubric returned {type(self._rubric).__name__}, expected Rubric")
        self._tools = Toolbox(environment.tools())
        self._step_seconds = setup.step_seconds
        self._slow_seconds = setup.slow_seconds
        asynchronous = {
            CallKind.RESPOND: is_asynchronous(environment.respond),
            CallKind.CALL_TOOLS: self._tools.asynchronous,
            CallKind.SCORE: self._rubric.asynchronous,
            CallKind.SCORE_GROUP: self._rubric.group_asynchronous,
        }
        self.info = TaskInfo(
            size=self._examples.size,
            held_out=self._examples.held_out,
            multi_turn=type(environment).respond is not Environment.respond,
            tools=self._tools.specs,
            scores_groups=bool(self._rubric.group_rewards),
            plays=type(environment).play is not Environment.play,
            asynchronous=frozenset(kind for kind, is_so in asynchronous.items() if is_so),
        )

    def serve(self, connection: socket.socket) -> None:
        """Answer calls until the worker closes the connection. After a call that took longer than `slow_seconds`, the
        rest of its list is skipped, because the worker has sent it to another process."""
        frames = Frames()
        while data := connection.recv(1 << 20):
            lists: list[list[Numbered]] = frames.feed(data)
            if lists and lists[0][0][1].kind in self.info.asynchronous:
                asyncio.run(self._serve_together(connection, frames, lists))
            for calls in lists:
                for number, call in calls:
                    began = time.monotonic()
                    connection.sendall(pack_frame(self._answer_plain(number, call)))
                    if time.monotonic() - began >= self._slow_seconds:
                        break
                connection.sendall(pack_frame(None))

    async def _serve_together(self, connection: socket.socket, frames: Frames, lists: list[list[Numbered]]) -> None:
        """Never returns: this process ends with the connection."""
        loop = asyncio.get_running_loop()
        running: set[asyncio.Task[None]] = set()

        def begin(lists: list[list[Numbered]]) -> None:
            for calls in lists:
                for number, call in calls:
                    task = loop.create_task(self._answer_in_time(connection, number, call))
                    running.add(task)
                    task.add_done_callback(running.discard)

        def receive() -> None:
            data = connection.recv(1 << 20)
            if not data:
                os._exit(0)  # a coroutine that ignores its cancellation would hold up an orderly exit
            begin(frames.feed(data))

        begin(lists)
        loop.add_reader(connection, receive)
        await loop.create_future()

    async def _answer_in_time(self, connection: socket.socket, number: int, call: Call) -> None:
        task = asyncio.ensure_future(self._answer(number, call))
        in_time, _ = await asyncio.wait([task], timeout=self._step_seconds)
        if not in_time:
            task.cancel()
            await asyncio.wait([task], timeout=CANCEL_SECONDS)
        if in_time and not task.cancelled():
            answer = task.result()
        else:
            late = f"did not finish within {self._step_seconds:g} s" + ("" if task.done() else ", nor when cancelled")
            answer = Answer(number, failure=Failure(late, late, late + "\n"))
        connection.sendall(pack_frame(answer))

    def _answer_plain(self, number: int, call: Call) -> Answer:
        try:
            return Answer(number, run_plain(self._perform(call)))
        except BaseException as error:  # user code may raise anything, SystemExit and KeyboardInterrupt included
            return Answer(number, failure=_failure(error))

    async def _answer(self, number: int, call: Call) -> Answer:
        try:
            return Answer(number, await self._perform(call))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return Answer(number, failure=_failure(error))

    async def _perform(self, call: Call) -> Any:
        if call.kind is CallKind.DEMONSTRATE:
            return _demonstration(self._environment.demonstration(call.prompt_index))
        if call.kind is CallKind.CHECK:
            return self._examples.check(call.prompt_index)
        if call.kind is CallKind.CALL_TOOLS:
            return tuple([await self._call_tool(each) for each in call.messages[-1].tool_calls])
        example = self._examples.find(call.purpose, call.prompt_index)
        if call.kind is CallKind.EXAMPLE:
            wanted = _as_text(example.answer) if call.purpose is Purpose.EVALUATE else ""
            return ExamplePrompt(plain(example.prompt), wanted)
        if call.kind is CallKind.PLAY:
            assert call.endpoint is not None
            state = self._environment.play(example, call.endpoint)
            return _pickled(asyncio.run(_awaited(state)) if inspect.isawaitable(state) else state, "play")
        if call.kind is CallKind.SCORE_GROUP:
            scores = await self._rubric.score_group_async(example, [_transcript(each) for each in call.group])
            return tuple(map(tuple, scores))
        transcript = _transcript(call)
        if call.kind is CallKind.SCORE:
            return tuple(await self._rubric.score_async(example, transcript))
        reply = self._environment.respond(example, transcript)
        return _reply(await reply if inspect.isawaitable(reply) else reply)

    async def _call_tool(self, call: ToolCall) -> Message:
        try:
            answer = await self._tools.answer(call)
        except ToolError as error:
            answer = self._environment.tool_error(str(error))
            if not isinstance(answer, str):
                raise TaskError(f"tool_error returned {type(answer).__name__}, expected str") from None
        return Message("tool", answer)


async def _awaited(value):
    return await value


def _failure(error: BaseException) -> Failure:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return Failure(type(error).__name__ + where, describe(error), "".join(traceback.format_exception(error)))


def _transcript(conversation: Call | Conversation) -> Transcript:
    state = None if conversation.state is None else pickle.loads(conversation.state)
    return Transcript(conversation.messages, conversation.finish_reasons, state)


def _as_text(answer: Any) -> str:
    text = "" if answer is None else answer if isinstance(answer, str) else repr(answer)
    return one_line(text, LONGEST_SHOWN)


def _demonstration(shown: Demonstration) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    if not isinstance(shown, Demonstration):
        raise TaskError(f"demonstration returned {type(shown).__name__}, expected Demonstration")
    prompt, messages = plain(shown.prompt), plain(shown.messages)
    if not prompt or not messages or messages[0].role != "assistant":
        raise TaskError('a demonstration is a prompt and then, first of all, a message of role "assistant"')
    return prompt, messages


def _reply(reply: EnvironmentReply) -> tuple[tuple[Message, ...], bool, bytes | None]:
    if not isinstance(reply, EnvironmentReply):
        raise TaskError(f"respond returned {type(reply).__name__}, expected EnvironmentReply")
    if not reply.done and not reply.messages:
        raise TaskError("respond returned neither messages nor done: the policy would speak to itself")
    return plain(reply.messages), reply.done, _pickled(reply.state, "respond")


def _pickled(state: object, method: str) -> bytes | None:
    try:
        return None if state is None else pickle.dumps(state)
    except Exception as error:  # pickling runs the state's own code
        raise TaskError(f"{method} returned a {type(state).__name__} that does not pickle: {error}") from error
