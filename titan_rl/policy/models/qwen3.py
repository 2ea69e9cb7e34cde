"""What a Qwen3 checkpoint directory says about its model: sizes and tensor names, nothing loaded.

`tensor_shapes` is the one list of tensors: the tiny policy writes exactly these, the trainer loads exactly these,
and a checkpoint that has more or fewer is refused by name.

Needs neither torch nor torchtitan, so that a config can be checked before any process starts.
"""

from pathlib import Path
from typing import Any

import msgspec

from titan_rl.errors import ConfigError
from titan_rl.weights.manifest import EMBEDDING, LM_HEAD


class Qwen3Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a dense Qwen3 model. msgspec reads and writes them by their names in `config.json`."""

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

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every stored tensor by its Hugging Face name; weights are `(out, in)`."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (self.dim,),
            "self_attn.q_proj": (q, self.dim),
            "self_attn.k_proj": (kv, self.dim),
            "self_attn.v_proj": (kv, self.dim),
            "self_attn.o_proj": (self.dim, q),
            "self_attn.q_norm": (self.head_dim,),
            "self_attn.k_norm": (self.head_dim,),
            "post_attention_layernorm": (self.dim,),
            "mlp.gate_proj": (self.ffn, self.dim),
            "mlp.up_proj": (self.ffn, self.dim),
            "mlp.down_proj": (self.dim, self.ffn),
        }
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab, self.dim)}
        for index in range(self.layers):
            shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
        shapes["model.norm.weight"] = (self.dim,)
        if not self.tied:
            shapes[LM_HEAD] = (self.vocab, self.dim)
        return shapes

    def check_tensor_parallel(self, setting: str, degree: int) -> None:
        """Raises ConfigError unless heads and feed-forward split evenly over `degree` ranks."""
        sizes = {"heads": self.heads, "kv heads": self.kv_heads, "feed-forward size": self.ffn}
        if uneven := [f"{what} ({size})" for what, size in sizes.items() if size % degree]:
            raise ConfigError(f"{setting} ({degree}) must divide the policy's {' and '.join(uneven)}")


def read_shape(directory: Path) -> Qwen3Shape:
    """Sizes from `config.json`, in the layout of transformers 4 or 5.

    Raises:
        ConfigError: no or broken config.json, another architecture, or a variant of Qwen3 that the trainer's
            model does not compute (biases, sliding window, scaled rotary embedding, another activation).
    """
    file = directory / "config.json"
    try:
        config = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        raise ConfigError(f"{directory} is no checkpoint directory: it has no config.json") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from None
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    for name, value, wanted in (
        ("model_type", config.get("model_type"), "qwen3"),  # dense
        ("attention_bias", config.get("attention_bias", False), False),
        ("use_sliding_window", config.get("use_sliding_window", False), False),
        ("hidden_act", config.get("hidden_act", "silu"), "silu"),
        ("rope_type", rope.get("rope_type", rope.get("type", "default")), "default"),
    ):
        if value != wanted:
            raise ConfigError(f"{file}: {name} is {value!r}; the trainer computes {name} = {wanted!r} only")
    try:
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return msgspec.convert(config | rope | {"head_dim": head_dim}, Qwen3Shape, strict=False)
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{file} lacks a size of the model, or says it wrong: {error}") from None
