"""Rollouts with tools, from prompt to sample, in which the policy says what a test wrote down."""

from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from titan_rl.chat.symbol_renderer import SymbolRenderer
from titan_rl.policy.config import TinyPolicyConfig
from titan_rl.policy.models.tiny import make_tiny_policy
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

CALLING = str(Path(__file__).parent / "calling_task.py")


def calling_policy(directory) -> Path:
    """A tiny policy whose tokenizer has the markers of tools."""
    markers = ("<tool>", "</tool>", "<result>", "</result>")
    return make_tiny_policy(TinyPolicyConfig(symbols="0123456789+=", special_tokens=markers), directory)


class Scripted:
    """Says one text after the other; "$" is the end of a turn, and `</tool>` one too."""

    def __init__(self, model_path, *texts):
        self.encode = SymbolRenderer(model_path).render
        self.texts = texts
        self.requests = []

    async def __call__(self, request):
        text = self.texts[len(self.requests)]
        self.requests.append(request)
        token_ids = self.encode([Message("user", text.replace("$", "<eos>"))])[: request.sampling.max_new_tokens]
        return Completion(
            request_id=request.request_id,
            token_ids=np.array(token_ids, dtype=np.int32),
            logprobs=np.full(len(token_ids), -0.5, dtype=np.float32),
            versions=np.zeros(len(token_ids), dtype=np.int64),
            finish_reason=FinishReason.STOP
            if {*token_ids[-1:]} & {*request.sampling.stop_token_ids}
            else FinishReason.LENGTH,
        )


@asynccontextmanager
async def runner(model_path, cls="Calling", *, name="", step_seconds=20.0, **rollout):
    group_runner = GroupRunner(
        EnvironmentConfig(name=name or f"{CALLING}:{cls}", step_seconds=step_seconds),
        RolloutConfig(**rollout),
        model_path=str(model_path),
        run_seed=11,
        max_model_len=64,
        imports=() if name else (CALLING,),
    )
    try:
        await group_runner.start()
        yield group_runner
    finally:
        await group_runner.close()


async def play(model_path, *texts, max_new_tokens=20, **kwargs):
    """One rollout of these turns, its sample if any, and what was asked of the policy."""
    request = GroupRequest(
        group_id=5,
        purpose=Purpose.TRAIN,
        samples=1,
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
        min_version=PolicyVersion(0, 0),
    )
    policy = Scripted(model_path, *texts)
    async with runner(model_path, **kwargs) as group_runner:
        result = await group_runner.run_group(request, policy)
    return result.rollouts[0], result.samples, policy.requests


def text_of(model_path, token_ids) -> str:
    return SymbolRenderer(model_path).parse(token_ids.tolist(), FinishReason.LENGTH).content.replace("<eos>", "$")
