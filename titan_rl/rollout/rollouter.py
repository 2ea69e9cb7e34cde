"""How one rollout is played: render → generate → parse → the environment answers → … → score. Or by a program of the
environment, in a session at the gateway (`programs`), and then: score.

- Every turn's prompt is the exact tokens of all turns before it plus what the renderer adds. Where the chat format
  cannot add to them without changing what went before, the conversation is rendered anew, and what it no longer shares
  becomes a branch of its token graph; the report counts branches.
- A request's seed depends on the run's seed and the request's place in the run; its id is new for every attempt; the
  session id is the conversation's.
- User code that fails costs this rollout: it is returned with `error`, and its turns so far. A generator that fails
  is not the rollout's fault: that error is raised.

Subclass `Rollouter` and name the class in `rollout.rollouter` to play rollouts another way. An instance is shared by
all rollouts of a worker: what belongs to one rollout are local variables.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import uuid
from collections.abc import Awaitable, Callable

import numpy as np

from titan_rl.chat.renderer import Renderer
from titan_rl.errors import RequestError, TaskError
from titan_rl.rollout.result import Played, Rollout
from titan_rl.rollout.session import SessionRequest
from titan_rl.rollout.token_graph import TokenGraph
from titan_rl.rollout.world import World
from titan_rl.seeding import request_seed
from titan_rl.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    GroupRequest,
    Message,
    SamplingParams,
)

logger = logging.getLogger(__name__)

Generate = Callable[[GenerationRequest], Awaitable[Completion]]


class Rollouter:
    """Plays rollouts.

    Args:
        renderer: text to tokens and back.
        run_seed: the run's seed.
        max_turns: a conversation is cut after so many turns of the policy.
        max_sampled_tokens: of all turns together; 0: no bound.
        max_model_len: longest prompt + completion in tokens; 0: no bound known here.
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
        self._sampling: dict[tuple[SamplingParams, int], SamplingParams] = {}

    async def play(self, group: GroupRequest, sample: int, generate: Generate, world: World) -> Rollout:
        """Play sample number `sample` of a group to its end. What was played stays in `world.played` where this is
        cut off."""
        played = world.begin()
        try:
            if world.plays:
                await self._by_program(group, sample, world)
            else:
                await self._by_turns(group, sample, generate, world, played)
            score = await world.score(played.messages, played.finish_reasons)
        except (TaskError, RequestError) as error:
            return played.failed(sample, str(error))
        return played.scored(sample, score)

    async def _by_program(self, group: GroupRequest, sample: int, world: World) -> None:
        await world.play(
            SessionRequest(
                session_id=self._session_id(group, sample),
                group=group,
                sample=sample,
                max_turns=self.max_turns,
                max_sampled_tokens=self.max_sampled_tokens,
            )
        )

    async def _by_turns(
        self, group: GroupRequest, sample: int, generate: Generate, world: World, played: Played
    ) -> None:
        messages, finish_reasons = played.messages, played.finish_reasons
        session_id = self._session_id(group, sample)
        prompt = world.prompt_token_ids
        while True:
            group = self._within_budget(group, played.graph)
            completion = await self.complete(group, sample, len(finish_reasons), prompt, session_id, generate)
            played.add(prompt, completion, completion.finish_reason)
            sampled = completion.token_ids.tolist()
            messages.append(self.renderer.parse(sampled, completion.finish_reason, prompt, world.tools))
            added = await self._reply(messages, finish_reasons, world)
            if not added:
                return
            messages.extend(added)
            prompt = self._next_prompt(prompt, sampled, added, world)
            if not self._room(prompt) or self._budget(played.graph) < 1:
                return

    def _next_prompt(
        self, prompt: np.ndarray, sampled: list[int], added: tuple[Message, ...], world: World
    ) -> np.ndarray:
        try:
            extension = self.renderer.extend(prompt.tolist(), sampled, added, world.tools)
        except TaskError as error:
            logger.debug("rendered anew: %s", error)
            world.played.rendered_anew += 1
            return np.asarray(self.renderer.render(world.played.messages, world.tools), dtype=np.int32)
        return np.concatenate((prompt, np.asarray([*sampled, *extension], dtype=np.int32)))

    async def _reply(
        self, messages: list[Message], finish_reasons: list[FinishReason], world: World
    ) -> tuple[Message, ...]:
        """What the policy is to answer next; nothing where the conversation is over. Last words go to `messages`."""
        last = len(finish_reasons) >= self.max_turns
        if messages[-1].tool_calls:
            return () if last else await world.call_tools(messages, finish_reasons)
        if not world.multi_turn:
            return ()
        reply = await world.respond(messages, finish_reasons)
        if reply.done or last:
            messages.extend(reply.messages)
            return ()
        return reply.messages

    async def complete(
        self,
        group: GroupRequest,
        sample: int,
        turn: int,
        prompt: np.ndarray,
        session_id: str,
        generate: Generate,
    ) -> Completion:
        """One turn of the policy: the completion of `prompt` ([T] int32) under the group's sampling.

        Raises:
            RequestError: the prompt leaves no room, or the generator refuses it, or the completion was aborted.
        """
        room = self._room(prompt)
        if not room:
            raise RequestError(f"the prompt of {len(prompt)} tokens leaves no room in {self.max_model_len}")
        request = GenerationRequest(
            request_id=f"{group.purpose}-{group.group_id}-{sample}-{turn}-{self._attempt()}",
            prompt_token_ids=prompt,
            sampling=self._sampling_within(group.sampling, room),
            seed=request_seed(self.run_seed, group.purpose, group.group_id, sample, turn),
            min_version=group.min_version,
            session_id=session_id,
            pinned_to=group.pinned_to,
        )
        completion = await generate(request)
        if completion.finish_reason is FinishReason.ABORT:
            raise RequestError(f"request {request.request_id} was aborted after {len(completion.token_ids)} tokens")
        return completion

    def _budget(self, graph: TokenGraph) -> int:
        """Tokens that may still be sampled."""
        sampled = sum(len(completion.token_ids) for completion in graph.completions)
        return self.max_sampled_tokens - sampled if self.max_sampled_tokens else 1 << 30

    def _within_budget(self, group: GroupRequest, graph: TokenGraph) -> GroupRequest:
        if (budget := self._budget(graph)) >= group.sampling.max_new_tokens:
            return group
        return dataclasses.replace(group, sampling=dataclasses.replace(group.sampling, max_new_tokens=budget))

    def _session_id(self, group: GroupRequest, sample: int) -> str:
        return f"{group.purpose}-{group.group_id}-{sample}-{self._attempt()}"

    def _attempt(self) -> str:
        return f"{self._attempt_prefix}{next(self._attempts):x}"

    def _room(self, prompt: np.ndarray) -> int:
        """Tokens that may follow the prompt."""
        return max(0, self.max_model_len - len(prompt)) if self.max_model_len else 1 << 30

    def _sampling_within(self, sampling: SamplingParams, room: int) -> SamplingParams:
        """The group's sampling with the renderer's stop tokens, and no more new tokens than there is room for."""
        budget = min(sampling.max_new_tokens, room)
        found = self._sampling.get((sampling, budget))
        if found is None:
            stop_token_ids = tuple(dict.fromkeys((*sampling.stop_token_ids, *self.renderer.stop_token_ids)))
            found = dataclasses.replace(sampling, max_new_tokens=budget, stop_token_ids=stop_token_ids)
            self._sampling[(sampling, budget)] = found
        return found
