"""Which families of models there are, and what a checkpoint directory says about its model. Needs no torch."""

from pathlib import Path
from typing import Any

import msgspec

from titan_rl.errors import ConfigError
from titan_rl.policy.models.architecture import Architecture
from titan_rl.policy.models.llama3 import Llama3
from titan_rl.policy.models.qwen3 import Qwen3

ARCHITECTURES: dict[str, type[Architecture]] = {"qwen3": Qwen3, "llama3": Llama3}
"""By the names that `policy.tiny.architecture` takes."""


def read_shape(directory: Path) -> Architecture:
    """Sizes from `config.json`, in the layout of transformers 4 or 5.

    Raises:
        ConfigError: no or broken config.json, an architecture that is not carried, or a variant of one that is, which
            the trainer's model does not compute (biases, sliding window, another rotary embedding or activation).
    """
    file = directory / "config.json"
    try:
        config = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        raise ConfigError(f"{directory} is no checkpoint directory: it has no config.json") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from None
    families = {family.model_type: family for family in ARCHITECTURES.values()}
    if (family := families.get(kind := str(config.get("model_type")))) is None:
        raise ConfigError(
            f"{file}: model_type is {kind!r}; the trainer computes {' and '.join(map(repr, families))} only"
        )
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    rope_type = rope["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    found = {name: (config.get(name, value), (value,)) for name, value in family.computed.items()}
    for name, (value, wanted) in {**found, "rope_type": (rope_type, family.rope_types)}.items():
        if value not in wanted:
            known = " or ".join(map(repr, wanted))
            raise ConfigError(f"{file}: {name} is {value!r}; the trainer computes {name} = {known} only")
    try:
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        scaling = {"rope_parameters": None if rope_type == "default" else rope}
        return msgspec.convert(config | rope | {"head_dim": head_dim} | scaling, family, strict=False)
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{file} lacks a size of the model, or says it wrong: {error}") from None
