"""All running parts of a run: the public handles that a training loop works with, and the groups that it asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from titan_rl.config import RunConfig
from titan_rl.scheduling.group_buffer import INITIAL_VERSION
from titan_rl.types import GroupRequest, PolicyVersion, Purpose, SamplingParams

if TYPE_CHECKING:
    from titan_rl.actors.gateway import GatewayClient
    from titan_rl.actors.generator import GeneratorClient
    from titan_rl.actors.rollouts import RolloutWorkers
    from titan_rl.actors.router_client import RouterClient
    from titan_rl.actors.trainer_client import TrainerClient


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
        self, prompt: int, version: PolicyVersion, samples: int, *, exact: bool = False, attempt: int = 0
    ) -> GroupRequest:
        """A training group for one prompt of the stream, sampled by `version` or (not `exact`) a newer one."""
        request = group_request(self.config, Purpose.TRAIN, prompt, samples=samples, version=version)
        return replace(request, exact_version=version if exact else None, attempt=attempt)

    def held_out_group(self, prompt: int, version: PolicyVersion) -> GroupRequest:
        """One greedy rollout of one held-out prompt, sampled by exactly `version`."""
        request = group_request(self.config, Purpose.EVALUATE, prompt, temperature=0.0, version=version)
        return replace(request, exact_version=version)


def group_request(
    config: RunConfig,
    purpose: Purpose,
    index: int,
    *,
    samples: int = 1,
    temperature: float | None = None,
    version: PolicyVersion = INITIAL_VERSION,
) -> GroupRequest:
    """Rollouts of one prompt, by `version` or a newer one. Without a temperature, at that of training; only training
    leaves out unlikely tokens."""
    sampling = config.rollout.sampling
    return GroupRequest(
        group_id=index,
        purpose=purpose,
        samples=samples,
        sampling=SamplingParams(
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature if temperature is None else temperature,
            routes=purpose is Purpose.TRAIN and config.trainer.replay_routes,
            **(sampling.truncation if purpose is Purpose.TRAIN else {}),
        ),
        min_version=version,
    )
