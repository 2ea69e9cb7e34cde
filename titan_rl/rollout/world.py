"""One rollout's door to its environment: the prompt, the environment's answers or its program, the reward.

The environment's state between turns is kept here as the bytes that the child process made of it; nothing in this
process looks inside.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from titan_rl.environments.base import EnvironmentReply
from titan_rl.environments.rubric import Score
from titan_rl.errors import TaskError
from titan_rl.rollout.programs import Programs
from titan_rl.rollout.result import Played
from titan_rl.rollout.session import SessionRecord, SessionRequest
from titan_rl.sandbox.sandbox import Sandbox
from titan_rl.sandbox.wire import Call, CallKind, Conversation
from titan_rl.types import FinishReason, Message, Purpose, ToolSpec


class World:
    """What a rollouter plays in."""

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        purpose: Purpose,
        index: int,
        prompt: tuple[Message, ...],
        prompt_token_ids: np.ndarray,
        multi_turn: bool,
        tools: tuple[ToolSpec, ...] = (),
        programs: Programs | None = None,
    ):
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids  # [T] int32, the prompt rendered for the policy to go on
        self.plays = programs is not None  # whether a program plays the rollout; the prompt is then not rendered
        self.multi_turn = multi_turn  # whether the environment answers the policy
        self.tools = tools  # what the policy may call
        self._sandbox = sandbox
        self._programs = programs
        self._purpose = purpose
        self._index = index
        self._state: bytes | None = None
        self.scored: Conversation | None = None  # what was last given to the rubric
        self.played = Played(messages=list(prompt))  # kept also where playing is cut off

    def begin(self) -> Played:
        """A new conversation in this world."""
        self._state = None
        self.played = Played(messages=list(self.prompt))
        return self.played

    async def play(self, request: SessionRequest) -> None:
        """Let the environment's program play in a session. What it asked is added to `played` when it is over, however
        it ends; the state that it returned stays in the world.

        Raises:
            TaskError: the program failed, or was idle for too long.
            GeneratorFailed: an engine failed a call.
            TitanError: what the gateway raised.
        """
        if self._programs is None:
            raise TaskError("this environment's rollouts are not played by programs")
        self._state = await self._programs.play(request, self._keep)

    def _keep(self, record: SessionRecord) -> None:
        for call, finish_reason in zip(record.calls, record.finish_reasons, strict=True):
            self.played.add(call.prompt_token_ids, call.completion, finish_reason)
        if record.messages:
            self.played.messages = list(record.messages)
        self.played.rendered_anew += record.rendered_anew

    async def respond(self, messages: Sequence[Message], finish_reasons: Sequence[FinishReason]) -> EnvironmentReply:
        """The environment's answer to the conversation so far. Its state stays in the world.

        Raises:
            TaskError: user code failed.
        """
        added, done, self._state = await self._call(CallKind.RESPOND, messages, finish_reasons)
        return EnvironmentReply(messages=added, done=done)

    async def call_tools(
        self, messages: Sequence[Message], finish_reasons: Sequence[FinishReason]
    ) -> tuple[Message, ...]:
        """The answers to the tool calls of the last message.

        Raises:
            TaskError: a tool failed, not the policy that called it.
        """
        return await self._call(CallKind.CALL_TOOLS, messages, finish_reasons)

    async def score(self, messages: Sequence[Message], finish_reasons: Sequence[FinishReason]) -> Score:
        """The rubric's verdict on the finished conversation.

        Raises:
            TaskError: user code failed.
        """
        self.scored = Conversation(tuple(messages), tuple(finish_reasons), self._state)
        return Score(*await self._call(CallKind.SCORE, messages, finish_reasons))

    async def _call(self, kind: CallKind, messages: Sequence[Message], finish_reasons: Sequence[FinishReason]):
        return await self._sandbox.call(
            Call(kind, self._purpose, self._index, tuple(messages), tuple(finish_reasons), self._state)
        )
