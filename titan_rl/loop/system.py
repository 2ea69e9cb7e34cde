"""All running parts of a run: the public handles that a training loop works with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from titan_rl.actors.gateway import GatewayClient
from titan_rl.actors.generator import GeneratorClient
from titan_rl.actors.rollouts import RolloutWorkers
from titan_rl.actors.router_client import RouterClient
from titan_rl.actors.trainer_client import TrainerClient
from titan_rl.config import RunConfig
from titan_rl.types import GroupRequest, PolicyVersion, Purpose, SamplingParams


@dataclass(slots=True)
class System:
    config: RunConfig
    model_path: Path
    trainer: TrainerClient
    router: RouterClient
    rollouts: RolloutWorkers
    generators: Callable[[], Mapping[str, GeneratorClient]]
    """Those that are up now, by name."""
    gateway: GatewayClient | None = None
    """None where no program plays."""

    def train_group(
        self, prompt: int, version: PolicyVersion, *, exact: bool = False, attempt: int = 0
    ) -> GroupRequest:
        """A training group of this run's config for one prompt of the stream, sampled by `version` or (not `exact`) a
        newer one."""
        return GroupRequest(
            group_id=prompt,
            purpose=Purpose.TRAIN,
            samples=self.config.rollout.samples_per_group,
            sampling=self._sampling(self.config.rollout.sampling.temperature),
            min_version=version,
            exact_version=version if exact else None,
            attempt=attempt,
        )

    def held_out_group(self, prompt: int, version: PolicyVersion) -> GroupRequest:
        """One greedy rollout of one held-out prompt, sampled by exactly `version`."""
        return GroupRequest(
            group_id=prompt,
            purpose=Purpose.EVALUATE,
            samples=1,
            sampling=self._sampling(0.0),
            min_version=version,
            exact_version=version,
        )

    def demonstration_group(self, step: int) -> GroupRequest:
        return GroupRequest(
            group_id=step,
            purpose=Purpose.DEMONSTRATE,
            samples=self.config.trainer.warmup.batch,
            sampling=self._sampling(1.0),
            min_version=PolicyVersion(0, 0),
        )

    def _sampling(self, temperature: float) -> SamplingParams:
        return SamplingParams(max_new_tokens=self.config.rollout.sampling.max_new_tokens, temperature=temperature)
