"""Imports vLLM without the modules that an engine on a CPU does not use, and builds an engine.

Importing this module does not load vLLM.

vLLM imports the modules that are left out, but does not call them for plain token requests: chat messages, images and
structured output, quantized weights, Triton's kernels, models and sampling of transformers. A test fails when vLLM no
longer imports one of them.
"""

from __future__ import annotations

from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

from titan_rl.generation.config import LINEARS, GeneratorConfig
from titan_rl.generation.engine import Engine
from titan_rl.importing import Named, import_name, uncompiled

_NAMES: dict[str, tuple[str, ...]] = {
    "opentelemetry.exporter.otlp.proto.grpc.trace_exporter": ("OTLPSpanExporter",),
    "torch._dynamo._trace_wrapped_higher_order_op": ("TransformGetItemToIndex",),
    "torch._dynamo.symbolic_convert": ("InliningInstructionTranslator",),
    "torch._inductor": (),
    "torch._inductor.config": (),
    "torch._inductor.custom_graph_pass": ("CustomGraphPass",),
    "torch.utils.cpp_extension": ("load_inline",),
    "transformers.conversion_mapping": (
        "get_checkpoint_conversion_mapping",
        "register_checkpoint_conversion_mapping",
    ),
    "transformers.generation.utils": ("GenerationMixin",),
    "transformers.modeling_utils": ("PreTrainedAudioTokenizerBase",),
    "vllm.entrypoints.mcp.tool_server": ("ToolServer",),
    "vllm.env_override": (),
    "vllm.kernels.triton": (),
    "vllm.kernels.triton.qkv_padded_fp8_quant": ("quantize_fp8_maybe_pad_head_dim",),
    "vllm.model_executor.layers.quantization.online.base": ("OnlineQuantizationConfig",),
    "vllm.model_executor.warmup.kernel_warmup": ("kernel_warmup",),
    "vllm.models.deepseek_v4.common.eplb_util": ("dspark_draft_supports_eplb",),
    "vllm.parser.engine.adapters": ("ParserEngineReasoningAdapter",),
    "vllm.renderers.chat_utils": (
        "PROMPT_EMBEDS_PLACEHOLDER_TOKEN",
        "ChatTemplateResolutionError",
        "load_chat_template",
        "parse_chat_messages",
        "parse_chat_messages_async",
    ),
    "vllm.v1.worker.gpu.warmup": ("warmup_kernels",),
}

LEFT_OUT: dict[str, dict[str, object]] = {module: dict.fromkeys(names, Named) for module, names in _NAMES.items()}
if (_transformers := find_spec("transformers")) is not None:
    # Its submodules are imported as usual. Its own `__init__` would read thousands of files to list them.
    LEFT_OUT["transformers.models"] = {
        "__path__": [f"{root}/models" for root in _transformers.submodule_search_locations or ()]
    }


def vllm_engine(config: GeneratorConfig, model_path: str | Path, device: str) -> Engine:
    """An engine of vLLM; see `VllmEngine`."""
    if config.linear not in LINEARS:
        import_name(config.linear)  # a user's function may be compiled
    with uncompiled(LEFT_OUT) if device == "cpu" else nullcontext():
        from titan_rl.generation.vllm.engine import VllmEngine

        return VllmEngine(config, model_path, device)
