"""The largest policy that benchmarks on a laptop use."""

from titan_rl.policy.config import TinyPolicyConfig

POLICY_100M = TinyPolicyConfig(
    symbols="".join(chr(0x4E00 + index) for index in range(20_480)),
    dim=768,
    layers=12,
    heads=12,
    kv_heads=4,
    head_dim=64,
    ffn=2400,
)
