"""Dense Qwen3."""

from typing import ClassVar

from titan_rl.policy.models.architecture import Architecture


class Qwen3(Architecture, frozen=True, kw_only=True):
    model_type: ClassVar = "qwen3"
    transformers_class: ClassVar = "Qwen3ForCausalLM"
    computed: ClassVar = Architecture.computed | {"use_sliding_window": (False,)}
    head_norms: ClassVar = True
