"""Runs groups: one prompt, several rollouts, their advantages and training samples.

- Every requested sample becomes a rollout, with a reward or with an error.
- Advantages are computed over the graded rollouts. Only graded rollouts of training groups become training samples. If
  one rollout failed and `rollout.on_error` is "fail_group", the group has no training samples.
- Groups and rollouts run concurrently; their calls to user code are answered in lists (`UserCodePool`).
- If a generator fails, the whole group fails and its other rollouts are cancelled.
- However a rollout ended, it is cleaned up once, after the group is graded.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import fields
from typing import Any

import numpy as np
from msgspec.structs import replace

from titan_rl.chat import make_renderer
from titan_rl.chat.renderer import Renderer
from titan_rl.config import RunConfig
from titan_rl.environments.rubric import LARGEST_REWARD
from titan_rl.errors import ConfigError, GeneratorFailed, RequestError, TaskError, TaskTimeout, TitanError
from titan_rl.importing import describe, import_name, user_code
from titan_rl.isolation.pool import UserCodePool
from titan_rl.isolation.wire import CallKind, EnvironmentSetup, ExamplePrompt, TaskInfo, UserCall
from titan_rl.metrics.rollout_record import RolloutRecord
from titan_rl.policy.algorithms import short_names
from titan_rl.policy.algorithms.base import GradedRollout, GradedTurn, credit_by_role
from titan_rl.rollout.report import GroupResult, failure_of, unplayed_rollouts, with_numbers
from titan_rl.rollout.rollouter import Generate, OpenRollout, Programs, Rollouter, RolloutGateway
from titan_rl.rollout.samples import demonstration_sample, training_samples
from titan_rl.rollout.trajectory import Prompt, Trajectory, first_prompt
from titan_rl.types import GroupRequest, Purpose, TrainingSample

CLEAN_UP_SECONDS = 3.0
"""How long the end of a worker waits for rollouts that are cleaned up. A mesh has five to close."""

logger = logging.getLogger(__name__)


class GroupRunner:
    """A rollout worker without its actor.

    Args:
        model_path: Hugging Face directory with the tokenizer; empty: `start` is given a renderer.
    """

    def __init__(self, config: RunConfig, *, model_path: str):
        self._rollout = config.rollout
        self._model_path = model_path
        self._pairs = config.trainer.warmup.dpo_beta > 0
        self._max_model_len = config.generator.max_model_len if model_path else 0  # else nobody has to keep it
        self.setup = EnvironmentSetup(
            **{each.name: getattr(config.environment, each.name) for each in fields(config.environment)},
            run_seed=config.seed,
            imports=config.user_modules,
            held_out=config.evaluation.prompts,
            prompts=config.loop.prompts,
        )
        self.pool = UserCodePool(self.setup)
        self.programs: Programs | None = None
        self._free: AbstractAsyncContextManager[None] = nullcontext()  # limits how many programs run at once
        self.renderer: Renderer
        """There after `start`, as the rollouter is."""
        self._rollouter: Rollouter
        self._cleaning: set[asyncio.Future[list[Any]]] = set()
        self._advantages = import_name(config.rollout.advantage.name, short_names("advantages"))

    async def start(
        self, sessions: RolloutGateway | None = None, *, programs: bool = True, renderer: Renderer | None = None
    ) -> TaskInfo:
        """Load the tokenizer, make the environment and the rollouter. Raises ConfigError or TaskError where one cannot
        be made.

        Args:
            sessions: the gateway that programs talk to; None: there is none.
            programs: whether rollouts that programs play must be possible; then such an environment needs a gateway.
            renderer: None: as `rollout.renderer` says.
        """
        rollouter = import_name(self._rollout.rollouter, base=Rollouter)
        if renderer is None:
            renderer = await asyncio.to_thread(
                make_renderer, self._rollout.renderer, self._model_path, self._rollout.renderer_kwargs
            )
        self.renderer = renderer
        self._rollouter = rollouter(
            renderer=self.renderer,
            run_seed=self.setup.run_seed,
            max_turns=self._rollout.max_turns,
            max_sampled_tokens=self._rollout.max_sampled_tokens,
            max_model_len=self._max_model_len,
        )
        info = await self.pool.start()
        if info.plays and programs:
            if sessions is None:
                raise ConfigError(f"environment {self.setup.name} plays its rollouts by programs, which need a gateway")
            self.programs = Programs(sessions, self.setup.program_seconds)
            self._free = asyncio.Semaphore(self._rollout.agents.at_once)
        return info

    async def close(self) -> None:
        """End all user code; groups still running fail, and rollouts that were given up are cleaned up before."""
        if self._cleaning:
            await asyncio.wait(self._cleaning, timeout=CLEAN_UP_SECONDS)
        await self.pool.close()
        if self.programs is not None and self.programs.sessions:  # their programs have ended
            await asyncio.wait(self.programs.sessions)

    async def run_group(self, request: GroupRequest, generate: Generate) -> GroupResult:
        """Play all rollouts of a group. If the group's purpose is to demonstrate, make its demonstrations instead.

        Raises:
            TitanError: `generate` raised it. A `RequestError` is not raised: it fails only its own rollout.
            TaskError: a demonstration cannot be made.
        """
        if request.purpose is Purpose.DEMONSTRATE:
            return await self._demonstrate(request)
        return await self.play(request, generate)

    async def play(self, request: GroupRequest, generate: Generate) -> GroupResult:
        """Play all rollouts of a group, of a demonstration's prompt too; raises as `run_group`."""
        info = self.pool.info
        try:
            example: ExamplePrompt = await self.pool.call(UserCall(CallKind.EXAMPLE, request.purpose, request.group_id))
            if info.plays:
                prompt = Prompt(token_ids=np.zeros(0, np.int32), messages=example.prompt)
            else:
                prompt = first_prompt(self.renderer, example.prompt, info.tools)
        except TaskError as error:
            return await self._result(request, unplayed_rollouts(request, error))

        opened = [
            OpenRollout(self.pool, self._rollouter.begin(request, sample), prompt=prompt, programs=self.programs)
            for sample in range(request.samples)
        ]
        try:
            rollouts = await self._play_all(request, generate, opened)
        finally:  # a group that is given up does not wait
            cleaning = asyncio.gather(*(each.clean_up() for each in opened if info.cleans_up), return_exceptions=True)
            self._cleaning.add(cleaning)
            cleaning.add_done_callback(self._cleaning.discard)
        for number, failure in enumerate(await asyncio.shield(cleaning)):
            if isinstance(failure, TaskError) and not rollouts[number].error:
                rollouts[number] = opened[number].failed(failure)
            elif failure is not None and not isinstance(failure, TaskError):
                raise failure
        return await self._result(request, tuple(rollouts), opened, example)

    async def _play_all(
        self, request: GroupRequest, generate: Generate, opened: Sequence[OpenRollout]
    ) -> list[RolloutRecord]:
        """The graded rollouts of a group."""
        try:
            async with asyncio.TaskGroup() as tasks:
                playing = [
                    tasks.create_task(self._roll_out(request, sample, generate, rollout))
                    for sample, rollout in enumerate(opened)
                ]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        if any(task.cancelled() for task in playing):  # raised inside `generate`; not to be taken for our own
            raise GeneratorFailed(f"generation for {request.purpose} group {request.group_id} was cancelled")
        rollouts = [task.result() for task in playing]
        return await self._compare(request, rollouts, opened) if self.pool.info.scores_groups else rollouts

    async def _compare(
        self, request: GroupRequest, rollouts: list[RolloutRecord], opened: Sequence[OpenRollout]
    ) -> list[RolloutRecord]:
        """Add the group rewards to the graded rollouts."""
        graded = [
            (rollout, each.scored)
            for rollout, each in zip(rollouts, opened, strict=True)
            if each.scored is not None and not rollout.error
        ]
        if not graded:
            return rollouts
        group = tuple(scored for _, scored in graded)
        try:
            scores = await self.pool.call(
                UserCall(CallKind.SCORE_GROUP, request.purpose, request.group_id, group=group)
            )
        except TaskError as error:
            compared = [replace(rollout, reward=0.0, reward_parts={}, **failure_of(error)) for rollout, _ in graded]
        else:
            compared = [
                replace(rollout, reward=rollout.reward + reward, reward_parts=rollout.reward_parts | parts)
                for (rollout, _), (reward, parts) in zip(graded, scores, strict=True)
            ]
        by_sample = {rollout.sample: rollout for rollout in compared}
        return [by_sample.get(rollout.sample, rollout) for rollout in rollouts]

    async def _demonstrate(self, request: GroupRequest) -> GroupResult:
        first = request.group_id * request.samples
        calls = (
            self.pool.call(UserCall(CallKind.DEMONSTRATE, request.purpose, number))
            for number in range(first, first + request.samples)
        )
        samples: list[TrainingSample] = []
        for number, shown in enumerate(await asyncio.gather(*calls), start=first):
            if self._pairs and not shown.rejected:
                raise TaskError(f"demonstration {number} has nothing rejected, and trainer.warmup.dpo_beta is above 0")
            turns = [(shown.messages, 1.0), (shown.rejected, -1.0)] if self._pairs else [(shown.messages, 0.0)]
            for messages, sign in turns:
                sample = demonstration_sample(
                    request.group_id, len(samples), self.renderer, shown.prompt, messages, self.pool.info.tools, sign
                )
                if self._max_model_len and len(sample.token_ids) > self._max_model_len:
                    raise TaskError(
                        f"demonstration {number} has {len(sample.token_ids)} tokens, "
                        f"generator.max_model_len is {self._max_model_len}"
                    )
                samples.append(sample)
        return GroupResult(samples=tuple(samples))

    async def _roll_out(
        self, request: GroupRequest, sample: int, generate: Generate, opened: OpenRollout
    ) -> RolloutRecord:
        async with self._free:
            limit = asyncio.timeout(self._rollout.seconds or None)
            try:
                async with limit:
                    rollout = await self._rollouter.roll_out(request, sample, generate, opened)
                if not isinstance(rollout, RolloutRecord):
                    raise TaskError(f"the rollouter returned {type(rollout).__name__}, expected RolloutRecord")
                if not rollout.error and not abs(rollout.reward) <= LARGEST_REWARD:
                    raise TaskError(f"the rollouter gave the reward {rollout.reward:g}")
                return rollout
            except (TaskError, RequestError) as error:
                return opened.failed(error)
            except TitanError:
                raise
            except Exception as error:  # a user's own rollouter is user code
                if limit.expired():
                    late = f"was not over within rollout.seconds ({self._rollout.seconds:g} s)"
                    return opened.failed(TaskTimeout(late))
                logger.exception("%s group %d sample %d failed", request.purpose, request.group_id, sample)
                return opened.failed(TaskError(f"the rollouter raised {describe(error)}"))

    async def _give_credit(self, graded: Sequence[tuple[RolloutRecord, Trajectory]]) -> None:
        """Give each turn its advantage. Raises ConfigError where the function of `rollout.advantage` cannot say it."""
        group = [
            GradedRollout(
                reward=rollout.reward,
                parts=rollout.reward_parts,
                turns=tuple(
                    GradedTurn(
                        tokens=len(turn.completion.token_ids),
                        prompt=turn.prompt_token_ids,
                        reward=turn.reward or 0.0,
                        role=turn.role,
                    )
                    for turn in trajectory.turns
                ),
            )
            for rollout, trajectory in graded
        ]
        setting, seconds = f"rollout.advantage.name {self._rollout.advantage.name}", self.setup.grade_seconds
        giving = asyncio.to_thread(credit_by_role, group, self._advantages, **self._rollout.advantage.kwargs)
        done, _ = await asyncio.wait([credit := asyncio.ensure_future(giving)], timeout=seconds)
        if not done:
            raise ConfigError(f"{setting} did not return within {seconds:g} s (environment.grade_seconds)")
        with user_code(setting):
            per_turn = credit.result()
        for (_, trajectory), advantages in zip(graded, per_turn, strict=True):
            for turn, advantage in zip(trajectory.turns, advantages, strict=True):
                turn.advantage = advantage

    async def _result(
        self,
        request: GroupRequest,
        rollouts: tuple[RolloutRecord, ...],
        opened: Sequence[OpenRollout] = (),
        example: ExamplePrompt | None = None,
    ) -> GroupResult:
        trajectories = tuple(each.trajectory for each in opened)
        samples: tuple[TrainingSample, ...] = ()
        failed = any(rollout.error for rollout in rollouts)
        if request.purpose is Purpose.TRAIN and not (failed and self._rollout.on_error == "fail_group"):
            graded = [pair for pair in zip(rollouts, trajectories, strict=False) if not pair[0].error]
            if graded and request.samples > 1:  # else nobody trains it
                await self._give_credit(graded)
            trained = [(rollout.sample, rollout.reward, trajectory.tree) for rollout, trajectory in graded]
            samples = training_samples(request.group_id, trained, rollouts=request.samples)
        restarts, self.pool.restarts = self.pool.restarts, 0
        return GroupResult(
            rollouts=tuple(map(with_numbers, rollouts, trajectories)) if opened else rollouts,
            trajectories=trajectories,
            samples=samples,
            example=example,
            restarts=restarts,
        )
