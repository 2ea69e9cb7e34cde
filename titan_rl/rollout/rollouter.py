"""Plays one rollout: render → generate → parse → the environment answers → … → score. Or a program of the environment
plays it through the gateway (`programs`), and then it is scored.

If user code fails, only this rollout fails: it is returned with `error` and its turns so far. If a generator fails, its
error is raised, because it is not the rollout's fault.

To play rollouts another way, subclass `Rollouter` and name the class in `rollout.rollouter`. All rollouts of a worker
share one instance, so keep the state of a rollout in local variables.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Awaitable, Callable

from titan_rl.chat.renderer import Renderer
from titan_rl.errors import RequestError, RequestTooLong, TaskError, TitanError
from titan_rl.rollout.open_rollout import OpenRollout
from titan_rl.rollout.result import Rollout
from titan_rl.rollout.turns import Prompt, RolloutRequest, Turn, Turns
from titan_rl.types import Completion, FinishReason, GenerationRequest, GroupRequest, SamplingParams, StopReason

Generate = Callable[[GenerationRequest], Awaitable[Completion]]


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

    async def play(self, group: GroupRequest, sample: int, generate: Generate, rollout: OpenRollout) -> Rollout:
        """Play sample number `sample` of a group to its end. If this is cancelled, `rollout` keeps the turns so far."""
        rollout.begin()
        request = self.request(group, sample)
        try:
            if rollout.plays:
                reason = await rollout.play(request)
            else:
                reason = await self._converse(self.turns(request), generate, rollout)
            score = await rollout.score()
        except (TaskError, RequestError) as error:
            return rollout.ended(sample, _reason_of(error), error=str(error))
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
        wanted = SamplingParams(
            max_new_tokens=group.sampling.max_new_tokens, stop_token_ids=tuple(self.renderer.stop_token_ids)
        )
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


class _Aborted(RequestError):
    """A completion was aborted."""


def _reason_of(error: TitanError) -> StopReason:
    match error:
        case _Aborted():
            return StopReason.ABORT
        case RequestTooLong():
            return StopReason.CONTEXT_FULL
    return StopReason.ERROR
