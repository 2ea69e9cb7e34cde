"""torchtitan's configs of layers whose weights are those of a Hugging Face checkpoint, one by one.

Queries, keys and values have a projection each, and rotary embeddings rotate halves. Import this module only after
`titan_adaptation.choose_device`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor
from torchtitan.models.common import CosSinRoPE
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.common.decoder import TransformerBlock
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.common.rope import ComplexRoPE

if TYPE_CHECKING:
    from titan_rl.policy.models.architecture import Architecture

# Weights come from the checkpoint; a tensor it lacks is an error, never a random one.
NO_INIT = {"weight": skip_param_init}


def norm(size: int, eps: float) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=size, eps=eps, param_init=NO_INIT)


def dense_layer(
    block: type[TransformerBlock.Config],
    shape: Architecture,
    attention: VarlenAttention.Config,
    *,
    qk_norm: RMSNorm.Config | None = None,
    scaling: msgspec.Struct | None = None,
) -> TransformerBlock.Config:
    """Attention and a gated feed-forward, each behind a norm. `scaling`: that of Llama 3.1's rotary embedding."""
    sizes = {"dim": shape.head_dim, "max_seq_len": shape.max_length, "theta": shape.rope_theta}
    rope = CosSinRoPE.Config(**sizes) if scaling is None else _scaled_rope(sizes, msgspec.structs.asdict(scaling))
    return block(
        attention_norm=norm(shape.dim, shape.norm_eps),
        ffn_norm=norm(shape.dim, shape.norm_eps),
        attention=make_gqa_config(
            dim=shape.dim,
            n_heads=shape.heads,
            n_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            wqkv_param_init=NO_INIT,
            wo_param_init=NO_INIT,
            inner_attention=dataclasses.replace(attention),
            fuse_qkv=False,
            rope=rope,
            qk_norm=qk_norm,
        ),
        feed_forward=make_ffn_config(
            dim=shape.dim, hidden_dim=shape.ffn, w1_param_init=NO_INIT, w2w3_param_init=NO_INIT
        ),
    )


def _scaled_rope(sizes: dict[str, Any], scaling: dict[str, Any]) -> CosSinRoPE.Config:
    return Llama3RoPE.Config(**sizes, scaling="llama", scaling_factor=scaling.pop("factor"), **scaling)


class Llama3RoPE(CosSinRoPE):
    """Llama 3.1's frequencies, which torchtitan has for the other layout only."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        pass

    def _precompute_cache(self) -> Tensor:
        rotations = ComplexRoPE._precompute_cache(self)  # type: ignore[arg-type]  # it reads the config only
        return torch.cat([rotations.real] * 2 + [rotations.imag] * 2, dim=-1)
