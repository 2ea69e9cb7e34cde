"""Dense Qwen3: every head of queries and keys has a norm of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from titan_rl.policy.models.architecture import Architecture

if TYPE_CHECKING:
    from torchtitan.models.common.attention import VarlenAttention
    from torchtitan.models.common.decoder import TransformerBlock


class Qwen3(Architecture, frozen=True, kw_only=True):
    model_type: ClassVar = "qwen3"
    transformers_class: ClassVar = "Qwen3ForCausalLM"
    computed: ClassVar = Architecture.computed | {"use_sliding_window": False}

    def layer_tensors(self) -> dict[str, tuple[int, ...]]:
        return super().layer_tensors() | dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (self.head_dim,))

    def layer(self, attention: VarlenAttention.Config) -> TransformerBlock.Config:
        from torchtitan.models.qwen3.model import Qwen3TransformerBlock

        from titan_rl.policy.models.layers import dense_layer, norm

        return dense_layer(Qwen3TransformerBlock.Config, self, attention, qk_norm=norm(self.head_dim, self.norm_eps))
