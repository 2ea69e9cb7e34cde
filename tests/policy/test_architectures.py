"""Reading config.json. Under 1 s."""

from __future__ import annotations

import json

import pytest

from titan_rl.errors import ConfigError
from titan_rl.policy.models.architecture import read_shape

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_theta": 1000000,
}


def read(directory, **changes):
    config = {name: value for name, value in (CONFIG | changes).items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(config))
    return read_shape(directory)


def test_the_layout_of_transformers_4_is_read(tmp_path):
    shape = read(tmp_path, rope_scaling=None)
    assert (shape.vocab, shape.dim, shape.layers, shape.rope_theta, shape.tied) == (151936, 1024, 28, 1e6, True)
    assert sum(len(size) for size in shape.tensor_shapes().values()) > 300


def test_the_layout_of_transformers_5_is_read(tmp_path):
    new = read(tmp_path, rope_theta=..., rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert new == read(tmp_path)


LLAMA = {
    "model_type": "llama",
    "head_dim": ...,  # Llama 3.1's
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def test_llama_is_read_in_both_layouts_and_has_no_norms_of_heads(tmp_path):
    shape = read(tmp_path, **LLAMA)
    assert (shape.head_dim, shape.rope_theta) == (64, 1e6)
    assert (shape.rope_parameters.factor, shape.rope_parameters.original_max_position_embeddings) == (8, 8192)
    new = LLAMA["rope_scaling"] | {"rope_theta": 1e6}
    assert shape == read(tmp_path, **LLAMA | {"rope_theta": ..., "rope_scaling": None, "rope_parameters": new})
    assert read(tmp_path, model_type="llama").rope_parameters is None
    assert read(tmp_path).tensor_shapes().keys() - shape.tensor_shapes().keys() == {
        f"model.layers.{layer}.self_attn.{which}_norm.weight" for layer in range(28) for which in "qk"
    }


def test_a_mixture_of_experts_is_read_in_both_layouts(tmp_path):
    moe = {"model_type": "qwen3_moe", "moe_intermediate_size": 768, "num_experts_per_tok": 8, "norm_topk_prob": True}
    shape = read(tmp_path, **moe, num_experts=128)
    assert shape == read(tmp_path, **moe, num_local_experts=128) and (shape.experts, shape.ffn) == (128, 768)
    sizes = shape.tensor_shapes()
    assert sizes["model.layers.27.mlp.gate.weight"] == (128, 1024) and "model.layers.0.mlp.up_proj.weight" not in sizes
    assert sizes["model.layers.27.mlp.experts.127.down_proj.weight"] == (1024, 768)
    with pytest.raises(ConfigError, match="trainer.tensor_parallel is 2: the trainer shards experts by"):
        shape.check_tensor_parallel("trainer.tensor_parallel", 2)


def test_an_untied_model_stores_its_head(tmp_path):
    assert "lm_head.weight" not in read(tmp_path).tensor_shapes()
    assert read(tmp_path, tie_word_embeddings=False).tensor_shapes()["lm_head.weight"] == (151936, 1024)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model_type": "gemma"}, "'gemma'; the trainer computes 'qwen3', 'qwen3_moe', 'llama' only"),
        (LLAMA | {"mlp_bias": True}, "mlp_bias"),
        (
            LLAMA | {"rope_scaling": {"rope_type": "yarn"}},
            "yarn'; the trainer computes rope_type = 'default' or 'llama3'",
        ),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        (
            {"rope_scaling": LLAMA["rope_scaling"]},
            "rope_type is 'llama3'; the trainer computes rope_type = 'default' only",
        ),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [1]}, "mlp_only_layers"),
        ({"model_type": "qwen3_moe", "moe_intermediate_size": 768}, "num_experts"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "linear"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_theta": ...}, "rope_theta"),
        ({"hidden_size": ...}, "hidden_size"),
    ],
)
def test_what_the_trainer_does_not_compute_is_refused_by_name(tmp_path, changes, word):
    with pytest.raises(ConfigError, match=word):
        read(tmp_path, **changes)


def test_a_directory_without_config_is_no_checkpoint(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_shape(tmp_path)


def test_a_broken_config_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        read_shape(tmp_path)


def test_tensor_parallelism_must_divide_heads_and_feed_forward(tmp_path):
    shape = read(tmp_path)
    shape.check_tensor_parallel("trainer.tensor_parallel", 8)
    with pytest.raises(ConfigError, match="kv heads"):
        shape.check_tensor_parallel("trainer.tensor_parallel", 16)
