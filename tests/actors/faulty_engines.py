"""Engines that misbehave, for test_generator_actor; named there as `file.py:Class`. Rank 0 is well in most of them."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from titan_rl.generation.engine import StepOutput
from titan_rl.generation.simulated_engine import SimulatedEngine
from titan_rl.processes import join_world
from titan_rl.weights.manifest import TensorShard

FALLS_AT = 3
"""Step in which rank 1 of `falling_engine` raises, and rank 0 of `leading_engine`."""


class _SlowEngine(SimulatedEngine):
    def step(self) -> StepOutput:
        time.sleep(0.05)
        return super().step()


def slow_engine(config: Any, model_path: Any, device: str) -> SimulatedEngine:
    return _SlowEngine(vocab_size=13, max_num_seqs=config.max_num_seqs)


class _CollectiveEngine(SimulatedEngine):
    """Ranks meet in every step, as those of a real model do; one rank does not come to one of them."""

    falls = 1

    def __init__(self, *args: Any) -> None:
        super().__init__(vocab_size=13)
        self._rank = int(os.environ["RANK"])
        self._steps = 0
        join_world("gloo")

    def step(self) -> StepOutput:
        if self._rank == self.falls and self._steps == FALLS_AT - 1:
            raise ArithmeticError("the GPU fell off the bus")
        time.sleep(0.2)
        output = super().step()
        self._steps += 1
        dist.all_reduce(torch.zeros(1))
        return output

    def served_shards(self) -> Iterator[TensorShard]:
        for shard in super().served_shards():
            yield dataclasses.replace(shard, counted=self._rank == 0)


falling_engine = idle_engine = _CollectiveEngine


class leading_engine(_CollectiveEngine):  # noqa: N801 (named like the functions)
    falls = 0


def patient_engine(config: Any, model_path: Any, device: str) -> Any:
    """vLLM, with steps that are long enough to be killed in."""
    from titan_rl.generation.vllm.engine import VllmEngine

    class PatientEngine(VllmEngine):
        def step(self) -> StepOutput:
            time.sleep(0.05)
            return super().step()

    return PatientEngine(config, model_path, device)
