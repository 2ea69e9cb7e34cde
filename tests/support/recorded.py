"""A recorded rollout, and a run directory that holds some."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from titan_rl.config_registry import load_recipe
from titan_rl.overrides import to_toml


def line(**changes: Any) -> dict[str, Any]:
    """A line of `rollouts.jsonl`."""
    return {
        "step": 12,
        "purpose": "train",
        "group": 417,
        "attempt": 0,
        "sample": 1,
        "sampled_tokens": 2,
        "kept": ["best"],
        "reward": 1.0,
        "reward_parts": {"right": 1.0},
        "advantage": 0.75,
        "stop_reason": "stop",
        "error": "",
        "wanted": "12",
        "messages": [{"role": "user", "content": "12="}, {"role": "assistant", "content": "12"}],
        "turns": [{"request": "r", "seed": 7, "generator": "generator0", "finish": "stop", "tokens": 2}],
        "branches": [
            {
                "sample": 1,
                "token_ids": [3, 4, 5, 6],
                "texts": ["1", "2=", "12", "<eos>"],
                "trained": [0, 0, 1, 1],
                "logprobs": [None, None, -0.5, -0.25],
                "trainer_logprobs": [None, None, -0.5, -0.125],
                "weights": [0, 0, 0.001, 0.002],
                "versions": ["", "", "v3", "v3"],
            }
        ],
    } | changes


def run_with(directory: Path, *lines: dict[str, Any], torn: str = "") -> Path:
    """A run directory with these rollouts."""
    directory.mkdir()
    (directory / "config.toml").write_text(to_toml(load_recipe("copy4")), encoding="utf-8")
    (directory / "rollouts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines) + torn)
    return directory
