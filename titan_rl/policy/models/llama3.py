"""Llama 3, 3.1 and 3.2 (text), and older Llamas in Hugging Face's layout.

With a rotary embedding that rotates halves, as Hugging Face's does, every stored tensor is one of torchtitan's. Its own
rotates neighbours, for which queries and keys would have to be reordered on every way in and out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec

from titan_rl.policy.models.architecture import Architecture

if TYPE_CHECKING:
    from torchtitan.models.common.attention import VarlenAttention
    from torchtitan.models.common.decoder import TransformerBlock


class Llama3Rope(msgspec.Struct, frozen=True, kw_only=True, tag_field="rope_type", tag="llama3"):
    """Slower rotations of long wavelengths: more positions than the model was first trained for."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


class Llama3(Architecture, frozen=True, kw_only=True):
    model_type: ClassVar = "llama"
    transformers_class: ClassVar = "LlamaForCausalLM"
    computed: ClassVar = Architecture.computed | {"mlp_bias": False}
    rope_types: ClassVar = ("default", "llama3")
    # wavelengths of each kind: kept, slower, and between
    tiny: ClassVar = Architecture.tiny | {
        "rope_parameters": Llama3Rope(
            factor=8, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=64
        )
    }

    rope_parameters: Llama3Rope | None = None

    def layer(self, attention: VarlenAttention.Config) -> TransformerBlock.Config:
        from torchtitan.models.llama3.model import Llama3TransformerBlock

        from titan_rl.policy.models.layers import dense_layer

        return dense_layer(Llama3TransformerBlock.Config, self, attention, scaling=self.rope_parameters)
