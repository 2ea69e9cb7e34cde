"""Groups of rollouts, from a prompt to samples, by a policy that says what a test wants."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from msgspec import structs

from titan_rl.chat.renderer import SymbolRenderer
from titan_rl.config import RunConfig
from titan_rl.errors import RequestError
from titan_rl.policy.config import TinyPolicyConfig
from titan_rl.policy.models.tiny import make_tiny_policy
from titan_rl.rollout.config import EnvironmentConfig, RolloutConfig
from titan_rl.rollout.group_runner import GroupRunner
from titan_rl.types import Completion, FinishReason, GroupRequest, Message, PolicyVersion, Purpose, SamplingParams

TASKS = Path(__file__).parent / "tasks"
UNRULY = str(TASKS / "unruly.py")
EOS = 1


def completion(request_id, token_ids, finish_reason=FinishReason.STOP, version=0) -> Completion:
    """What an engine might have sampled."""
    return Completion(
        request_id=request_id,
        token_ids=np.array(token_ids, dtype=np.int32),
        logprobs=np.full(len(token_ids), -0.5, dtype=np.float32),
        versions=np.full(len(token_ids), version, dtype=np.int64),
        finish_reason=finish_reason,
    )


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
        token_ids = self._encode([Message("user", answer)])
        stop = len(token_ids) < request.sampling.max_new_tokens
        token_ids = [*token_ids, EOS] if stop else token_ids[: request.sampling.max_new_tokens]
        reason = FinishReason.STOP if stop else FinishReason.LENGTH
        return completion(request.request_id, token_ids, reason, request.min_version.encode())


class Lines:
    """Says one text after the other; "$" is the end of a turn, and `</tool>` one too."""

    def __init__(self, model_path, *texts):
        self._encode = SymbolRenderer(model_path).render
        self._texts = texts
        self.requests = []

    async def __call__(self, request):
        text = self._texts[len(self.requests)]
        self.requests.append(request)
        token_ids = self._encode([Message("user", text.replace("$", "<eos>"))])[: request.sampling.max_new_tokens]
        stopped = {*token_ids[-1:]} & {*request.sampling.stop_token_ids}
        return completion(request.request_id, token_ids, FinishReason.STOP if stopped else FinishReason.LENGTH)


def limits(seconds: float) -> dict[str, float]:
    """Of user code, whatever it does."""
    return dict.fromkeys(("step_seconds", "grade_seconds", "program_seconds"), seconds)


@asynccontextmanager
async def runner(
    model_path,
    name="copy",
    *,
    kwargs=None,
    step_seconds=20.0,
    max_model_len=64,
    held_out=0,
    dpo_beta=0.0,
    sessions=None,
    **rollout,
):
    """A started `GroupRunner`; `name` may be `file.py:Class`."""
    environment = EnvironmentConfig(name=name, kwargs=kwargs or {}, **limits(step_seconds))
    config = RunConfig(environment=environment, rollout=RolloutConfig(**rollout), seed=11)
    config.generator.max_model_len, config.evaluation.prompts = max_model_len, held_out  # as small as no run's may be
    config.trainer.warmup.dpo_beta = dpo_beta
    group_runner = GroupRunner(config, model_path=str(model_path))
    try:
        await group_runner.start(sessions)
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


def calling_policy(directory) -> Path:
    """A tiny policy whose tokenizer has the markers of tools."""
    markers = ("<tool>", "</tool>", "<result>", "</result>")
    return make_tiny_policy(TinyPolicyConfig(symbols="0123456789+=", special_tokens=markers), directory)


async def play(model_path, *texts, cls="Calling", name="", max_new_tokens=20, **kwargs):
    """One rollout of these turns with its messages, its sample if any, and what was asked of the policy."""
    policy = Lines(model_path, *texts)
    async with runner(model_path, name or f"{TASKS / 'calling.py'}:{cls}", **kwargs) as group_runner:
        result = await group_runner.run_group(request(5, samples=1, max_new_tokens=max_new_tokens), policy)
    rollout = SimpleNamespace(**structs.asdict(result.rollouts[0]) | {"messages": result.trajectories[0].messages})
    return rollout, result.samples, policy.requests


def text_of(model_path, token_ids) -> str:
    return SymbolRenderer(model_path).parse(token_ids.tolist(), FinishReason.LENGTH).content.replace("<eos>", "$")
