"""All running parts of a run: the public handles that a training loop works with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from titan_rl.actors.gateway import GatewayMesh
from titan_rl.actors.generator import GeneratorMesh
from titan_rl.actors.rollouts import Rollouts
from titan_rl.actors.router_client import RouterClient
from titan_rl.actors.trainer_client import Trainer
from titan_rl.config import RunConfig
from titan_rl.types import GroupRequest, PolicyVersion, Purpose, SamplingParams


@dataclass(slots=True)
class System:
    """The running parts."""

    config: RunConfig
    model_path: Path
    trainer: Trainer
    router: RouterClient
    rollouts: Rollouts
    generators: dict[str, GeneratorMesh]
    """By name. A lost generator is removed."""
    gateway: GatewayMesh | None = None
    """None where no program plays."""
    pids: dict[str, list[int]] = field(default_factory=dict)
    """Process ids by mesh."""

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

    def held_out_group(
        self, prompt: int, version: PolicyVersion, *, exact: bool = False, pinned_to: str | None = None
    ) -> GroupRequest:
        """One greedy rollout of one held-out prompt."""
        return GroupRequest(
            group_id=prompt,
            purpose=Purpose.EVALUATE,
            samples=1,
            sampling=self._sampling(0.0),
            min_version=version,
            exact_version=version if exact else None,
            pinned_to=pinned_to,
        )

    def demonstration_group(self, step: int) -> GroupRequest:
        """The demonstrations of one warm-up step."""
        return GroupRequest(
            group_id=step,
            purpose=Purpose.DEMONSTRATE,
            samples=self.config.trainer.warmup.batch,
            sampling=self._sampling(1.0),
            min_version=PolicyVersion(0, 0),
        )

    def _sampling(self, temperature: float) -> SamplingParams:
        return SamplingParams(max_new_tokens=self.config.rollout.sampling.max_new_tokens, temperature=temperature)
