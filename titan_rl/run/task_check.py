"""Tries the task of a run before anything starts: plays one prompt as the run will, with a fixed answer as the policy.

- User code runs as it does in the run: in child processes under the time limits of `environment`. torch is not
  imported.
- An error here would occur in every rollout, evaluation or warm-up step. The first one is reported in one sentence,
  with file and line if they are known.
- Held-out prompts must be the same at every call.
- If programs play the task, its rollouts are not tried, because that needs a gateway.
"""

import asyncio
import logging
import os
import re
import time
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path

from titan_rl.chat.renderer import Renderer
from titan_rl.config import RunConfig
from titan_rl.environments.rubric import EXACT_MATCH
from titan_rl.errors import AbsentError, ActorGone, ConfigError, ConfigWarning, TaskError
from titan_rl.isolation.process_io import passed_on
from titan_rl.isolation.wire import LONGEST_SHOWN, CallKind, TaskCheck, TaskInfo, UserCall
from titan_rl.loop.system import group_request
from titan_rl.one_line import one_line
from titan_rl.policy.models.tiny import model_directory
from titan_rl.rollout.group_runner import GroupRunner
from titan_rl.rollout.rollouter import Generate
from titan_rl.rollout.samples import not_sampled
from titan_rl.types import Completion, FinishReason, GenerationRequest, Message, Purpose

TRIED_PROMPTS = 256
"""Training prompts that are tried with the tokenizer."""
RENDER_SECONDS = 1.0
"""Time limit for trying prompts with the tokenizer."""


def check_task(config: RunConfig) -> list[ConfigError]:
    """The problem that keeps the task of `config` from being played, or its `warning`. Call it if `check_run` found
    nothing."""
    # hide the output of user code and the ends of its processes: the problem says what matters of them
    logging.getLogger("titan_rl.isolation").addHandler(logging.NullHandler())
    name = config.environment.name
    try:
        warning = asyncio.run(_try(config))
        return [ConfigWarning(warning)] if warning else []
    except (ConfigError, TaskError, ActorGone) as raised:
        error = raised
    sentence = str(error) if isinstance(error, ConfigError) or name in str(error) else f"environment {name}: {error}"
    for withheld in os.environ.keys() - passed_on(os.environ, config.environment.variables).keys():
        if len(withheld) > 2 and re.search(rf"\b{re.escape(withheld)}\b", sentence):
            sentence += f"; user code sees the variable {withheld} only if environment.variables names it"
    return [AbsentError(sentence) if isinstance(error, AbsentError) else ConfigError(sentence)]


async def _try(config: RunConfig) -> str:
    """Returns the environment's warning."""
    files = (Path(config.policy.path) / name for name in ("config.json", "tokenizer.json"))
    tokenizer = config.policy.tiny is not None or all(file.is_file() for file in files)
    runner = GroupRunner(config, model_path=str(model_directory(config)) if tokenizer else "")
    try:
        info = await (runner.start(programs=False) if tokenizer else runner.pool.start())
        count = min(max(1, config.loop.steps) * config.loop.groups_per_step, TRIED_PROMPTS)
        check: TaskCheck = await runner.pool.call(UserCall(CallKind.CHECK, Purpose.TRAIN, count))
        _check_held_out(config, check)
        unpaid = await _try_rollouts(config, runner, info, check) if tokenizer else ""
        return "; ".join(filter(None, (check.warning, unpaid)))
    finally:
        await runner.close()


def _check_held_out(config: RunConfig, check: TaskCheck) -> None:
    asked = f"environment {config.environment.name}: held_out({config.evaluation.prompts})"
    if not check.held_out:
        raise ConfigError(f"{asked} gave no prompts, and an evaluation needs some")
    for place, (prompt, other) in enumerate(zip_longest(check.held_out, check.held_out_again)):
        if prompt != other:
            raise ConfigError(
                f"{asked} gives other prompts when it is called again, the first at {place}: {_shown(prompt)}, then "
                f"{_shown(other)}; it must not depend on chance, or no two scores could be compared"
            )


def _shown(prompt: tuple[Message, ...] | None) -> str:
    if prompt is None:
        return "nothing"
    return f"'{one_line(' '.join(message.content for message in prompt), LONGEST_SHOWN)}'"


async def _try_rollouts(config: RunConfig, runner: GroupRunner, info: TaskInfo, check: TaskCheck) -> str:
    """Returns a warning where the examples' answers get no reward."""
    tiny = config.policy.tiny
    silent, _ = _says(runner.renderer, "")
    remedy = (
        "policy.tiny.symbols and policy.tiny.special_tokens have to hold every symbol of the task "
        '(policy.tiny.tokenizer = "chat" writes any text)'
        if tiny is not None and tiny.tokenizer == "symbols"
        else "policy.path and rollout.renderer decide what can be written"
    )
    if not info.plays:
        _render(runner.renderer, info, check, remedy)
    if config.trainer.warmup.steps:
        try:
            await runner.run_group(group_request(config, Purpose.DEMONSTRATE, 0), silent)
        except TaskError as error:
            where = "" if str(error).startswith("demonstration") else "demonstration 0: "
            raise ConfigError(f"{where}{error}" + (f"; {remedy}" if "symbol" in str(error) else "")) from error
    if info.plays:
        return ""
    said_right: list[tuple[int, float]] = []  # tokens and reward of right answers that can be said
    plays = ((Purpose.TRAIN, 2 if info.scores_groups else 1), (Purpose.EVALUATE, 1))
    for (purpose, samples), answer in zip(plays, (check.answers[0], check.answers[-1]), strict=True):
        policy, tokens = _says(runner.renderer, answer)
        result = await runner.run_group(group_request(config, purpose, 0, samples=samples), policy)
        said_right += [(tokens, rollout.reward) for rollout in result.rollouts if tokens]
        for rollout, trajectory in zip_longest(result.rollouts, result.trajectories):
            if rollout.error:
                messages = trajectory.messages if trajectory is not None else ()
                answers = [message.content for message in messages if message.role == "assistant"]
                said = f" in which the policy says '{one_line(answers[-1], LONGEST_SHOWN)}'" if answers else ""
                raise TaskError(
                    f"a rollout of {purpose} prompt 0{said} fails: {rollout.error}; correct the code there: "
                    "a run would lose every rollout that fails so"
                )
            if info.scores_groups and config.evaluation.target_exact_match and EXACT_MATCH not in rollout.reward_parts:
                raise ConfigError(
                    "evaluation.target_exact_match is set, and group rewards alone do not say what an exact match is: "
                    "add a reward function that returns the score `exact_match`, as Reward(function, weight=0)"
                )
    if info.multi_turn or info.tools or info.scores_groups or len(said_right) < len(plays):
        return ""
    longest, reward = map(max, zip(*said_right, strict=True))
    if longest >= (room := config.rollout.sampling.max_new_tokens):
        return f"a right answer has {longest} tokens and its end, rollout.sampling.max_new_tokens is {room}: it is cut"
    wrong = await runner.run_group(group_request(config, Purpose.TRAIN, 0), silent)
    if reward > 0 or any(reward > rollout.reward for rollout in wrong.rollouts):
        return ""
    return (
        f"the answers of the task's own examples, {one_line(check.answers[0], LONGEST_SHOWN)!r} for training prompt 0, "
        f"get a reward of {reward:g}, as wrong ones do: is their column the right one, and does the reward compare "
        "with it?"
    )


def _render(renderer: Renderer, info: TaskInfo, check: TaskCheck, remedy: str) -> None:
    until = time.monotonic() + RENDER_SECONDS
    for which, prompts in (("training", check.training), ("held-out", check.held_out)):
        for place, prompt in enumerate(prompts):
            try:
                renderer.render(prompt, info.tools)
            except TaskError as error:
                raise TaskError(f"{which} prompt {place} cannot be given to the policy: {error}; {remedy}") from error
            if time.monotonic() > until:
                return


def _says(renderer: Renderer, text: str) -> tuple[Generate, int]:
    """A policy that always says one text, or repeats its prompt if the tokenizer cannot write that text; and the tokens
    of the text."""
    said: list[int] = []
    with suppress(TaskError):
        said = renderer.encode(text)

    async def generate(request: GenerationRequest) -> Completion:
        token_ids = [*(said or request.prompt_token_ids.tolist()), renderer.stop_token_ids[0]]
        room = request.sampling.max_new_tokens
        reason = FinishReason.STOP if len(token_ids) <= room else FinishReason.LENGTH
        return not_sampled(request.request_id, token_ids[:room], reason)

    return generate, len(said)
