"""One rollout while it is played: its prompt, its environment, and its turns so far.

The environment's state between turns is kept here pickled, as its process sent it. This process never unpickles it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from titan_rl.environments.base import EnvironmentReply
from titan_rl.environments.rubric import Score
from titan_rl.errors import TaskError
from titan_rl.rollout.programs import Programs
from titan_rl.rollout.result import Rollout
from titan_rl.rollout.token_graph import TokenGraph
from titan_rl.rollout.turns import Prompt, RolloutRecord, RolloutRequest, Turn
from titan_rl.sandbox.sandbox import Sandbox
from titan_rl.sandbox.wire import Call, CallKind, Conversation, TaskInfo
from titan_rl.types import FinishReason, Message, Purpose, StopReason


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
        self.plays = programs is not None
        self.multi_turn = info.multi_turn  # whether the environment answers the policy
        self.tools = info.tools  # tools that the policy may call
        self._sandbox = sandbox
        self._programs = programs
        self._purpose = purpose
        self._index = index
        self.begin()

    def begin(self) -> None:
        """Reset to the state before the first turn."""
        self.messages: list[Message] = list(self.prompt.messages)
        self.graph = TokenGraph()
        self.finish_reasons: list[FinishReason] = []  # one per turn of the policy
        self.rendered_anew = 0
        self.scored: Conversation | None = None  # the conversation that was last scored
        self._state: bytes | None = None

    def add(self, turn: Turn) -> None:
        """Add a turn of the policy that will be trained; see `TokenGraph.add`. The caller adds its messages itself."""
        self.graph.add(turn.prompt_token_ids, turn.completion)
        self.finish_reasons.append(turn.finish_reason)
        self.rendered_anew += turn.anew

    async def play(self, request: RolloutRequest) -> StopReason:
        """Let the environment's program play. Its turns are added when it ends, however it ends. The state that it
        returns is kept.

        Raises:
            TaskError: the program failed, or was idle for too long.
            GeneratorFailed: an engine failed a call.
            TitanError: the gateway raised it.
        """
        if self._programs is None:
            raise TaskError("this environment's rollouts are not played by programs")
        refused: list[StopReason] = []

        def keep(record: RolloutRecord) -> None:
            for turn in record.turns:
                self.add(turn)
            if record.turns:
                self.messages = list(record.messages)
            if record.refused is not None:
                refused.append(record.refused)

        self._state = await self._programs.play(request, keep)
        return refused[0] if refused else StopReason.DONE

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
        self.scored = Conversation(tuple(self.messages), tuple(self.finish_reasons), self._state)
        return Score(*await self._call(CallKind.SCORE))

    def ended(self, sample: int, reason: StopReason, *, score: Score | None = None, error: str = "") -> Rollout:
        """The finished rollout, with all turns so far."""
        return Rollout(
            sample=sample,
            graph=self.graph,
            messages=tuple(self.messages),
            reward=score.reward if score else 0.0,
            reward_parts=score.parts if score else {},
            error=error,
            stop_reason=reason,
            rendered_anew=self.rendered_anew,
        )

    async def _call(self, kind: CallKind) -> Any:
        messages, finish_reasons = tuple(self.messages), tuple(self.finish_reasons)
        return await self._sandbox.call(Call(kind, self._purpose, self._index, messages, finish_reasons, self._state))
