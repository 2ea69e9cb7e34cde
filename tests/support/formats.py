"""Chat formats of the library `renderers`, each over a tokenizer of bytes and the format's own marks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from titan_rl.chat.chat_renderer import ChatRenderer
from titan_rl.policy.config import TinyPolicyConfig
from titan_rl.policy.models.tiny import make_tiny_policy
from titan_rl.types import ToolSpec

FORMATS = (
    *("qwen3", "qwen3.5", "qwen3.6", "glm-4.5", "glm-5", "kimi-k2", "kimi-k2.5", "llama-3", "minimax-m2"),
    *("nemotron-3", "deepseek-v3", "hy3", "laguna-xs.2"),
)
EVERY_FORMAT = (
    *FORMATS,
    *("prime-qwen3", "qwen3.8", "qwen3-vl", "gemma4", "glm-5.1", "glm-5.3", "inkling", "gpt-oss", "laguna-m.1"),
    *("laguna-xs-2.1", "laguna-s-2.1", "nemotron-3-ultra", "nemotron-3.5", "deepseek-r1", "deepseek-v4"),
)
"""All that the library has, but for the one that runs a tokenizer's own chat template."""
TOOLS = (
    ToolSpec("add", "Adds.", {"type": "object", "properties": {"terms": {"type": "array"}}}),
    ToolSpec("look_up", "", {"type": "object", "properties": {"word": {"type": "string"}}}),
)
MISSING = re.compile(r"(?:token |for )'([^']+)'(?: not found|, got)")


def format_over_bytes(name: str, new_directory: Callable[[], Path]) -> ChatRenderer:
    """Its tokenizer has the marks that the format misses, one after the other."""
    marks: list[str] = []
    while True:
        config = TinyPolicyConfig(tokenizer="chat", special_tokens=tuple(marks))
        try:
            return ChatRenderer(make_tiny_policy(config, new_directory()), name)
        except Exception as error:
            found = [MISSING.search(str(each)) for each in (error, error.__cause__)]
            marks.append(next(match for match in found if match)[1])
