"""Imports vLLM without what an engine on a CPU has no use for, and builds one. Importing this module loads no vLLM.

Each module that is left out is only named by those that are needed, or works for requests that nobody here makes: chat
messages and structured output, which come with the protocols of HTTP servers, and quantized weights. vLLM's patches of
torch's compiler load that compiler, which computes nothing on a CPU. A test fails when vLLM itself imports one no more.
"""

from __future__ import annotations

from pathlib import Path

from titan_rl.generation.config import GeneratorConfig
from titan_rl.generation.engine import Engine
from titan_rl.importing import left_out


class _NotHere:
    """Stands for what is only named."""


_CHAT = ("ChatTemplateResolutionError", "load_chat_template", "parse_chat_messages", "parse_chat_messages_async")

LEFT_OUT: dict[str, dict[str, object]] = {
    "vllm.env_override": {},
    "vllm.parser.engine.adapters": {"ParserEngineReasoningAdapter": _NotHere},
    "vllm.entrypoints.mcp.tool_server": {"ToolServer": _NotHere},
    "vllm.renderers.chat_utils": {"PROMPT_EMBEDS_PLACEHOLDER_TOKEN": "", **dict.fromkeys(_CHAT, _NotHere)},
    "vllm.model_executor.layers.quantization.online.base": {"OnlineQuantizationConfig": _NotHere},
}


def vllm_engine(config: GeneratorConfig, model_path: str | Path, device: str) -> Engine:
    """An engine of vLLM; see `VllmEngine`."""
    with left_out(LEFT_OUT if device == "cpu" else {}):
        from titan_rl.generation.vllm.engine import VllmEngine

        return VllmEngine(config, model_path, device)
