"""One gateway for all clients: `titan-rl serve` before a policy with random weights, with a real engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file
from support.serving import serving

from titan_rl.chat.chat_renderer import PlainTokenizer
from titan_rl.policy.config import TinyPolicyConfig
from titan_rl.policy.models.tiny import make_tiny_policy

ROOT = Path(__file__).resolve().parents[2]
KEY = "secret"
MODEL = "gpt-4o"
"""The name that a program has for its model stays; by it clients also judge what they may ask for."""
LENGTH = 32768
"""Tokens, which are bytes: agents have prompts of 10 KB."""


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which a program finds it."""
    directory = tmp_path_factory.mktemp("served")
    policy = make_policy(directory)
    settings = directory / "settings.toml"
    settings.write_text("[rollout.renderer_kwargs]\nenable_thinking = false\n")
    options = ["--policy.path", str(policy), "--config", str(settings), "--model-name", MODEL]
    options += ["--generator.max-model-len", str(LENGTH), "--generator.max-num-batched-tokens", str(LENGTH)]
    options += ["--generator.kv-cache-bytes", str(256 << 20), "--logging.directory", str(directory / "runs")]
    with serving(*options, key=KEY) as (_, url, _):
        yield environment(url.removesuffix("/v1"), directory)


def make_policy(directory: Path) -> Path:
    """Random, but inclined to end its turns and texts after some 20 tokens, and not to write marks of its chat format
    where it need not: most clients take no limit of their calls' tokens."""
    policy = make_tiny_policy(
        TinyPolicyConfig(tokenizer="chat", max_length=LENGTH, tied_embeddings=False, seed=1), directory
    )
    tokens = PlainTokenizer(policy)
    weights = load_file(policy / "model.safetensors")
    weights["model.embed_tokens.weight"][:, 0] = 0.1  # which is 4 after the last norm, whatever was said
    likely = weights["lm_head.weight"][:, 0]
    likely[:] = 0
    likely[tokens.convert_tokens_to_ids(["<|im_end|>", '"'])] = 0.7
    marks = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
    likely[tokens.convert_tokens_to_ids([*marks, "<|im_start|>", "<|endoftext|>"])] = -2
    save_file(weights, policy / "model.safetensors", metadata={"format": "pt"})
    return policy


def environment(url: str, home: Path) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TITAN_RL_"))}
    keys = dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY"), KEY)
    urls = {"OPENAI_BASE_URL": f"{url}/v1", "ANTHROPIC_BASE_URL": url, "GOOGLE_GEMINI_BASE_URL": url}
    # What clients would fetch or report elsewhere stays here.
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1", "HF_HUB_OFFLINE": "1"}
    return {**own, **keys, **urls, **quiet, "HOME": str(home), "MODEL": MODEL}
