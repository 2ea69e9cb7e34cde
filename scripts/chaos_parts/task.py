"""What the chaos program trains: a tiny policy copies digits twice, and some prompts' code goes wrong in every way.

Prompts of even index are played by a program that talks HTTP to the gateway, those of odd index turn by turn. Which
prompts go wrong, and how, follows from their index alone, so a deterministic run repeats bit for bit with them.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import math
import os
import resource
import signal
import sys
import time
import zlib
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from titan_rl.config import CheckpointConfig, EvaluationConfig, LoggingConfig, LoopConfig, RunConfig
from titan_rl.config_registry import copy4
from titan_rl.environments.base import Endpoint, EnvironmentReply, Example, Rubric, Transcript
from titan_rl.environments.copy import Copy, positions_equal
from titan_rl.errors import TaskError
from titan_rl.metrics.rollout_record import RolloutRecord
from titan_rl.rollout.rollouter import Generate, OpenRollout, Rollouter
from titan_rl.rollout.trajectory import first_prompt
from titan_rl.types import GroupRequest

STALENESS = 2
GRADERS = (
    "raises",
    "takes too long",
    "crashes",
    "is killed",
    "prints a flood",
    "gives NaN",
    "gives infinity",
    "gives a huge number",
    "eats memory",
    "opens too many files",
)
"""What goes wrong in a reward function."""
PROGRAMS = ("program raises", "program hangs", "program exits", "client vanishes")
"""What goes wrong in a program."""
TROUBLES = (*GRADERS, *PROGRAMS)

FLOOD_BYTES = 4 << 20
HOARD_BYTES = 128 << 20
MOST_FILES = 256
TRIES = 4
"""A program asks so often before it gives up, as OpenAI's client does after a retryable error."""


def trouble_of(index: int, every: int) -> str:
    """What goes wrong with a training prompt; empty: nothing. `every` is odd, so that programs have their share."""
    if not every or index % every != every - 1:
        return ""
    kinds: Sequence[str] = GRADERS if index % 2 else TROUBLES[::-1]
    return kinds[index // every // 2 % len(kinds)]


def one_in_three(transcript: Transcript) -> bool:
    """Whether this rollout is the one that is late: if all of a group were, calls of others would be given up too."""
    return zlib.crc32(repr(transcript.messages).encode()) % 3 == 0


def graded(example: Example, transcript: Transcript) -> float:
    text, trouble = example.answer
    reward = positions_equal(dataclasses.replace(example, answer=text), transcript)
    match trouble:
        case "raises":
            raise ValueError("this grader always raises")
        case "takes too long" if one_in_three(transcript):
            time.sleep(3600)
        case "crashes":
            os._exit(7)
        case "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "prints a flood":
            os.write(1, b"0123456789abcdef" * (FLOOD_BYTES // 16))
        case "gives NaN":
            return math.nan
        case "gives infinity":
            return math.inf
        case "gives a huge number":
            return 10.0**300
        case "eats memory":
            hoard = [bytearray(HOARD_BYTES), bytearray(1 << 60)]  # the second raises MemoryError
            return float(len(hoard))
        case "opens too many files":
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_FILES, hard))
            try:
                return float(len([open(os.devnull) for _ in range(MOST_FILES)]))  # raises OSError
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return reward


class Chaos(Copy):
    """The task.

    Args:
        every: one prompt in so many goes wrong; odd, or 0: none.
    """

    def __init__(self, digits: int = 4, seed: int = 0, every: int = 0):
        super().__init__(digits, seed)
        self.every = every

    def example(self, index: int) -> Example:
        example = super().example(index)
        return dataclasses.replace(example, answer=(example.answer, trouble_of(index, self.every)))

    def held_out(self, count: int) -> list[Example]:
        return [dataclasses.replace(each, answer=(each.answer, "")) for each in super().held_out(count)]

    def rubric(self) -> Rubric:
        return Rubric(graded)

    def respond(self, example: Example, transcript: Transcript) -> EnvironmentReply:
        done = len(transcript.finish_reasons) == 2
        return EnvironmentReply(messages=() if done else example.prompt, done=done)

    def play(self, example: Example, endpoint: Endpoint) -> None:
        match example.answer[1]:
            case "program raises":
                raise ValueError("this program always raises")
            case "program hangs":
                time.sleep(3600)
            case "program exits":
                sys.exit(3)
            case "client vanishes":
                connection = http.client.HTTPConnection(urlsplit(endpoint.base_url).netloc)
                connection.putrequest("POST", "/v1/chat/completions")
                connection.putheader("Content-Length", "100000")
                connection.endheaders(b'{"messages": ')
                os._exit(0)
        question: dict[str, Any] = {"role": "user", "content": example.prompt[0].content}
        messages = [question, ask(endpoint, [question]), question]
        ask(endpoint, messages)


def ask(endpoint: Endpoint, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """One chat completion, asked for again after errors that may pass."""
    url = urlsplit(endpoint.base_url)
    body = json.dumps({"model": endpoint.model, "messages": messages})
    headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
    problem = ""
    for attempt in range(TRIES):
        time.sleep(0.5 * attempt)
        connection = http.client.HTTPConnection(url.netloc)
        try:
            connection.request("POST", f"{url.path}/chat/completions", body, headers)
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            problem = f"{type(error).__name__}: {error}"
            continue
        finally:
            connection.close()
        if response.status == 200:
            message: dict[str, Any] = json.loads(answer)["choices"][0]["message"]
            return {"role": "assistant", "content": message["content"] or ""}
        problem = f"{response.status} {answer.decode(errors='replace')}"
        if response.status < 500 and response.status not in (408, 409, 429):
            break
    raise TaskError(f"the policy did not answer: {problem}")


class TurnsOrProgram(Rollouter):
    """Plays prompts of odd index turn by turn, the others by their program."""

    async def roll_out(
        self, group: GroupRequest, sample: int, generate: Generate, rollout: OpenRollout
    ) -> RolloutRecord:
        if group.group_id % 2:
            rollout.played_by_program = False
            rollout.prompt = first_prompt(self.renderer, rollout.prompt.messages, rollout.tools)
        return await super().roll_out(group, sample, generate, rollout)


def recipe() -> RunConfig:
    """Two turns of copying digits, by programs and without, asynchronously: what scripts/chaos.py disturbs."""
    base = copy4()
    return dataclasses.replace(
        base,
        environment=dataclasses.replace(
            base.environment,
            name="task.py:Chaos",
            kwargs={"every": 197},
            **dict.fromkeys(("step_seconds", "grade_seconds", "program_seconds"), 8.0),
        ),
        rollout=dataclasses.replace(base.rollout, workers=2, max_turns=2, rollouter="task.py:TurnsOrProgram"),
        trainer=dataclasses.replace(base.trainer, optimizer=dataclasses.replace(base.trainer.optimizer, lr=1e-4)),
        router=dataclasses.replace(base.router, weight_sync="hot_swap"),
        weights=dataclasses.replace(base.weights, max_live=3),
        # it shall run to its last step, whatever there is to learn
        loop=LoopConfig(groups_per_step=32, max_staleness=STALENESS, untrainable_batches=10**6),
        evaluation=EvaluationConfig(every=0, prompts=16),
        checkpoint=CheckpointConfig(every=5, keep=3),
        logging=LoggingConfig(tensorboard=False, name="chaos"),
    )
