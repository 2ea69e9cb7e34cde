"""LoRA in the trainer: torchtitan's converter, with PEFT's names.

Embedding, norms and head are frozen with the rest of the base. Import this module only after
`titan_adaptation.choose_device`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torchtitan.components.lora import LoRAConverter

from titan_rl.errors import ConfigError
from titan_rl.policy.config import LoraConfig
from titan_rl.weights.adapters import LORA_A, LORA_B

_HF_SUFFIX = {"lora_a": LORA_A, "lora_b": LORA_B}

_ONE_CONFIG = {"wk": "wkv", "wv": "wkv"}  # what torchtitan builds from a config of another name


def with_adapters(model_config: Any, lora: LoraConfig, from_hf: Mapping[str, str | None]) -> Any:
    """torchtitan's config of a model that learns by adapters. `from_hf`: its names by those of Hugging Face."""
    names = (theirs for name, theirs in from_hf.items() if theirs and _is_target(name, lora))
    modules = {name.split(".")[-2] for name in names if "experts" not in name}
    converter = LoRAConverter.Config(
        rank=lora.r, alpha=lora.lora_alpha, target_modules=sorted({_ONE_CONFIG.get(each, each) for each in modules})
    )
    return LoRAConverter(converter).convert(model_config)


def adapters_of(
    state: Mapping[str, Any], lora: LoraConfig, to_hf: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Tensor]:
    """The adapters of a model's state under PEFT's names. `to_hf`: renames weights. Raises ConfigError where a target
    has none: torchtitan only warns."""
    adapters = {}
    for name, tensor in state.items():
        stem, _, kind = name.removesuffix(".weight").rpartition(".")
        if kind in _HF_SUFFIX:
            (weight,) = to_hf({f"{stem}.weight": tensor})
            adapters[weight.removesuffix(".weight") + _HF_SUFFIX[kind]] = tensor
    targets = [name.removesuffix(".weight") for name in to_hf(dict(state)) if lora.r and _is_target(name, lora)]
    if missing := {name + suffix for name in targets for suffix in (LORA_A, LORA_B)} ^ adapters.keys():
        raise ConfigError(f"trainer.lora: torchtitan's model has not what it should: {', '.join(sorted(missing)[:5])}")
    return adapters


def _is_target(name: str, lora: LoraConfig) -> bool:
    return name.split(".")[-2] in lora.target_modules
