"""Plays a task without a run: by weights, or whoever answers in messages.

    task ─┬ weights ─▶ router, generators (`run.start.bring_up`) ──────┬▶ generate ─▶ GroupRunner ─▶ rewards
          └ a person, a demonstration ─────────▶ `MessagePolicy` ────┘

Rollouts are played by the `GroupRunner` of a run's workers, with the run's rollouter, processes and gateway. Only what
answers a request differs.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from titan_rl.chat.renderer import MessageRenderer
from titan_rl.config import RunConfig
from titan_rl.errors import ActorGone
from titan_rl.isolation.wire import TaskInfo
from titan_rl.loop.system import group_request
from titan_rl.metrics.rollout_record import RolloutRecord
from titan_rl.rollout.group_runner import GroupRunner
from titan_rl.rollout.report import report_of
from titan_rl.rollout.rollouter import Generate
from titan_rl.rollout.samples import not_sampled
from titan_rl.scheduling.group import MAX_ATTEMPTS
from titan_rl.supervision.placement import plays
from titan_rl.types import Completion, FinishReason, GenerationRequest, Message, Piece, Purpose, ToolSpec

PolicyTurn = tuple[Message, FinishReason]
"""What a policy says next, and why that ended."""
NextMessage = Callable[[Sequence[Message], Sequence[ToolSpec], GenerationRequest], Awaitable[PolicyTurn]]
"""Called with a conversation, the tools and the request."""


class MessagePolicy:
    """A policy that answers in messages, as the `Fleet` of a gateway and the `generate` of a rollouter."""

    def __init__(self, next_message: NextMessage) -> None:
        self.renderer = MessageRenderer()
        self._next_message = next_message

    async def generate(self, request: GenerationRequest) -> Completion:
        prompt: list[int] = request.prompt_token_ids.tolist()
        messages, tools = self.renderer.messages(prompt), self.renderer.tools(prompt)
        message, reason = await self._next_message(messages, tools, request)
        said = self.renderer.say(message)[: None if reason is FinishReason.STOP else -1]
        return not_sampled(request.request_id, said, reason)

    async def stream(self, request: GenerationRequest, on_piece: Callable[[Piece], object]) -> Completion:
        return await self.generate(request)

    async def fleet_status(self) -> list[Any]:
        return []


@dataclass(frozen=True, slots=True)
class Player:
    """A task and a policy that are ready to play."""

    config: RunConfig
    runner: GroupRunner
    info: TaskInfo
    generate: Generate

    async def play(
        self, index: int, purpose: Purpose, *, samples: int = 1, temperature: float | None = None
    ) -> list[RolloutRecord]:
        """The rollouts of a group. One whose engines died under it is played again, as in a run."""
        request = group_request(self.config, purpose, index, samples=samples, temperature=temperature)
        while True:
            try:
                result = await self.runner.play(request, self.generate)
                decode, rollouts = self.runner.renderer.decode, report_of(request, result, ()).rollouts
                records = (result.describe(rollout, decode, count=request.samples) for rollout in rollouts)
                return await asyncio.to_thread(list, records)
            except ActorGone:
                if request.attempt + 1 >= MAX_ATTEMPTS:
                    raise
                request = replace(request, attempt=request.attempt + 1)


@asynccontextmanager
async def message_player(config: RunConfig, next_message: NextMessage) -> AsyncIterator[Player]:
    """The task, played by a policy that answers in messages. Loads neither torch nor Monarch. Raises ConfigError,
    TaskError: the environment cannot be made."""
    policy, sessions = MessagePolicy(next_message), None
    async with AsyncExitStack() as closing:
        if plays(config):
            from titan_rl.gateway.app import GatewayServer
            from titan_rl.gateway.calls import ServedPolicy

            served_policy = ServedPolicy(name="policy", renderer=policy.renderer, max_model_len=1 << 30)
            server = GatewayServer(config.gateway_settings(), policy, served_policy, run_seed=config.seed)
            closing.push_async_callback(server.close)
            sessions = server.rollout_keys
        runner = GroupRunner(config, model_path="")
        closing.push_async_callback(runner.close)
        info = await runner.start(sessions, renderer=policy.renderer)
        yield Player(config, runner, info, policy.generate)
