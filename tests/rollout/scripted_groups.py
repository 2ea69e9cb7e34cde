"""Groups of rollouts, from a prompt to samples, in which a function says what the policy says."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from titan_rl.chat.symbol_renderer import SymbolRenderer
from titan_rl.errors import RequestError
from titan_rl.rollout.config import EnvironmentConfig, RolloutConfig
from titan_rl.rollout.group_runner import GroupRunner
from titan_rl.types import (
    Completion,
    FinishReason,
    GroupRequest,
    Message,
    PolicyVersion,
    Purpose,
    SamplingParams,
)

HERE = Path(__file__).parent
UNRULY = str(HERE / "unruly_task.py")
EOS = 1


class ScriptedPolicy:
    """Answers every request by `answer(request)`; counts and keeps what it was asked."""

    def __init__(self, model_path, answer=lambda request: "1"):
        self._encode = SymbolRenderer(model_path).render
        self._answer = answer
        self.requests = []

    async def __call__(self, request):
        self.requests.append(request)
        await asyncio.sleep(0)
        answer = self._answer(request)
        if isinstance(answer, Exception):
            raise answer
        token_ids = self._encode([Message("assistant", answer)])
        stop = len(token_ids) < request.sampling.max_new_tokens
        token_ids = [*token_ids, EOS] if stop else token_ids[: request.sampling.max_new_tokens]
        return Completion(
            request_id=request.request_id,
            token_ids=np.array(token_ids, dtype=np.int32),
            logprobs=np.full(len(token_ids), -0.5, dtype=np.float32),
            versions=np.full(len(token_ids), request.min_version.encode(), dtype=np.int64),
            finish_reason=FinishReason.STOP if stop else FinishReason.LENGTH,
        )


@asynccontextmanager
async def runner(model_path, name="copy", *, kwargs=None, step_seconds=20.0, max_model_len=64, held_out=0, **rollout):
    group_runner = GroupRunner(
        EnvironmentConfig(name=name, kwargs=kwargs or {}, step_seconds=step_seconds),
        RolloutConfig(**rollout),
        model_path=str(model_path),
        run_seed=11,
        max_model_len=max_model_len,
        held_out=held_out,
        imports=(name.rpartition(":")[0],) if name.endswith(".py") else (),
    )
    try:
        await group_runner.start()
        yield group_runner
    finally:
        await group_runner.close()


def request(group_id=0, *, purpose=Purpose.TRAIN, samples=4, max_new_tokens=6, temperature=1.0) -> GroupRequest:
    return GroupRequest(
        group_id=group_id,
        purpose=purpose,
        samples=samples,
        sampling=SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature),
        min_version=PolicyVersion(0, 3),
    )


def sample_of(a_request) -> int:
    return int(a_request.request_id.split("-")[2])


def digits_but(failing):
    """Sample n says n digits, all but one, whose request is refused."""

    def answer(a_request):
        return RequestError("over-long") if sample_of(a_request) == failing else "1" * sample_of(a_request)

    return answer
