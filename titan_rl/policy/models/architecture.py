"""What a family of models is to this package: one subclass of `Architecture`, in a file of its own.

An instance is a model of the family: sizes, and the tensors that its checkpoints store. `tensor_shapes` is the one list
of them: a tiny policy has exactly these, the trainer loads exactly these, and a checkpoint that has more or fewer is
refused by name.

Needs neither torch nor torchtitan, so that a config can be checked before any process starts; what builds the model
imports them where it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from titan_rl.errors import ConfigError
from titan_rl.weights.manifest import EMBEDDING, LM_HEAD

if TYPE_CHECKING:
    from torch import Tensor
    from torchtitan.models.common.attention import VarlenAttention
    from torchtitan.models.common.decoder import Decoder, TransformerBlock


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a model, which msgspec reads and writes by their names in `config.json`. As it stands, its layers are
    those of most dense models: attention over groups of heads and a gated feed-forward, each behind a norm."""

    model_type: ClassVar[str]
    """Of `config.json`."""
    transformers_class: ClassVar[str]
    """Under this name transformers and vLLM know the family."""
    computed: ClassVar[dict[str, Any]] = {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0}
    """Settings of `config.json` of which the trainer computes one value only, which is also that of an absent one."""
    rope_types: ClassVar[tuple[str, ...]] = ("default",)
    """The rotary embeddings that it computes."""
    tiny: ClassVar[dict[str, Any]] = {"rope_theta": 1e4, "norm_eps": 1e-6}
    """What the sizes of a tiny policy do not say."""

    vocab: int = msgspec.field(name="vocab_size")
    dim: int = msgspec.field(name="hidden_size")
    layers: int = msgspec.field(name="num_hidden_layers")
    heads: int = msgspec.field(name="num_attention_heads")
    kv_heads: int = msgspec.field(name="num_key_value_heads")
    head_dim: int
    ffn: int = msgspec.field(name="intermediate_size")
    max_length: int = msgspec.field(name="max_position_embeddings")
    """Positions the rotary embedding is defined for."""
    rope_theta: float
    norm_eps: float = msgspec.field(name="rms_norm_eps")
    tied: bool = msgspec.field(name="tie_word_embeddings", default=False)
    """`lm_head.weight` is `model.embed_tokens.weight` and is not stored."""

    def layer_tensors(self) -> dict[str, tuple[int, ...]]:
        """The weights of a layer, `(out, in)` each, by what stands between its prefix and ".weight"."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "input_layernorm": (self.dim,),
            "self_attn.q_proj": (q, self.dim),
            "self_attn.k_proj": (kv, self.dim),
            "self_attn.v_proj": (kv, self.dim),
            "self_attn.o_proj": (self.dim, q),
            "post_attention_layernorm": (self.dim,),
            "mlp.gate_proj": (self.ffn, self.dim),
            "mlp.up_proj": (self.ffn, self.dim),
            "mlp.down_proj": (self.dim, self.ffn),
        }

    def layer(self, attention: VarlenAttention.Config) -> TransformerBlock.Config:
        """torchtitan's config of a layer, with this computation of attention in it."""
        raise NotImplementedError

    def hugging_face(self, config: Decoder.Config, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """torchtitan's tensors by their Hugging Face names. The trainer publishes, saves and restores them in place, so
        they are renamed and nothing else: torchtitan's adapter for Llama would reorder queries and keys."""
        from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

        return Qwen3StateDictAdapter(config, None).to_hf(tensors)  # type: ignore[arg-type]

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every stored tensor by its Hugging Face name."""
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab, self.dim)}
        for index in range(self.layers):
            shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in self.layer_tensors().items()}
        shapes["model.norm.weight"] = (self.dim,)
        if not self.tied:
            shapes[LM_HEAD] = (self.vocab, self.dim)
        return shapes

    def check_tensor_parallel(self, setting: str, degree: int) -> None:
        """Raises ConfigError unless heads and feed-forward split evenly over `degree` ranks."""
        sizes = {"heads": self.heads, "kv heads": self.kv_heads, "feed-forward size": self.ffn}
        if uneven := [f"{what} ({size})" for what, size in sizes.items() if size % degree]:
            raise ConfigError(f"{setting} ({degree}) must divide the policy's {' and '.join(uneven)}")
