"""Makes the environment and answers calls of user code.

- It runs in the fork server, which makes the environment, and in its forks, which answer the calls.
- An exception of user code fails only the call that raised it; `exit()` is an exception like any other.
- Plain functions run one after the other, in the main thread and outside any event loop. Calls of `async def` functions
  run concurrently in one event loop, each under the time limit.
- A process may allocate so much memory and no more. After a call that wanted more it ends: another one takes its place.
- The process holds no state that cannot be made again: examples are only cached.
"""

import asyncio
import inspect
import os
import pickle
import resource
import socket
import time
import traceback
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from titan_rl.environments import SHORT_NAMES
from titan_rl.environments.base import Demonstration, Environment, EnvironmentReply, right_answer
from titan_rl.environments.rubric import Rubric, Transcript, awaited, is_asynchronous, number_of, run_plain
from titan_rl.environments.tools import Toolbox, ToolError
from titan_rl.errors import ConfigError, TaskError
from titan_rl.importing import describe, import_name, import_user_module
from titan_rl.isolation.wire import (
    LARGEST_RESULT,
    LONGEST_SHOWN,
    CallKind,
    CallResult,
    EnvironmentSetup,
    ExamplePrompt,
    Failure,
    Frames,
    TaskCheck,
    TaskInfo,
    UserCall,
    pack_report,
)
from titan_rl.one_line import one_line, sendable
from titan_rl.types import Example, Message, Purpose, ToolCall

CANCEL_SECONDS = 2.0
"""How long to wait for a cancelled coroutine to end. After that it is left running."""

Numbered = tuple[int, UserCall]


class UserCode:
    def __init__(self, setup: EnvironmentSetup):
        self._environment = environment = make_environment(setup)
        self._examples = Examples(environment, setup)
        self._rubric = environment.rubric()
        if not isinstance(self._rubric, Rubric):
            raise TaskError(f"rubric returned {type(self._rubric).__name__}, expected Rubric")
        self._tools = Toolbox(environment.tools())
        if self._tools.of_state and type(environment).initial_state is Environment.initial_state:
            raise ConfigError(f"tool {self._tools.of_state} takes a State, and {setup.name} has no `initial_state`")
        self._setup = setup
        asynchronous = {
            CallKind.RESPOND: is_asynchronous(environment.respond),
            CallKind.CALL_TOOLS: self._tools.asynchronous,
            CallKind.SCORE: self._rubric.asynchronous,
            CallKind.SCORE_GROUP: self._rubric.group_asynchronous,
            CallKind.CLEAN_UP: is_asynchronous(environment.clean_up),
        }
        self.info = TaskInfo(
            size=self._examples.size,
            held_out=self._examples.held_out,
            multi_turn=type(environment).respond is not Environment.respond,
            tools=self._tools.specs,
            scores_groups=bool(self._rubric.group_rewards),
            plays=type(environment).play is not Environment.play,
            cleans_up=type(environment).clean_up is not Environment.clean_up,
            asynchronous=frozenset(kind for kind, is_so in asynchronous.items() if is_so),
        )

    def serve(self, connection: socket.socket) -> None:
        """Answer calls until the worker closes the connection, or one has used up the memory."""
        if self._setup.memory_mib:
            _bound_memory(self._setup.memory_mib << 20)
        frames: Frames[Numbered] = Frames(pickle.loads)
        while data := connection.recv(1 << 20):
            calls = [*frames.feed(data)]
            if calls and calls[0][1].kind in self.info.asynchronous:
                asyncio.run(self._serve_together(connection, frames, calls))
            for number, call in calls:
                result = run_plain(self._answer(number, call))
                connection.sendall(_frame(result))
                if result.last:
                    return

    async def _serve_together(
        self, connection: socket.socket, frames: Frames[Numbered], calls: Iterable[Numbered]
    ) -> NoReturn:
        """Run calls side by side. This process ends with the connection."""
        reader, writer = await asyncio.open_connection(sock=connection)
        writer.transport.set_write_buffer_limits(high=0)  # `drain` returns when all is sent
        running: set[asyncio.Task[None]] = set()

        async def answer(number: int, call: UserCall) -> None:
            result = await self._answer_in_time(number, call)
            writer.write(_frame(result))
            await writer.drain()
            if result.last:
                os._exit(0)

        while True:
            for number, call in calls:
                task = asyncio.create_task(answer(number, call))
                running.add(task)
                task.add_done_callback(running.discard)
            if not (data := await reader.read(1 << 20)):
                os._exit(0)  # a coroutine that ignores its cancellation would hold up an orderly exit
            calls = [*frames.feed(data)]

    async def _answer_in_time(self, number: int, call: UserCall) -> CallResult:
        task = asyncio.ensure_future(self._answer(number, call))
        in_time, _ = await asyncio.wait([task], timeout=self._setup.seconds(call.kind))
        if in_time:
            return task.result()
        task.cancel()
        await asyncio.wait([task], timeout=CANCEL_SECONDS)
        late = self._setup.late(call.kind) + ("" if task.done() else ", nor when cancelled")
        return CallResult(number, failure=Failure(late, late, late + "\n", late=True))

    async def _answer(self, number: int, call: UserCall) -> CallResult:
        try:
            return CallResult(number, _packed(await self._perform(call)))
        except BaseException as error:  # user code may raise anything, SystemExit and KeyboardInterrupt included
            # what a call has allocated that wanted too much may never be freed
            return CallResult(number, failure=self._failure(error), last=isinstance(error, MemoryError))

    def _failure(self, error: BaseException) -> Failure:
        description = describe(error)
        if isinstance(error, MemoryError) and (bound := self._setup.memory_mib):
            description = f"needed more memory than environment.memory_mib ({bound}): {description}"
        frames = traceback.extract_tb(error.__traceback__)
        where = f" {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        trace = "".join(traceback.format_exception(error))
        return Failure(sendable(type(error).__name__ + where), sendable(description), sendable(trace))

    async def _perform(self, call: UserCall) -> Any:
        if call.kind is CallKind.DEMONSTRATE:
            return _demonstration(self._environment.demonstration(call.prompt_index))
        if call.kind is CallKind.CHECK:
            return self._examples.check(call.prompt_index)
        if call.kind is CallKind.CALL_TOOLS and not self._tools.of_state:
            calls = call.conversation.messages[-1].tool_calls
            return tuple([await self._call_tool(each) for each in calls]), call.conversation.state
        example = self._examples.find(call.purpose, call.prompt_index)
        if call.kind is CallKind.CALL_TOOLS:
            state = self._transcript(call.conversation, example).state
            answers = tuple([await self._call_tool(each, state) for each in call.conversation.messages[-1].tool_calls])
            return answers, _pickled(state, "a tool")
        if call.kind is CallKind.EXAMPLE:
            answer = "" if example.answer is None else example.answer
            text = answer if isinstance(answer, str) else repr(answer)
            return ExamplePrompt(plain(example.prompt), one_line(text, LONGEST_SHOWN))
        if call.kind is CallKind.PLAY:
            assert call.endpoint is not None
            state = self._environment.play(example, call.endpoint)
            return _pickled(asyncio.run(awaited(state)) if inspect.isawaitable(state) else state, "play")
        if call.kind is CallKind.SCORE_GROUP:
            group = [self._transcript(each, example) for each in call.group]
            return await self._rubric.score_group_async(example, group)
        transcript = self._transcript(call.conversation, example)
        if call.kind is CallKind.SCORE:
            return await self._rubric.score_async(example, transcript)
        if call.kind is CallKind.CLEAN_UP:
            await awaited(self._environment.clean_up(example, transcript))
            return None
        return _reply(await awaited(self._environment.respond(example, transcript)))

    def _transcript(self, conversation: Transcript, example: Example) -> Transcript:
        state = conversation.state
        if state is None:  # pickled, so that no rollout changes what the example holds
            state = _pickled(self._environment.initial_state(example), "initial_state")
        return conversation._replace(state=None if state is None else pickle.loads(state))

    async def _call_tool(self, call: ToolCall, state: Any = None) -> Message:
        try:
            answer = await self._tools.answer(call, state)
        except ToolError as error:
            answer = self._environment.tool_error(str(error))
            if not isinstance(answer, str):
                raise TaskError(f"tool_error returned {type(answer).__name__}, expected str") from None
        return Message("tool", answer, tool_call_id=call.id)


def _packed(value: object) -> msgspec.Raw:
    """An answer's value. Raises TaskError where user code put something else than plain data into it."""
    try:
        return msgspec.Raw(msgspec.msgpack.encode(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TaskError(f"returned something that cannot be sent: {error}") from error


def _frame(result: CallResult) -> bytes:
    frame = pack_report(result)
    if len(frame) > LARGEST_RESULT:
        much = f"answered {len(frame) >> 20} MiB; the bound is {LARGEST_RESULT >> 20} MiB"
        frame = pack_report(result._replace(value=CallResult(0).value, failure=Failure(much, much, much + "\n")))
    return frame


def _bound_memory(nbytes: int) -> None:
    """Let this process allocate so many bytes more. Its private writable memory is bounded and not its address space,
    of which Node and Java reserve more than they use."""
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    bound = pages * resource.getpagesize() + nbytes
    if most == resource.RLIM_INFINITY or bound < most:
        resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))


def _demonstration(shown: Demonstration) -> Demonstration:
    if not isinstance(shown, Demonstration):
        raise TaskError(f"demonstration returned {type(shown).__name__}, expected Demonstration")
    prompt, messages, rejected = plain(shown.prompt), plain(shown.messages), plain(shown.rejected)
    if not prompt or not messages or any(turns[0].role != "assistant" for turns in (messages, rejected) if turns):
        raise TaskError('a demonstration is a prompt and then, first of all, a message of role "assistant"')
    answer = None if shown.answer is None else True
    return Demonstration(prompt=prompt, messages=messages, rejected=rejected, answer=answer)


def _reply(reply: EnvironmentReply) -> EnvironmentReply:
    if not isinstance(reply, EnvironmentReply):
        raise TaskError(f"respond returned {type(reply).__name__}, expected EnvironmentReply")
    if not reply.done and not reply.messages:
        raise TaskError("respond returned neither messages nor done: the policy would speak to itself")
    reward = None if reply.reward is None else number_of("respond", reply.reward, " the reward")
    return EnvironmentReply(
        messages=plain(reply.messages),
        done=bool(reply.done),
        state=_pickled(reply.state, "respond"),
        reward=reward,
        role=str(reply.role),
        anew=bool(reply.anew),
    )


def _pickled(state: object, method: str) -> bytes | None:
    try:
        return None if state is None else pickle.dumps(state)
    except Exception as error:  # pickling runs the state's own code
        raise TaskError(f"{method} returned a {type(state).__name__} that does not pickle: {error}") from error


LOOK_SECONDS = 2.0
"""Time limit for making training prompts before a run."""
CACHED_EXAMPLES = 4096
"""Training examples that are cached. With fewer than are in flight, every reward would make its example again."""


def make_environment(setup: EnvironmentSetup) -> Environment:
    """Import what the setup names and build the environment. Raises ConfigError: no environment has that name."""
    for where in setup.imports:
        import_user_module(where)
    cls = import_name(setup.name, SHORT_NAMES, Environment)
    kwargs = dict(setup.kwargs)
    if "seed" not in kwargs and "seed" in inspect.signature(cls).parameters:
        kwargs["seed"] = setup.run_seed
    return cls(**kwargs)


def plain(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Copy messages of user code into objects of our own classes only. Raises TaskError if one is not a message."""
    for message in messages:
        if not (isinstance(message, Message) and isinstance(message.role, str) and isinstance(message.content, str)):
            raise TaskError(f"{message!r} is not a Message of two strings")
    return tuple(
        Message(
            str(message.role),
            str(message.content),
            tuple(ToolCall(str(call.name), dict(call.arguments), id=str(call.id)) for call in message.tool_calls),
            str(message.tool_call_id),
            str(message.reasoning),
            str(message.name),
        )
        for message in messages
    )


class Examples:
    """The examples of an environment, cached: any of them can be made again."""

    def __init__(self, environment: Environment, setup: EnvironmentSetup):
        self._environment, self._setup = environment, setup
        self._held_out = self._hold_out()
        self.held_out = len(self._held_out)  # number of held-out prompts
        size = environment.size
        if size is not None and not (isinstance(size, int) and size > 0):
            raise TaskError(f"size is {size!r}; it is the number of training prompts, or None for an endless stream")
        sizes = [size for size in (size, setup.prompts) if size]
        self.size = min(sizes, default=None)  # distinct training prompts; None: endless
        self._training = lru_cache(CACHED_EXAMPLES)(lambda index: _checked("example", environment.example(index)))

    def find(self, purpose: Purpose, index: int) -> Example:
        """Number `index` of the training stream, or of the held-out list; or a demonstration, as an example."""
        if purpose is Purpose.EVALUATE:
            if not 0 <= index < self.held_out:
                raise TaskError(f"there is no held-out prompt {index}: the environment gave {self.held_out}")
            return self._held_out[index]
        if purpose is Purpose.DEMONSTRATE:
            shown = self._environment.demonstration(index)
            return Example(prompt=_demonstration(shown).prompt, answer=shown.answer)
        return self._training(index % self.size if self.size else index)

    def check(self, count: int) -> TaskCheck:
        """Make the first `count` training prompts, as far as `LOOK_SECONDS` and half of `step_seconds` go, and the
        held-out ones again."""
        until = time.monotonic() + min(LOOK_SECONDS, self._setup.step_seconds / 2)
        training: list[tuple[Message, ...]] = []
        answers: list[str] = []
        for index in range(min(count, self.size or count)):
            try:
                example = self.find(Purpose.TRAIN, index)
                training.append(plain(example.prompt))
                answers.append(right_answer(example))
            except (Exception, SystemExit) as error:
                raise TaskError(f"example({index}): {describe(error)}") from error
            if time.monotonic() > until:
                break
        return TaskCheck(
            training=tuple(training),
            held_out=tuple(plain(example.prompt) for example in self._held_out),
            held_out_again=tuple(plain(example.prompt) for example in self._hold_out()),
            answers=(*answers, *map(right_answer, self._held_out[:1])),
            warning=str(self._environment.warning),
        )

    def _hold_out(self) -> list[Example]:
        asked = self._setup.held_out
        examples = self._environment.held_out(asked) if asked else []
        if not isinstance(examples, Iterable):
            raise TaskError(f"held_out gave {examples!r}, which is no sequence of examples")
        return [_checked("held_out", example) for example in examples]


def _checked(method: str, example: object) -> Example:
    if not isinstance(example, Example):
        raise TaskError(f"{method} gave {example!r}, which is no Example")
    return example
