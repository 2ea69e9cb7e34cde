"""Llama 3, 3.1 and 3.2 (text), and older Llamas in Hugging Face's layout."""

from typing import Any, ClassVar

import msgspec

from titan_rl.policy.models.architecture import Architecture


class Llama3Rope(msgspec.Struct, frozen=True, tag_field="rope_type", tag="llama3"):
    """Long wavelengths rotate more slowly: for more positions than the model first had."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


class Llama3(Architecture, frozen=True, kw_only=True):
    model_type: ClassVar = "llama"
    transformers_class: ClassVar = "LlamaForCausalLM"
    computed: ClassVar = Architecture.computed | {"mlp_bias": (False,), "rope_type": ("default", "llama3")}
    tiny_std: ClassVar = 0.1  # without norms of heads, queries and keys of 64 channels need that to tell tokens apart
    tiny: ClassVar = Architecture.tiny | {"rope_parameters": Llama3Rope(8.0, 1.0, 4.0, 64)}

    rope_parameters: Llama3Rope | None = None

    def rope(self) -> Any:
        from titan_rl.policy.models.model import Llama3RoPE

        if self.rope_parameters is None:
            return super().rope()
        sizes = {"dim": self.head_dim, "max_seq_len": self.max_length, "theta": self.rope_theta}
        scaling = msgspec.structs.asdict(self.rope_parameters)
        return Llama3RoPE.Config(**sizes, scaling="llama", scaling_factor=scaling.pop("factor"), **scaling)
