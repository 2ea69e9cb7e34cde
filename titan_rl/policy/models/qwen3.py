"""What a Qwen3 checkpoint directory says about its model: sizes and tensor names, nothing loaded.

`tensor_shapes` is the one list of tensors: the tiny policy writes exactly these, the trainer loads exactly these,
and a checkpoint that has more or fewer is refused by name.

Needs neither torch nor torchtitan, so that a config can be checked before any process starts.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_rl.errors import ConfigError
from titan_rl.weights.manifest import EMBEDDING, LM_HEAD


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Shape:
    """Sizes of a dense Qwen3 model."""

    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    max_length: int
    """Positions the rotary embedding is defined for."""
    rope_theta: float
    norm_eps: float
    tied: bool
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
        config: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{directory} is no checkpoint directory: it has no config.json") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{file} holds no JSON object")
    if config.get("model_type") != "qwen3":
        raise ConfigError(
            f"{file}: model_type is {config.get('model_type')!r}; the trainer computes 'qwen3' (dense) only"
        )
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    for name, value, wanted in (
        ("attention_bias", config.get("attention_bias", False), False),
        ("use_sliding_window", config.get("use_sliding_window", False), False),
        ("hidden_act", config.get("hidden_act", "silu"), "silu"),
        ("rope_type", rope_type, "default"),
    ):
        if value != wanted:
            raise ConfigError(f"{file}: {name} is {value!r}; the trainer computes {name} = {wanted!r} only")
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise ConfigError(f"{file}: neither rope_theta nor rope_parameters.rope_theta is there")
    try:
        return Qwen3Shape(
            vocab=int(config["vocab_size"]),
            dim=int(config["hidden_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=int(config["num_attention_heads"]),
            kv_heads=int(config["num_key_value_heads"]),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]),
            ffn=int(config["intermediate_size"]),
            max_length=int(config["max_position_embeddings"]),
            rope_theta=float(theta),
            norm_eps=float(config["rms_norm_eps"]),
            tied=bool(config.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise ConfigError(f"{file}: {error.args[0]} is missing") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{file}: a size is no number: {error}") from None
