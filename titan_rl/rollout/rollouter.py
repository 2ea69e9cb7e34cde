"""Plays one rollout and scores it: `Rollouter` turn by turn, or a program of the environment through the gateway.

- If user code fails, only this rollout fails: it is returned with `error` and its turns so far. If a generator fails,
  its error is raised, because it is not the rollout's fault.
- However a program's rollout ends (it returns, fails, is idle or is cancelled), its session at the gateway is closed
  exactly once, its process is gone, and its sampled turns are kept.
- The environment's state between turns is kept pickled, as its process sent it. This process never unpickles it.

To play rollouts another way, subclass `Rollouter` and name the class in `rollout.rollouter`. All rollouts of a worker
share one instance, so keep the state of a rollout in local variables.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from typing import Any

from titan_rl.chat.renderer import Renderer
from titan_rl.environments.base import EnvironmentReply
from titan_rl.environments.rubric import Score
from titan_rl.errors import GeneratorFailed, RequestError, RequestTooLong, TaskError, TaskTimeout, TitanError
from titan_rl.rollout.conversations import Prompt
from titan_rl.rollout.report import Rollout
from titan_rl.rollout.token_graph import TokenGraph
from titan_rl.rollout.turns import RolloutGateway, RolloutRecord, RolloutRequest, Turn, Turns
from titan_rl.sandbox.sandbox import Sandbox
from titan_rl.sandbox.wire import Call, CallKind, Conversation, TaskInfo
from titan_rl.types import (
    Completion,
    Endpoint,
    FinishReason,
    GenerationRequest,
    GroupRequest,
    Message,
    Purpose,
    SamplingParams,
    StopReason,
)

Generate = Callable[[GenerationRequest], Awaitable[Completion]]
Keep = Callable[[RolloutRecord], None]

logger = logging.getLogger(__name__)


class Rollouter:
    """Plays rollouts.

    Args:
        renderer: text to tokens and back.
        run_seed: the run's seed.
        max_turns: a conversation is cut after this many turns of the policy.
        max_sampled_tokens: limit for all turns together; 0: none.
        max_model_len: longest prompt + completion in tokens; 0: unknown.
    """

    def __init__(
        self,
        *,
        renderer: Renderer,
        run_seed: int,
        max_turns: int,
        max_sampled_tokens: int = 0,
        max_model_len: int = 0,
    ):
        self.renderer = renderer
        self.run_seed = run_seed
        self.max_turns = max_turns
        self.max_sampled_tokens = max_sampled_tokens
        self.max_model_len = max_model_len
        self._attempts = itertools.count()
        self._attempt_prefix = uuid.uuid4().hex[:8]  # a restarted worker counts from 0 again

    async def roll_out(self, group: GroupRequest, sample: int, generate: Generate, rollout: OpenRollout) -> Rollout:
        """Play sample number `sample` of a group to its end. If this is cancelled, `rollout` keeps the turns so far."""
        request = self.request(group, sample)
        try:
            if rollout.played_by_program:
                reason = await rollout.run_program(request)
            else:
                reason = await self._converse(self.turns(request), generate, rollout)
            score = await rollout.score()
        except (TaskError, RequestError) as error:
            return rollout.ended(sample, reason_of(error), error=str(error))
        return rollout.ended(sample, reason, score=score)

    def request(self, group: GroupRequest, sample: int) -> RolloutRequest:
        """The rollout's request: its place in the run, its limits, and a fresh session id."""
        return RolloutRequest(
            session_id=f"{group.purpose}-{group.group_id}-{sample}-{self._attempt()}",
            group=group,
            sample=sample,
            max_turns=self.max_turns,
            max_sampled_tokens=self.max_sampled_tokens,
        )

    def turns(self, request: RolloutRequest) -> Turns:
        """The bookkeeping of a rollout that is played here, without a program."""
        return Turns(request, self.renderer, run_seed=self.run_seed, max_model_len=self.max_model_len)

    async def complete(self, turns: Turns, prompt: Prompt, generate: Generate, rollout: OpenRollout) -> Turn:
        """Sample one turn of the policy and add it to the rollout, to be trained.

        Raises:
            RolloutOver: the rollout has no turns or tokens left.
            RequestError: the prompt leaves no room, or the generator refuses it, or the completion was aborted.
        """
        group, sample = turns.request.group, turns.request.sample
        if turns.exhausted(prompt) is StopReason.CONTEXT_FULL:
            raise RequestTooLong(f"the prompt of {len(prompt.token_ids)} tokens leaves no room in {self.max_model_len}")
        wanted = _wanted(group.sampling.max_new_tokens, tuple(self.renderer.stop_token_ids))
        name = f"{group.purpose}-{group.group_id}-{sample}-{turns.asked}-{self._attempt()}"
        (request,) = turns.ask(name, [(prompt, wanted)], choices=1)
        completion = await generate(request)
        if completion.finish_reason is FinishReason.ABORT:
            raise _Aborted(f"request {request.request_id} was aborted after {len(completion.token_ids)} tokens")
        message = self.renderer.parse(
            completion.token_ids.tolist(), completion.finish_reason, prompt.token_ids, rollout.tools
        )
        turn = turns.answered(completion, message, stopped=completion.finish_reason is FinishReason.STOP)
        rollout.add(turn)
        return turn

    async def _converse(self, turns: Turns, generate: Generate, rollout: OpenRollout) -> StopReason:
        """Play the conversation to its end; returns why it ended."""
        prompt = rollout.prompt
        while True:
            turn = await self.complete(turns, prompt, generate, rollout)
            rollout.messages.append(turn.message)
            last = turns.asked >= self.max_turns
            if turn.message.tool_calls:
                if last:
                    return StopReason.MAX_TURNS
                rollout.messages += await rollout.call_tools()
            elif not rollout.multi_turn:
                return StopReason(turn.finish_reason.value)
            else:
                reply = await rollout.respond()
                rollout.messages += reply.messages
                if reply.done or last:
                    return StopReason.DONE if reply.done else StopReason.MAX_TURNS
            prompt = turns.prompt_of_chat(rollout.messages, rollout.tools)
            if (reason := turns.exhausted(prompt)) is not None:
                return reason

    def _attempt(self) -> str:
        return f"{self._attempt_prefix}{next(self._attempts):x}"


class OpenRollout:
    """The state of a rollout that a rollouter plays.

    Args:
        index: of the prompt, in the training stream or the held-out list.
        prompt: of the first turn; without tokens if a program plays.
        programs: runs the program that plays; None: no program plays.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        info: TaskInfo,
        *,
        purpose: Purpose,
        index: int,
        prompt: Prompt,
        programs: Programs | None = None,
    ):
        self.prompt = prompt
        self.played_by_program = programs is not None
        self.multi_turn = info.multi_turn  # whether the environment answers the policy
        self.tools = info.tools  # tools that the policy may call
        self._sandbox = sandbox
        self._programs = programs
        self._purpose = purpose
        self._index = index
        self.messages: list[Message] = list(prompt.messages)
        self._side: tuple[tuple[Message, ...], ...] = ()
        self.graph = TokenGraph()
        self.finish_reasons: list[FinishReason] = []  # one per turn of the policy
        self.seeds: list[int] = []  # one per turn of the policy
        self.rendered_anew = 0
        self.scored: Conversation | None = None  # the conversation that was last scored
        self._state: bytes | None = None
        self._refused: StopReason | None = None  # the limit that refused a call of the program

    def add(self, turn: Turn) -> None:
        """Add a turn of the policy that will be trained; see `TokenGraph.add`. The caller adds its messages itself."""
        self.graph.add(turn.prompt_token_ids, turn.completion)
        self.finish_reasons.append(turn.finish_reason)
        self.seeds.append(turn.seed)
        self.rendered_anew += turn.anew

    async def run_program(self, request: RolloutRequest) -> StopReason:
        """Let the environment's program play. Its turns are added when it ends, however it ends. The state that it
        returns is kept.

        Raises:
            TaskError: the program failed, or was idle for too long.
            GeneratorFailed: an engine failed a call.
            TitanError: the gateway raised it.
        """
        if self._programs is None:
            raise TaskError("this environment's rollouts are not played by programs")
        self._state = await self._programs.run(request, self._keep)
        return self._refused or StopReason.DONE

    async def respond(self) -> EnvironmentReply:
        """The environment's answer to the conversation so far. Keeps the environment's new state.

        Raises:
            TaskError: user code failed.
        """
        added, done, self._state = await self._call(CallKind.RESPOND)
        return EnvironmentReply(messages=added, done=done)

    async def call_tools(self) -> Sequence[Message]:
        """The answers to the tool calls of the last message. Raises TaskError if a tool itself failed; a wrong call is
        answered with a message."""
        return await self._call(CallKind.CALL_TOOLS)

    async def score(self) -> Score:
        """The rubric's score of the conversation. Raises TaskError if user code failed."""
        self.scored = self._conversation()
        return Score(*await self._call(CallKind.SCORE))

    def ended(self, sample: int, reason: StopReason, *, score: Score | None = None, error: str = "") -> Rollout:
        """The finished rollout, with all turns so far."""
        return Rollout(
            sample=sample,
            graph=self.graph,
            messages=tuple(self.messages),
            side_conversations=self._side,
            seeds=tuple(self.seeds),
            reward=score.reward if score else 0.0,
            reward_parts=score.parts if score else {},
            error=error,
            stop_reason=reason,
            rendered_anew=self.rendered_anew,
        )

    def _keep(self, record: RolloutRecord) -> None:
        # Which of several open calls is answered first is chance, and must not decide how the rollout is trained. What
        # goes on with an answer has a longer prompt.
        for turn in sorted(record.turns, key=lambda turn: (len(turn.prompt_token_ids), turn.seed)):
            self.add(turn)
        self.finish_reasons = [turn.finish_reason for turn in record.turns]
        if record.turns:
            self.messages, self._side = list(record.messages), record.side_conversations
        self._refused = record.refused

    def _conversation(self) -> Conversation:
        return Conversation(tuple(self.messages), tuple(self.finish_reasons), self._state)

    async def _call(self, kind: CallKind) -> Any:
        return await self._sandbox.call(Call(kind, self._purpose, self._index, self._conversation()))


class Programs:
    """Runs the programs of one worker's rollouts."""

    def __init__(self, sandbox: Sandbox, sessions: RolloutGateway, *, idle_seconds: float):
        self._sandbox = sandbox
        self._sessions = sessions
        self._idle_seconds = idle_seconds
        self._running: set[asyncio.Task[bytes | None]] = set()

    async def close(self) -> None:
        """Wait until all sessions are closed. The programs have already been ended."""
        if self._running:
            await asyncio.wait(self._running)

    async def run(self, request: RolloutRequest, keep: Keep) -> bytes | None:
        """Run the environment's `play` for the request's prompt in its own session.

        A cancellation ends the program; this returns once the session is closed.

        Args:
            keep: called once with the session's record, unless the session could not be opened or closed.

        Returns:
            The program's pickled state; None if it returned None.

        Raises:
            TaskError: the program failed, or was idle for too long.
            RequestError: the gateway could not read an answer.
            GeneratorFailed: an engine failed a call.
            TitanError: the gateway raised it.
        """
        abandoned = asyncio.Event()
        session = asyncio.create_task(self._session(request, keep, abandoned), name=f"session {request.session_id}")
        self._running.add(session)
        session.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(session)
        except asyncio.CancelledError:
            abandoned.set()
            session.add_done_callback(_tell_failure)  # nobody else will
            await asyncio.wait([session])
            raise

    async def _session(self, request: RolloutRequest, keep: Keep, abandoned: asyncio.Event) -> bytes | None:
        """Open a session, run the program, close the session. This task is never cancelled: that could lose the
        record."""
        endpoint = await self._sessions.open(request)
        try:
            return await self._until_over(request, endpoint, abandoned)
        finally:
            record = await self._sessions.close(request.session_id)
            keep(record)
            if record.failure:
                raise GeneratorFailed(f"{request.group} sample {request.sample}: {record.failure}")
            if record.misread:  # whatever the program made of it
                raise RequestError(f"the gateway could not read an answer, which is a bug: {record.misread}")

    async def _until_over(self, request: RolloutRequest, endpoint: Endpoint, abandoned: asyncio.Event) -> bytes | None:
        group, started = request.group, asyncio.Event()
        program = asyncio.ensure_future(self._sandbox.run_program(group.purpose, group.group_id, endpoint, started))
        idle = asyncio.ensure_future(self._idle(request.session_id, started))
        left = asyncio.ensure_future(abandoned.wait())
        try:
            await asyncio.wait((program, idle, left), return_when=asyncio.FIRST_COMPLETED)
            if program.done():
                return program.result()
            if idle.done():
                idle.result()
                raise TaskTimeout(f"its program neither asked nor returned for {self._idle_seconds:g} s and was ended")
            return None
        finally:
            for each in (program, idle, left):
                each.cancel()
            await asyncio.gather(program, idle, left, return_exceptions=True)

    async def _idle(self, session_id: str, started: asyncio.Event) -> None:
        """Returns when the program was idle for too long, not counting the wait for its process."""
        opened = time.monotonic()
        await started.wait()
        await self._sessions.idle(session_id, self._idle_seconds + time.monotonic() - opened)


@lru_cache(maxsize=64)
def _wanted(max_new_tokens: int, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, stop_token_ids=stop_token_ids)


class _Aborted(RequestError):
    """A completion was aborted."""


def reason_of(error: TitanError) -> StopReason:
    """Why a rollout ended that this error ended."""
    match error:
        case TaskTimeout():
            return StopReason.TIMEOUT
        case _Aborted():
            return StopReason.ABORT
        case RequestTooLong():
            return StopReason.CONTEXT_FULL
    return StopReason.ERROR


def _tell_failure(session: asyncio.Task[bytes | None]) -> None:
    if not session.cancelled() and (error := session.exception()) is not None:
        logger.warning("%s, which was abandoned: %s", session.get_name(), error)
