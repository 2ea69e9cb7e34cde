"""Qwen3 with a mixture of experts in every layer, as in Qwen3-30B-A3B."""

from typing import Any, ClassVar

import msgspec

from titan_rl.errors import ConfigError
from titan_rl.policy.models.qwen3 import Qwen3


class Qwen3Moe(Qwen3, frozen=True, kw_only=True):
    model_type: ClassVar = "qwen3_moe"
    transformers_class: ClassVar = "Qwen3MoeForCausalLM"
    computed: ClassVar = Qwen3.computed | {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)}
    mixture: ClassVar = True
    tiny: ClassVar = Qwen3.tiny | {"experts": 8, "chosen": 2, "normed": True}

    ffn: int = msgspec.field(name="moe_intermediate_size")
    """Of each expert."""
    experts: int = msgspec.field(name="num_experts")
    chosen: int = msgspec.field(name="num_experts_per_tok")
    """Experts that compute a token."""
    normed: bool = msgspec.field(name="norm_topk_prob", default=False)
    """Whether their shares of a token add up to 1."""

    def layer_tensors(self) -> dict[str, tuple[int, ...]]:
        shapes = super().layer_tensors()
        expert = {f"{name}_proj.weight": shapes.pop(f"mlp.{name}_proj.weight") for name in ("gate", "up", "down")}
        shapes["mlp.gate.weight"] = (self.experts, self.dim)
        return shapes | {f"mlp.experts.{n}.{name}": size for n in range(self.experts) for name, size in expert.items()}

    def layer(self, attention: Any) -> Any:
        from torchtitan.models.common import Linear
        from torchtitan.models.common.param_init import skip_param_init

        from titan_rl.policy.models.experts import Experts

        layer = super().layer(attention)
        one = layer.feed_forward
        router = Linear.Config(in_features=self.dim, out_features=self.experts, param_init={"weight": skip_param_init})
        layer.feed_forward = Experts.Config(
            w1=one.w1, w2=one.w2, w3=one.w3, router=router, chosen=self.chosen, normed=self.normed
        )
        return layer

    def adapter(self, config: Any) -> Any:
        adapter = super().adapter(config)
        names = {"mlp.gate": "router"}
        for theirs, ours in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
            names |= {f"mlp.experts.{n}.{theirs}_proj": f"experts.{n}.{ours}" for n in range(self.experts)}
        for theirs, ours in names.items():
            adapter.from_hf_map[f"model.layers.{{}}.{theirs}.weight"] = f"layers.{{}}.feed_forward.{ours}.weight"
        return adapter

    def check_tensor_parallel(self, setting: str, degree: int) -> None:
        super().check_tensor_parallel(setting, degree)
        if degree > 1 and setting.startswith("trainer"):
            raise ConfigError(f"{setting} is {degree}: the trainer shards experts by trainer.data_parallel only")
