"""Two real generators behind a real router, with weights published by the test instead of a trainer."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from titan_rl.actors.generator import Generator, GeneratorMesh
from titan_rl.actors.router import GeneratorRouter
from titan_rl.actors.router_client import RouterClient
from titan_rl.config import RunConfig
from titan_rl.errors import ActorFailed, MeshFailed
from titan_rl.generation.config import GeneratorConfig
from titan_rl.launch.hosts.facts import detect_host
from titan_rl.launch.placement import plan
from titan_rl.launch.provisioner import Provisioner
from titan_rl.launch.start import model_directory
from titan_rl.policy.config import PolicyConfig, TinyPolicyConfig
from titan_rl.routing.config import RouterConfig
from titan_rl.types import GenerationRequest, PolicyVersion, SamplingParams
from titan_rl.weights.manifest import Publication, TensorShard
from titan_rl.weights.publisher import SharedMemoryPublisher

SECONDS = 200.0
TIED = (("lm_head.weight", "model.embed_tokens.weight"),)


class RealFleet:
    """What a test works with."""

    def __init__(self, router: RouterClient, generators: dict[str, GeneratorMesh], model_path: Path) -> None:
        self.router = router
        self.generators = generators
        self.pids: dict[str, list[int]] = {}
        """Process ids of each generator's ranks."""
        self._tensors = load_file(model_path / "model.safetensors")
        self._publisher = SharedMemoryPublisher(channel=f"test{id(self)}", rank=0, group=None, max_live=8)

    def publish(self, step: int) -> Publication:
        """Weights that are different for every step and the same for the same step."""
        random = torch.Generator().manual_seed(step)
        shards = [
            TensorShard(
                name=name,
                data=tensor + (0.05 * torch.randn(tensor.shape, generator=random) if step else 0.0),
                global_shape=tuple(tensor.shape),
                offset=(0,) * tensor.ndim,
            )
            for name, tensor in self._tensors.items()
        ]
        return self._publisher.publish(PolicyVersion(0, step), shards, dtype=torch.float32, aliases=TIED)

    async def pull(self, step: int) -> Any:
        return await self.router.pull_model_state_dict(self.publish(step))

    def close(self) -> None:
        self._publisher.close()


def request(request_id: str, *, tokens: int, step: int = 0, prompt: int = 0) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=np.array([2 + prompt % 10, 2 + prompt // 10 % 10, 12], np.int32),
        sampling=SamplingParams(max_new_tokens=tokens),
        seed=prompt,
        min_version=PolicyVersion(0, step),
    )


@asynccontextmanager
async def real_fleet(router: RouterConfig, *, tensor_parallel: int = 1) -> AsyncIterator[RealFleet]:
    """Two generators that serve v0."""
    config = RunConfig(policy=PolicyConfig(tiny=TinyPolicyConfig(max_length=2048, seed=3)))
    config.generator = GeneratorConfig(count=2, tensor_parallel=tensor_parallel, max_model_len=2048)
    model_path = model_directory(config)
    meshes = {mesh.name: mesh for mesh in plan(config, detect_host()).meshes}
    fleet: RealFleet | None = None
    loop = asyncio.get_running_loop()
    telling = set()

    def tell_router(fault: ActorFailed) -> None:
        if fleet is not None and isinstance(fault, MeshFailed):
            telling.add(loop.create_task(fleet.router.generator_lost(fault.mesh, str(fault))))

    provisioner = Provisioner(
        log_directory="", imports=(), on_fault=functools.partial(loop.call_soon_threadsafe, tell_router)
    )
    try:
        generators = {
            name: GeneratorMesh(
                provisioner.spawn(meshes[name]).spawn(
                    name, Generator, name, config.generator, model_path=str(model_path), device="cpu"
                ),
                name,
            )
            for name in ("generator0", "generator1")
        }
        rank0 = {name: generator.rank0 for name, generator in generators.items()}
        ready = await asyncio.gather(*(generator.setup(seconds=SECONDS) for generator in generators.values()))
        [actor] = provisioner.spawn(meshes["router"]).spawn("router", GeneratorRouter, router, rank0)
        fleet = RealFleet(RouterClient(actor, seconds=SECONDS), generators, model_path)
        for name, pids in zip(generators, ready, strict=True):
            fleet.pids[name] = pids
        await fleet.pull(0)
        yield fleet
        await fleet.router.close()
    finally:
        if fleet is not None:
            fleet.close()
        await provisioner.stop_all()
