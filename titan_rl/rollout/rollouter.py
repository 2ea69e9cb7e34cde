"""Plays one rollout and scores it: `Rollouter` turn by turn, or a program of the environment through the gateway.

- If user code fails, only this rollout fails: its record has the error, its trajectory the turns so far. If a generator
  fails, its error is raised, because it is not the rollout's fault.
- The environment's state between turns is kept pickled, as its process sent it. This process never unpickles it.
- However a program's rollout ends (it returns, fails, is idle or is cancelled), its session is closed exactly once, its
  process is gone, and its sampled turns are kept.

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
from dataclasses import dataclass, field
from typing import Any, Protocol

from titan_rl.chat.renderer import Renderer
from titan_rl.environments.base import EnvironmentReply
from titan_rl.environments.rubric import Score, Transcript
from titan_rl.errors import (
    GeneratorFailed,
    InfrastructureFailed,
    RequestAborted,
    RequestError,
    RequestTooLong,
    TaskError,
    TaskTimeout,
    TitanError,
)
from titan_rl.isolation.pool import UserCodePool
from titan_rl.isolation.wire import CallKind, UserCall
from titan_rl.metrics.rollout_record import RolloutRecord
from titan_rl.rollout.report import ended, failure_of
from titan_rl.rollout.samples import Turn, check
from titan_rl.rollout.trajectory import UNBOUNDED, Prompt, RolloutRequest, Trajectory, extends
from titan_rl.types import (
    EXACT_MATCH,
    Completion,
    Endpoint,
    FinishReason,
    GenerationRequest,
    GroupRequest,
    Message,
    SamplingParams,
    StopReason,
)

Generate = Callable[[GenerationRequest], Awaitable[Completion]]

TURNS = "turns"
"""Name of the score that is the sum of the turns' rewards."""

logger = logging.getLogger(__name__)


class Rollouter:
    """Plays rollouts. Limits are those of `RolloutConfig`. `max_model_len`: longest prompt + completion in tokens; 0:
    unknown."""

    def __init__(
        self, *, renderer: Renderer, run_seed: int, max_turns: int, max_sampled_tokens: int = 0, max_model_len: int = 0
    ):
        self.renderer = renderer
        self.run_seed = run_seed
        self.max_turns = max_turns
        self.max_sampled_tokens = max_sampled_tokens
        self.max_model_len = max_model_len
        self._until_stop = SamplingParams(max_new_tokens=UNBOUNDED, stop_token_ids=tuple(renderer.stop_token_ids))
        self._attempts = itertools.count()
        self._attempt_prefix = uuid.uuid4().hex[:8]  # a restarted worker counts from 0 again

    def begin(self, group: GroupRequest, sample: int) -> Trajectory:
        """The empty trajectory of sample number `sample` of a group, with a fresh session id."""
        request = RolloutRequest(
            session_id=f"{group.purpose}-{group.group_id}-{sample}-{self._attempt()}",
            group=group,
            sample=sample,
            max_turns=self.max_turns,
            max_sampled_tokens=self.max_sampled_tokens,
        )
        return Trajectory(request, self.renderer, run_seed=self.run_seed, max_model_len=self.max_model_len)

    async def roll_out(
        self, group: GroupRequest, sample: int, generate: Generate, rollout: OpenRollout
    ) -> RolloutRecord:
        """Play a rollout to its end. If this is cancelled, `rollout` keeps the turns so far."""
        try:
            if rollout.played_by_program:
                reason = await rollout.run_program()
            else:
                reason = await self._converse(generate, rollout)
            score = await rollout.score()
        except (TaskError, RequestError) as error:
            return rollout.failed(error)
        return rollout.ended(reason, score=score)

    async def complete(self, prompt: Prompt, generate: Generate, rollout: OpenRollout) -> Turn:
        """Sample one turn of the policy, to be trained. The caller adds its message to `rollout.messages`.

        Raises:
            RolloutOver: the rollout has no turns or tokens left.
            RequestError: the prompt leaves no room or is refused, or the completion was aborted or is empty.
        """
        trajectory = rollout.trajectory
        group, sample = trajectory.request.group, trajectory.request.sample
        if trajectory.exhausted(prompt) is StopReason.CONTEXT_FULL:
            raise RequestTooLong(f"the prompt of {len(prompt.token_ids)} tokens leaves no room in {self.max_model_len}")
        name = f"{group.purpose}-{group.group_id}-{sample}-{trajectory.requested}-{self._attempt()}"
        (request,) = trajectory.ask(name, [(prompt, self._until_stop)], choices=1)
        try:
            completion = await generate(request)
            if completion.finish_reason is FinishReason.ABORT:
                raise RequestAborted(f"{request.request_id} was aborted after {len(completion.token_ids)} tokens")
            check(completion)
            message = self.renderer.parse(
                completion.token_ids.tolist(), completion.finish_reason, prompt.token_ids, rollout.tools
            )
        except BaseException:
            trajectory.dropped([request.request_id])
            raise
        return trajectory.answered(completion, message, stopped=completion.finish_reason is FinishReason.STOP)

    async def _converse(self, generate: Generate, rollout: OpenRollout) -> StopReason:
        """Play the conversation to its end; returns why it ended."""
        trajectory, prompt = rollout.trajectory, rollout.prompt
        while True:
            turn = await self.complete(prompt, generate, rollout)
            rollout.messages.append(turn.message)
            last = trajectory.requested >= self.max_turns
            if turn.message.tool_calls:
                if last:
                    return StopReason.MAX_TURNS
                rollout.messages.extend(await rollout.call_tools())
            elif not rollout.multi_turn:
                return StopReason(turn.finish_reason.value)
            else:
                reply = await rollout.respond()
                rollout.messages.extend(reply.messages)
                if reply.done or last:
                    return StopReason.DONE if reply.done else StopReason.MAX_TURNS
            prompt = trajectory.prompt_of_chat(rollout.messages, rollout.tools)
            if (reason := trajectory.exhausted(prompt)) is not None:
                return reason

    def _attempt(self) -> str:
        return f"{self._attempt_prefix}{next(self._attempts):x}"


class OpenRollout:
    """A rollout while it is played: its trajectory, and the environment that answers the policy.

    Args:
        prompt: of the first turn; without tokens if a program plays.
        programs: runs the program that plays; None: no program plays.
    """

    def __init__(self, pool: UserCodePool, trajectory: Trajectory, *, prompt: Prompt, programs: Programs | None = None):
        self.trajectory = trajectory
        trajectory.messages += prompt.messages
        self.prompt = prompt
        self.played_by_program = programs is not None
        self.multi_turn = pool.info.multi_turn  # whether the environment answers the policy
        self.tools = pool.info.tools  # tools that the policy may call
        self.scored: Transcript | None = None  # the conversation that was last scored
        self._pool = pool
        self._programs = programs
        self._state: bytes | None = None
        self._open_call: asyncio.Future[Any] | None = None
        self._answered = 0  # turns that the environment has answered

    @property
    def messages(self) -> list[Message]:
        """The conversation that will be graded."""
        return self.trajectory.messages

    async def run_program(self) -> StopReason:
        """Let the environment's program play, in a session of the gateway. The session's trajectory takes the place of
        the one here when it is closed, however it ends; the state that the program returns is kept.

        A cancellation ends the program; this returns once the session is closed. Raises as `UserCodePool.run_program`
        and the gateway do; TaskTimeout: the program was idle for too long; InfrastructureFailed: the gateway could not
        read an answer; GeneratorFailed: an engine failed a call.
        """
        if (programs := self._programs) is None:
            raise TaskError("this environment's rollouts are not played by programs")
        request, given_up = self.trajectory.request, asyncio.get_running_loop().create_future()
        session = asyncio.create_task(self._session(request, programs, given_up), name=f"session {request.session_id}")
        programs.sessions.add(session)
        session.add_done_callback(programs.sessions.discard)
        try:
            self._state = await asyncio.shield(session)
        except asyncio.CancelledError:
            given_up.cancel()
            session.add_done_callback(_log_failure)  # nobody else will
            await asyncio.wait([session])
            raise
        return self.trajectory.refused or StopReason.DONE

    async def _session(
        self, request: RolloutRequest, programs: Programs, given_up: asyncio.Future[None]
    ) -> bytes | None:
        """The program's pickled state. This task is never cancelled: that could lose the trajectory."""
        endpoint = await programs.gateway.open(request)
        started = asyncio.Event()
        group = request.group
        program = asyncio.ensure_future(self._pool.run_program(group.purpose, group.group_id, endpoint, started))
        idle = asyncio.ensure_future(programs.idle(request.session_id, started))
        ends = (program, idle, given_up)
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if program.done():
                return program.result()
            if idle.done():
                idle.result()
                seconds = f"{programs.idle_seconds:g} s (environment.program_seconds)"
                raise TaskTimeout(f"its program neither asked nor returned for {seconds} and was ended")
            return None
        finally:
            for each in ends:
                each.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
            self._take(trajectory := await programs.gateway.close(request.session_id))
            if trajectory.failure:
                raise GeneratorFailed(f"{group} sample {request.sample}: {trajectory.failure}")
            if trajectory.misread:  # whatever the program made of it
                raise InfrastructureFailed(f"the gateway could not read an answer, a bug: {trajectory.misread}")

    def _take(self, trajectory: Trajectory) -> None:
        """Go on with a session's trajectory, up to the first turn that could not be trained."""
        turns, trajectory.turns = trajectory.turns, []
        if not turns:
            trajectory.messages = self.messages
        self.trajectory = trajectory
        for turn in turns:
            check(turn.completion)
            trajectory.turns.append(turn)

    async def respond(self) -> EnvironmentReply:
        """The environment's answer to the conversation so far, whose messages the caller adds. Keeps the reward and the
        role of the turn; where a conversation begins anew, the messages so far are put aside. Raises TaskError if user
        code failed."""
        reply: EnvironmentReply = await self._call(CallKind.RESPOND)
        turns = self.trajectory.turns[self._answered :]
        self._answered += len(turns)
        for turn in turns:  # all but the last called tools
            turn.role = reply.role
        if reply.reward and not turns:
            raise TaskError("the environment gave a reward for a turn, and the policy had none since its last answer")
        for turn in turns[-1:]:
            turn.reward = reply.reward
        if reply.anew and not reply.done:
            sides = self.trajectory.side_conversations
            sides[:] = [*(each for each in sides if not extends(self.messages, each)), tuple(self.messages)]
            self.trajectory.messages = []
        return reply

    async def call_tools(self) -> Sequence[Message]:
        """The answers to the tool calls of the last message. Raises TaskError if a tool itself failed; a wrong call is
        answered with a message."""
        answers, _ = await self._call(CallKind.CALL_TOOLS)
        return answers

    async def score(self) -> Score:
        """The rubric's score of the conversation, with the turns' rewards. Raises TaskError if user code failed."""
        self.scored = self._conversation()
        reward, parts = await self._call(CallKind.SCORE)
        if turns := [turn.reward for turn in self.trajectory.turns if turn.reward is not None]:
            parts = {EXACT_MATCH: float(reward >= 1.0)} | parts | {TURNS: sum(turns)}
        return Score(reward + sum(turns), parts)

    async def clean_up(self) -> None:
        """Let the environment free what the state names, if there is one, a call that was given up included. Raises
        TaskError if user code failed."""
        if self._open_call is not None:
            await asyncio.gather(self._open_call, return_exceptions=True)
        if self._state is not None:
            await self._call(CallKind.CLEAN_UP)

    def ended(self, reason: StopReason, *, score: Score) -> RolloutRecord:
        """The record of the finished rollout: how it ended."""
        return self._record(stop_reason=reason, reward=score.reward, reward_parts=score.parts)

    def failed(self, error: TitanError) -> RolloutRecord:
        """The record of a rollout that this error ended."""
        return self._record(**failure_of(error))

    def _record(self, **how: Any) -> RolloutRecord:
        return ended(self.trajectory.request.group, self.trajectory.request.sample, **how)

    def _conversation(self) -> Transcript:
        turns = self.trajectory.graded_last
        reasons, tokens = (turn.finish_reason for turn in turns), (len(turn.completion.token_ids) for turn in turns)
        return Transcript(tuple(self.messages), tuple(reasons), self._state, tuple(tokens))

    async def _call(self, kind: CallKind) -> Any:
        if not self._pool.info.cleans_up:
            return await self._called(kind)
        # what it has opened is known from its answer, which is waited for even if nobody else wants it
        self._open_call = asyncio.ensure_future(self._called(kind))
        return await asyncio.shield(self._open_call)

    async def _called(self, kind: CallKind) -> Any:
        """The answer, whose state is kept."""
        group = self.trajectory.request.group
        answer = await self._pool.call(UserCall(kind, group.purpose, group.group_id, self._conversation()))
        if kind is CallKind.RESPOND and answer.state is not None:
            self._state = answer.state
        elif kind is CallKind.CALL_TOOLS:
            self._state = answer[1]
        return answer


class RolloutGateway(Protocol):
    """The gateway's interface for rollout workers."""

    async def open(self, request: RolloutRequest) -> Endpoint:
        """Open a session; returns the policy's address and the session's key, for the program."""
        ...

    async def idle(self, session_id: str, seconds: float) -> None:
        """Return once the session has had no open call for `seconds`, counted from its opening if it never had one."""
        ...

    async def close(self, session_id: str) -> Trajectory:
        """Close the session: abort its open calls and refuse its key from now on. Raises RequestLost, ActorGone: the
        rollout is lost and is to be played again."""
        ...


@dataclass(frozen=True, slots=True)
class Programs:
    """What the rollouts of a worker need that programs play."""

    gateway: RolloutGateway
    idle_seconds: float
    sessions: set[asyncio.Task[bytes | None]] = field(default_factory=set)
    """That are not closed."""

    async def idle(self, session_id: str, started: asyncio.Event) -> None:
        """Returns when the program was idle for too long, not counting the wait for its process."""
        opened = time.monotonic()
        await started.wait()
        await self.gateway.idle(session_id, self.idle_seconds + time.monotonic() - opened)


def _log_failure(session: asyncio.Task[bytes | None]) -> None:
    if not session.cancelled() and (error := session.exception()) is not None:
        logger.warning("%s, which was abandoned: %s", session.get_name(), error)
