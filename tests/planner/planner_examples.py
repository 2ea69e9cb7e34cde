"""Scenarios that the tests share."""

from __future__ import annotations

from typing import Any

from titan_rl.planner.scenario import EngineSpeed, Scenario, TrainerSpeed, read_lengths


def seven_billion(*, devices: int, trainers: int, generators: int, **settings: Any) -> Scenario:
    """A 7B policy with long-tailed answers; the batch grows with the number of devices.

    8 ms of a decode step are reading 15 GB of weights at 2 TB/s, 0.07 ms per request its KV; a trained token costs
    6 · 7e9 FLOP at 300 TFLOP/s; up to 27k tokens are sampled, as in the published runs.
    """
    defaults: dict[str, Any] = {
        "lengths": read_lengths("lognormal:4000:1.0:27000", seed=1),
        "trainer": TrainerSpeed(seconds_per_step=2.0, seconds_per_token=1.4e-4 / trainers, seconds_per_publication=2.0),
        "generators": generators,
        "groups_per_step": 8 * devices,
        "window": 16 * devices,
    }
    return Scenario(**{**defaults, **settings})


def small(**settings: Any) -> Scenario:
    """A run of a few hundred requests."""
    defaults: dict[str, Any] = {
        "lengths": read_lengths("lognormal:60:0.8:400", seed=3),
        "engine": EngineSpeed(seconds_per_step=0.01, seconds_per_sequence=0.001, max_num_seqs=8),
        "trainer": TrainerSpeed(seconds_per_step=0.5, seconds_per_publication=0.1),
        "generators": 2,
        "prompt_tokens": 0,
        "groups_per_step": 4,
        "samples_per_group": 4,
        "steps": 10,
    }
    return Scenario(**{**defaults, **settings})
