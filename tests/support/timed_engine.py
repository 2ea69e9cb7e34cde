"""A simulated engine whose steps and loads take time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from titan_rl.generation.engine import StepOutput
from titan_rl.generation.simulated_engine import SimulatedEngine
from titan_rl.types import PolicyVersion

if TYPE_CHECKING:
    from torch import Tensor


class TimedEngine(SimulatedEngine):
    """A step takes `seconds_per_step`, and `seconds_per_sequence` for each request in its batch. `sleep`: waits; a fake
    one simulates faster than time."""

    def __init__(
        self,
        *,
        seconds_per_step: float,
        seconds_per_sequence: float = 0.0,
        seconds_per_load: float = 0.0,
        max_num_seqs: int = 256,
        sleep: Callable[[float], None] = time.sleep,
        **settings: Any,
    ) -> None:
        super().__init__(max_num_seqs=max_num_seqs, **settings)
        self._seconds_per_step = seconds_per_step
        self._seconds_per_sequence = seconds_per_sequence
        self._seconds_per_load = seconds_per_load
        self._most = max_num_seqs
        self._sleep = sleep

    def step(self) -> StepOutput:
        self._sleep(self._seconds_per_step + self._seconds_per_sequence * min(len(self.running()), self._most))
        return super().step()

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], version: PolicyVersion) -> None:
        super().load_weights(tensors, version)
        if self._seconds_per_load:
            self._sleep(self._seconds_per_load)
