"""What every rank of test_vllm_lora does: one engine loop over vLLM that pulls adapters."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from loop_harness import PROMPT, make_request
from safetensors.torch import load_file
from torch import Tensor
from vllm_loop_scenario import BOUND, Loop, replay

from titan_rl.errors import WeightsError
from titan_rl.types import PolicyVersion
from titan_rl.weights.adapters import adapted
from titan_rl.weights.manifest import TIED, Publication, TensorShard
from titan_rl.weights.segment_files import segment_at

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MODULE = "model.layers.1.self_attn.k_proj"


def adapters(base: dict[str, Tensor], seed: int, r: int = 4) -> dict[str, Tensor]:
    random, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in base.items():
        if (stem := name.removesuffix(".weight")).endswith(TARGETS):
            rows, columns = weight.shape
            tensors[f"{stem}.lora_A.weight"] = torch.randn((r, columns), generator=random)
            tensors[f"{stem}.lora_B.weight"] = 0.15 * torch.randn((rows, r), generator=random)
    return tensors


def publish(this: Loop, name: str, base: dict[str, Tensor], own: dict[str, Tensor]) -> Publication:
    shards, adapted_by = ([TensorShard.whole(*each) for each in tensors.items()] for tensors in (own, base))
    version = PolicyVersion(0, len(this._published))
    settings = {"dtype": torch.float32, "aliases": TIED, "base": adapted_by}
    this._published[name] = this._publisher.publish(version, shards, **settings)
    return this._published[name]


def doubled_scale(good: Publication, this: Loop) -> Publication:
    return dataclasses.replace(good, location=this._published["doubled"].location)


def missing_module(good: Publication, this: Loop) -> Publication:
    kept = tuple(entry for entry in good.manifest.entries if not entry.name.startswith(MODULE))
    return dataclasses.replace(good, manifest=dataclasses.replace(good.manifest, entries=kept))


def stale_adapter(good: Publication, this: Loop) -> Publication:
    return dataclasses.replace(good, location=this._published["first"].location)


DAMAGES: dict[str, Callable[[Publication, Loop], Publication]] = {
    "doubled scale": doubled_scale,
    "missing module": missing_module,
    "stale adapter": stale_adapter,
    "changed base": lambda good, this: this._published["other base"],
}


def driven(this: Loop, base: dict[str, Tensor]) -> dict[str, Any]:
    """By rank 0."""
    own = {name: adapters(base, seed) for seed, name in enumerate(("first", "second"))}
    for name, each in own.items():
        publication = publish(this, name, base, each)
    whole = (TensorShard.whole(*each) for each in base.items())
    merged = {each.name: adapted(each, own["second"], torch.float32)[()] for each in whole}
    this.publish("merged", merged)
    changed = base | {f"{MODULE}.weight": base[f"{MODULE}.weight"].clone()}
    changed[f"{MODULE}.weight"][0, 0] += 0.01
    publish(this, "other base", changed, own["second"])
    publish(this, "doubled", base, {name: each * (1 + ("lora_B" in name)) for name, each in own["second"].items()})
    facts: dict[str, Any] = {"bytes": [os.stat(segment_at(this._published[name].location)).st_size for name in own]}
    facts["bytes of all"] = os.stat(segment_at(this._published["merged"].location)).st_size
    for name in ("first", "second", "merged"):
        this.pull_next(name).result(timeout=BOUND)
        facts[name] = this.serve(make_request(f"of {name}", new=40, seed=5))[f"of {name}"]
    this.engine.hold_in(10)
    this.loop.submit([make_request("through", new=40, temperature=0.0)])
    this.engine.wait_until_held()
    pull = this.pull_next("first")
    this.engine.let_go()
    pull.result(timeout=BOUND)
    (through,) = this.collector.wait_for("through")
    facts["through"] = (through, *replay(this, PROMPT, through))
    for name, damage in DAMAGES.items():
        try:
            this.loop.pull(damage(publication, this)).result(timeout=BOUND)
            facts["refused", name] = ""
        except WeightsError as error:
            facts["refused", name] = str(error)
        this.pull_next("second").result(timeout=BOUND)
        facts["after", name] = this.serve(make_request(f"after {name}", new=40, seed=5))[f"after {name}"]
    return facts


def life(models: dict[str, str]) -> dict[str, Any]:
    this = Loop(models)
    base = load_file(Path(models["tied_a"]) / "model.safetensors")
    facts = driven(this, base) if os.environ["RANK"] == "0" else {}
    this.close()
    facts["errors"] = this.collector.errors.qsize()
    return facts
