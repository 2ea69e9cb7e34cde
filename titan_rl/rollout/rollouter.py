"""Plays one rollout and scores it: `Rollouter` turn by turn, or a program of the environment through the gateway.

- If user code fails, only this rollout fails: its record has the error, its trajectory the turns so far. If a generator
  fails, its error is raised, because it is not the rollout's fault.
- The environment's state between turns is kept pickled, as its process sent it. This process never unpickles it.

To play rollouts another way, subclass `Rollouter` and name the class in `rollout.rollouter`. All rollouts of a worker
share one instance, so keep the state of a rollout in local variables.
"""

from __future__ import annotations

import inspect
import itertools
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from titan_rl.chat.renderer import Renderer
from titan_rl.environments.base import EnvironmentReply
from titan_rl.environments.rubric import Score
from titan_rl.errors import ConfigError, RequestError, RequestTooLong, TaskError, TaskTimeout, TitanError
from titan_rl.isolation.pool import UserCodePool
from titan_rl.isolation.wire import CallKind, Conversation, TaskInfo, UserCall
from titan_rl.metrics.rollout_record import RolloutRecord
from titan_rl.rollout.programs import Programs
from titan_rl.rollout.samples import Turn, check
from titan_rl.rollout.trajectory import UNBOUNDED, Prompt, RolloutRequest, Trajectory
from titan_rl.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    GroupRequest,
    Message,
    SamplingParams,
    StopReason,
)

Generate = Callable[[GenerationRequest], Awaitable[Completion]]

_FORMER = ("request", "turns")
"""Methods of older rollouters."""
_TODAY = (
    "is no longer a part of Rollouter: `rollout.trajectory` holds the turns and, as `request`, the limits, which "
    "`begin(group, sample)` makes; call `complete(prompt, generate, rollout)` and "
    "`rollout.ended(reason, score=score)` without turns and sample, and change a finished rollout by "
    "`msgspec.structs.replace`"
)


class Rollouter:
    """Plays rollouts. Limits are those of `RolloutConfig`.

    Args:
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

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if name := next((each for each in _FORMER if each in vars(cls)), ""):
            raise ConfigError(f"{cls.__name__}.{name} {_TODAY}")
        if "turns" in inspect.signature(cls.complete).parameters:
            raise ConfigError(f"{cls.__name__}.complete: the argument `turns` {_TODAY}")

    def __getattr__(self, name: str) -> Any:
        if name in _FORMER:
            raise TaskError(f"{type(self).__name__}.{name} {_TODAY}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

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
            return rollout.ended(reason_of(error), error=str(error))
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
        completion = await generate(request)
        if completion.finish_reason is FinishReason.ABORT:
            raise _Aborted(f"request {request.request_id} was aborted after {len(completion.token_ids)} tokens")
        check(completion)
        message = self.renderer.parse(
            completion.token_ids.tolist(), completion.finish_reason, prompt.token_ids, rollout.tools
        )
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
                rollout.messages += await rollout.call_tools()
            elif not rollout.multi_turn:
                return StopReason(turn.finish_reason.value)
            else:
                reply = await rollout.respond()
                rollout.messages += reply.messages
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

    def __init__(
        self,
        pool: UserCodePool,
        info: TaskInfo,
        trajectory: Trajectory,
        *,
        prompt: Prompt,
        programs: Programs | None = None,
    ):
        self.trajectory = trajectory
        trajectory.messages += prompt.messages
        self.prompt = prompt
        self.played_by_program = programs is not None
        self.multi_turn = info.multi_turn  # whether the environment answers the policy
        self.tools = info.tools  # tools that the policy may call
        self.scored: Conversation | None = None  # the conversation that was last scored
        self._pool = pool
        self._programs = programs
        self._state: bytes | None = None

    @property
    def messages(self) -> list[Message]:
        """The conversation that will be graded."""
        return self.trajectory.messages

    @messages.setter
    def messages(self, messages: list[Message]) -> None:
        self.trajectory.messages = messages

    async def run_program(self) -> StopReason:
        """Let the environment's program play; raises as `Programs.run`. Its trajectory takes the place of the one here
        when it ends, however it ends. The state that it returns is kept."""
        if self._programs is None:
            raise TaskError("this environment's rollouts are not played by programs")

        def take(trajectory: Trajectory) -> None:
            turns, trajectory.turns = trajectory.turns, []
            if not turns:
                trajectory.messages = self.messages
            self.trajectory = trajectory
            for turn in turns:
                check(turn.completion)
                trajectory.turns.append(turn)

        self._state = await self._programs.run(self.trajectory.request, take)
        return self.trajectory.refused or StopReason.DONE

    async def respond(self) -> EnvironmentReply:
        """The environment's answer to the conversation so far. Keeps the environment's new state. Raises TaskError if
        user code failed."""
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

    def ended(self, reason: StopReason, *, score: Score | None = None, error: str = "") -> RolloutRecord:
        """The record of the finished rollout: how it ended."""
        reward, parts = score or Score(0.0, {})
        request = self.trajectory.request
        return RolloutRecord(
            purpose=request.group.purpose,
            group=request.group.group_id,
            attempt=request.group.attempt,
            sample=request.sample,
            reward=reward,
            reward_parts=parts,
            stop_reason=reason,
            error=error,
        )

    def _conversation(self) -> Conversation:
        return Conversation(tuple(self.messages), tuple(self.trajectory.finish_reasons), self._state)

    async def _call(self, kind: CallKind) -> Any:
        group = self.trajectory.request.group
        return await self._pool.call(UserCall(kind, group.purpose, group.group_id, self._conversation()))


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
