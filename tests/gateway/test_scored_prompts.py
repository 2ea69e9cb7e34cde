"""What evaluation harnesses ask, of two ranks of a real engine: how likely is this answer (25 s)?"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio
import torch
from support.gateway import MODEL, client
from transformers import AutoModelForCausalLM

from titan_rl.chat.chat_renderer import PlainTokenizer
from titan_rl.config import RunConfig, ServeConfig
from titan_rl.gateway.config import GatewayConfig
from titan_rl.generation.config import GeneratorConfig
from titan_rl.policy.config import PolicyConfig, TinyPolicyConfig
from titan_rl.policy.models.tiny import make_tiny_policy
from titan_rl.run.start import bring_up

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONTEXT = "What is the capital of Norway? One of its largest ports, and a name of four letters.\n"
ANSWERS = ["Oslo", "Bergen", "Ålesund"]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_policy(TinyPolicyConfig(tokenizer="chat", max_length=256), tmp_path_factory.mktemp("policy"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(policy: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    config = RunConfig(
        policy=PolicyConfig(path=str(policy)),
        generator=GeneratorConfig(count=1, tensor_parallel=2, max_model_len=256, kv_cache_bytes=64 << 20),
    )
    async with bring_up(ServeConfig.of(config, GatewayConfig(port=0, model=MODEL))) as up:
        yield client(up)


def reference(policy: Path, tokens: list[int]) -> tuple[list[float], list[bool]]:
    """Of each token but the first, by transformers: its logprob, and whether it is the likeliest one."""
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logprobs = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    of_tokens = logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    return of_tokens.tolist(), (of_tokens == logprobs.amax(-1)).tolist()


@pytest.mark.parametrize("asked", ["as lm-evaluation-harness asks now", "as it once did", "in a stream"])
async def test_answers_are_scored_by_the_policy_whatever_the_cache_has(
    asked: str, served: openai.AsyncOpenAI, policy: Path
) -> None:
    tokenizer = PlainTokenizer(policy)
    context, answers = tokenizer.encode(CONTEXT), [tokenizer.encode(answer) for answer in ANSWERS]
    prompts = [context + answer for answer in answers]
    options = {"model": MODEL, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1234}
    if asked == "in a stream":
        told = []
        for prompt in prompts:
            stream = await served.completions.create(prompt=prompt, max_tokens=1, stream=True, **options)
            chunks = [chunk.choices[0] async for chunk in stream]
            assert chunks[0].text.startswith(CONTEXT)
            told.append(chunks[0].logprobs)
    else:
        more = {"prompt": prompts, "max_tokens": 1} if "now" in asked else {"max_tokens": 0}
        texts = [CONTEXT + answer for answer in ANSWERS]
        answer = await served.completions.create(**{"prompt": texts, **more}, **options)
        told = [choice.logprobs for choice in answer.choices]
        assert [choice.text[: len(text)] for choice, text in zip(answer.choices, texts, strict=True)] == texts
    for prompt, logprobs in zip(prompts, told, strict=True):
        found, likeliest = reference(policy, prompt)
        assert logprobs.token_logprobs[0] is None
        answer = slice(len(context), len(prompt))
        scores = logprobs.token_logprobs[answer]
        assert scores == pytest.approx(found[answer.start - 1 :], abs=2e-5)
        tops = [max(each.values()) for each in logprobs.top_logprobs[answer]]
        assert [score == top for score, top in zip(scores, tops, strict=True)] == likeliest[answer.start - 1 :]
