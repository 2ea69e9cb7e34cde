"""Generators and routers without a trainer: what the benchmarks of the serving side bring up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from titan_rl.config import RunConfig
from titan_rl.errors import ActorFailed, ActorGone
from titan_rl.generation.config import GeneratorConfig
from titan_rl.policy.config import PolicyConfig, TinyPolicyConfig
from titan_rl.routing.config import RouterConfig
from titan_rl.supervision.process import prepare_controller
from titan_rl.types import GenerationRequest, PolicyVersion, SamplingParams
from titan_rl.weights.manifest import TIED, Publication

prepare_controller()
from titan_rl.actors.generator import Generator, GeneratorClient  # noqa: E402
from titan_rl.actors.router import GeneratorRouter  # noqa: E402
from titan_rl.actors.router_client import RouterClient  # noqa: E402
from titan_rl.hosts.facts import detect_host  # noqa: E402
from titan_rl.policy.models.tiny import model_directory  # noqa: E402
from titan_rl.supervision.placement import plan  # noqa: E402
from titan_rl.supervision.provisioner import Provisioner  # noqa: E402

POLICY = TinyPolicyConfig(dim=256, layers=4, heads=8, kv_heads=4, head_dim=32, ffn=768, max_length=256)
"""3.2M parameters: what a CPU decodes at a few thousand tokens a second."""

SECONDS = 300.0
"""Bound on any one call."""

PROMPT_TOKENS = 16


def make_request(request_id: str, *, new_tokens: int, seed: Sequence[int]) -> GenerationRequest:
    """A request with a random prompt, a function of `seed`: other seeds have other prompts, which no cache holds."""
    random = np.random.default_rng(seed)
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=random.integers(2, 13, PROMPT_TOKENS).astype(np.int32),
        sampling=SamplingParams(max_new_tokens=new_tokens),
        seed=int(random.integers(2**62)),
    )


class Checkpoint:
    """What a trainer of one rank would publish: a checkpoint's weights, each time under the next version."""

    def __init__(self, model_path: Path) -> None:
        from titan_rl.weights.publisher import SharedMemoryPublisher
        from titan_rl.weights.tensor_files import shards_of_files

        self._publisher = SharedMemoryPublisher(channel="policy", rank=0, group=None, max_live=2)
        self._shards = list(shards_of_files(model_path))
        self._step = 0

    def publish(self) -> Publication:
        """The next version. The one before the last must have been pulled by everybody who is to have it: its memory
        is used again."""
        import torch

        if self._step >= 2:
            self._publisher.release(PolicyVersion(0, self._step - 2))
        version = PolicyVersion(0, self._step)
        self._step += 1
        return self._publisher.publish(version, self._shards, dtype=torch.float32, aliases=TIED)

    def close(self) -> None:
        self._publisher.close()


class Fleet:
    """Generators that are up, and routers in front of any of them."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.model_path = model_directory(config)
        self.places = plan(config, detect_host()).meshes
        self.provisioner = Provisioner(log_directory="", imports=(), on_fault=lambda fault: self.on_fault(fault))
        self.on_fault: Callable[[ActorFailed], None] = lambda fault: print(fault, flush=True)
        """Told of every process that ends by itself, from any thread."""
        self.checkpoint = Checkpoint(self.model_path)
        self.generators: dict[str, Any] = {}
        """Name → handle of rank 0."""
        self.pids: dict[str, list[int]] = {}
        self._meshes: dict[str, GeneratorClient] = {}
        self._router_mesh: Any = None
        self._routers: list[RouterClient] = []

    async def set_up(self) -> None:
        """Build every engine; they serve after a router's first pull."""
        self._router_mesh = self.provisioner.spawn(self.places["router"])
        await asyncio.gather(*(self.start(name) for name in self.places if name.startswith("generator")))

    async def start(self, name: str) -> None:
        """Build a generator's engine; the processes of one before it are stopped first."""
        await self.provisioner.stop(name)
        mesh = self.provisioner.spawn(self.places[name]).spawn(
            name, Generator, name, self.config.generator, model_path=str(self.model_path), device="cpu"
        )
        generator = self._meshes[name] = GeneratorClient(name, mesh, start_seconds=SECONDS)
        self.generators[name] = generator.actor
        self.pids[name] = await generator.setup()

    def router(
        self, name: str, config: RouterConfig, generators: int | None = None, serving: int | None = None
    ) -> RouterClient:
        """One more router over the first `generators` of the fleet (None: all), in the routers' process; `serving` of
        them serve, the others are spares."""
        behind = dict(list(self.generators.items())[:generators])
        actor = self._router_mesh.spawn(name, GeneratorRouter, config, behind, serving)[0]
        self._routers.append(RouterClient(actor, seconds=SECONDS))
        return self._routers[-1]

    async def close(self) -> None:
        for router in self._routers:
            await router.close()
        for mesh in self._meshes.values():
            with suppress(ActorGone):  # it was killed
                await mesh.close()


async def through_the_router(router: RouterClient, requests: Sequence[GenerationRequest]) -> tuple[float, int]:
    """Seconds and tokens of requests that are sent at once."""
    started = time.perf_counter()
    completions = await asyncio.gather(*(router.generate(request) for request in requests))
    return time.perf_counter() - started, sum(len(completion.token_ids) for completion in completions)


@asynccontextmanager
async def fleet(generator: GeneratorConfig, policy: TinyPolicyConfig = POLICY) -> AsyncIterator[Fleet]:
    """`generator.count` generators, ready for a router; nothing is left of them afterwards."""
    up = Fleet(RunConfig(policy=PolicyConfig(tiny=policy), generator=generator))
    try:
        await up.set_up()
        yield up
        await up.close()
    finally:
        up.checkpoint.close()
        await up.provisioner.stop_all()
