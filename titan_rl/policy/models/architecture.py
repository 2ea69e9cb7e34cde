"""What a family of models is to this package: one subclass of `Architecture`, in a file of its own.

An instance is a model. `tensor_shapes` is the one list of its tensors: a tiny policy has exactly these, the trainer
loads exactly these, and a checkpoint that has more or fewer is refused by name.

Needs neither torch nor torchtitan, so that a config can be checked before any process starts: methods import them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import msgspec

from titan_rl.errors import ConfigError
from titan_rl.importing import import_name
from titan_rl.weights.manifest import EMBEDDING, LM_HEAD


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a model, which msgspec reads and writes by their names in `config.json`. As it stands, its layers are
    those of most dense models: attention over groups of heads, then a gated feed-forward, each behind a norm."""

    model_type: ClassVar[str]
    """Of `config.json`."""
    transformers_class: ClassVar[str]
    """Of transformers and vLLM."""
    computed: ClassVar[dict[str, tuple[Any, ...]]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "attention_dropout": (0.0,),
        "sliding_window": (None,),
        "partial_rotary_factor": (1.0,),
        "rope_type": ("default",),
    }
    """Settings of `config.json`, and what values of each the trainer computes: first that of an absent one."""
    mixture: ClassVar[bool] = False
    """Whether layers are mixtures of experts."""
    head_norms: ClassVar[bool] = False
    """Whether each head of queries and keys has a norm."""
    tiny: ClassVar[dict[str, Any]] = {"rope_theta": 1e4, "norm_eps": 1e-6}
    """What the sizes of a tiny policy do not say."""
    tiny_std: ClassVar[float] = 0.02
    """Of its initial weights."""

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
        """What a layer stores, without the layer's prefix; weights are `(out, in)`."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (self.dim,),
            "self_attn.q_proj.weight": (q, self.dim),
            "self_attn.k_proj.weight": (kv, self.dim),
            "self_attn.v_proj.weight": (kv, self.dim),
            "self_attn.o_proj.weight": (self.dim, q),
            "post_attention_layernorm.weight": (self.dim,),
            "mlp.gate_proj.weight": (self.ffn, self.dim),
            "mlp.up_proj.weight": (self.ffn, self.dim),
            "mlp.down_proj.weight": (self.dim, self.ffn),
        }
        if self.head_norms:
            shapes |= {f"self_attn.{which}_norm.weight": (self.head_dim,) for which in "qk"}
        return shapes

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every stored tensor by its Hugging Face name."""
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab, self.dim)}
        for index in range(self.layers):
            shapes |= {f"model.layers.{index}.{name}": shape for name, shape in self.layer_tensors().items()}
        shapes["model.norm.weight"] = (self.dim,)
        if not self.tied:
            shapes[LM_HEAD] = (self.vocab, self.dim)
        return shapes

    def norm(self, size: int) -> Any:
        from torchtitan.models.common.nn_modules import RMSNorm
        from torchtitan.models.common.param_init import skip_param_init

        return RMSNorm.Config(normalized_shape=size, eps=self.norm_eps, param_init={"weight": skip_param_init})

    def rope(self) -> Any:
        """Rotates halves, as Hugging Face's models do: stored tensors are used as they are."""
        from torchtitan.models.common import CosSinRoPE

        return CosSinRoPE.Config(dim=self.head_dim, max_seq_len=self.max_length, theta=self.rope_theta)

    def layer(self, attention: Any) -> Any:
        """torchtitan's config of a layer, with this one of its attention. Qwen3's computes what Llama's does."""
        from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
        from torchtitan.models.common.param_init import skip_param_init
        from torchtitan.models.qwen3.model import Qwen3TransformerBlock

        no_init: Any = {"weight": skip_param_init}  # they come from the checkpoint; one that lacks a tensor is refused
        init = {"wqkv_param_init": no_init, "wo_param_init": no_init}
        ffn = {"w1_param_init": no_init, "w2w3_param_init": no_init}
        sizes = {"dim": self.dim, "n_heads": self.heads, "n_kv_heads": self.kv_heads, "head_dim": self.head_dim}
        head_norm = self.norm(self.head_dim) if self.head_norms else None
        return Qwen3TransformerBlock.Config(
            attention_norm=self.norm(self.dim),
            ffn_norm=self.norm(self.dim),
            attention=make_gqa_config(
                **sizes, **init, inner_attention=attention, fuse_qkv=False, rope=self.rope(), qk_norm=head_norm
            ),
            feed_forward=make_ffn_config(dim=self.dim, hidden_dim=self.ffn, **ffn),
        )

    def adapter(self, config: Any) -> Any:
        """What gives torchtitan's tensors their Hugging Face names, and leaves them where they are."""
        from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

        return Qwen3StateDictAdapter(config, None)

    def check_tensor_parallel(self, setting: str, degree: int) -> None:
        """Raises ConfigError unless heads and feed-forward split evenly over `degree` ranks."""
        sizes = {"heads": self.heads, "kv heads": self.kv_heads, "feed-forward size": self.ffn}
        if uneven := [f"{what} ({size})" for what, size in sizes.items() if size % degree]:
            raise ConfigError(f"{setting} ({degree}) must divide the policy's {' and '.join(uneven)}")


ARCHITECTURES = {
    "qwen3": "titan_rl.policy.models.qwen3:Qwen3",
    "qwen3_moe": "titan_rl.policy.models.qwen3_moe:Qwen3Moe",
    "llama3": "titan_rl.policy.models.llama3:Llama3",
}


def read_shape(directory: Path, own: str | type[Architecture] = "") -> Architecture:
    """Sizes from `config.json`, in the layout of transformers 4 or 5. `own`: a further family, or its name.

    Raises:
        ConfigError: no or broken config.json, another architecture, or a variant of one that the trainer's model does
            not compute (biases, sliding window, another rotary embedding or activation).
    """
    file = directory / "config.json"
    try:
        config = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        raise ConfigError(f"{directory} is no checkpoint directory: it has no config.json") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from None
    kinds = [import_name(name, ARCHITECTURES, Architecture) for name in ARCHITECTURES]
    if own:
        kinds.append(import_name(own, ARCHITECTURES, Architecture) if isinstance(own, str) else own)
    families = {each.model_type: each for each in kinds}
    if (family := families.get(kind := str(config.get("model_type")))) is None:
        known = ", ".join(map(repr, families))
        remedy = "policy.architecture names a family of your own"
        raise ConfigError(f"{file}: model_type is {kind!r}; the trainer computes {known} only ({remedy})")
    if config.get("use_sliding_window") is False:
        config["sliding_window"] = None  # Qwen's files name one that they do not use
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    rope_type = rope["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    for name, wanted in family.computed.items():
        if (value := (config | rope).get(name, wanted[0])) not in wanted:
            known = " or ".join(map(repr, wanted))
            raise ConfigError(f"{file}: {name} is {value!r}; the trainer computes {name} = {known} only")
    try:
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        computed = {"head_dim": head_dim, "rope_parameters": None if rope_type == "default" else rope}
        experts = {"num_experts": config.get("num_local_experts")}  # its name since transformers 5
        return msgspec.convert(experts | config | rope | computed, family, strict=False)
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{file} lacks a size of the model, or says it wrong: {error}") from None
