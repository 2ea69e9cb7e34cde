"""A router and generators in processes of their own, which a test kills and replaces as the controller does."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import faulty_engines
import numpy as np
import torch

from titan_rl.actors.generator import Generator, GeneratorClient
from titan_rl.actors.router import GeneratorRouter
from titan_rl.actors.router_client import RouterClient
from titan_rl.config import RunConfig
from titan_rl.errors import ActorFailed, MeshFailed
from titan_rl.generation.config import GeneratorConfig
from titan_rl.generation.simulated_engine import simulated_token
from titan_rl.hosts.facts import detect_host
from titan_rl.policy.config import PolicyConfig, TinyPolicyConfig
from titan_rl.policy.models.tiny import make_tiny_policy
from titan_rl.routing.config import RouterConfig
from titan_rl.supervision.fork_server import Stage
from titan_rl.supervision.placement import Kind, plan
from titan_rl.supervision.provisioner import Provisioner
from titan_rl.types import Completion, GenerationRequest, PolicyVersion, SamplingParams
from titan_rl.weights.publisher import SharedMemoryPublisher
from titan_rl.weights.tensor_files import shards_of_files

SECONDS = 60.0
PROMPT = np.array([2, 3, 4], np.int32)
NEW_TOKENS = 16
"""Of every request; the engine takes 50 ms for each."""


def request(number: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"r{number}",
        prompt_token_ids=PROMPT,
        sampling=SamplingParams(max_new_tokens=NEW_TOKENS),
        seed=number,
    )


def has_its_tokens(completion: Completion) -> bool:
    """Whether its tokens are those that it has wherever and however often it is sampled."""
    seed = int(completion.request_id.removeprefix("r"))
    positions = range(len(PROMPT), len(PROMPT) + NEW_TOKENS)
    return completion.token_ids.tolist() == [simulated_token(seed, position, 13) for position in positions]


class MortalFleet:
    def __init__(self, scratch: Path, count: int) -> None:
        settings = GeneratorConfig(
            count=count, engine=f"{Path(faulty_engines.__file__)}:slow_engine", max_model_len=64, heartbeat_seconds=0.05
        )
        self._config = RunConfig(policy=PolicyConfig(tiny=TinyPolicyConfig()), generator=settings)
        self._model = make_tiny_policy(TinyPolicyConfig(), scratch)
        self._plan = plan(self._config, detect_host())
        self._event_loop = asyncio.get_running_loop()
        self._ends: dict[str, asyncio.Event] = {}
        stage = Stage(
            name="torch",
            kinds=tuple(Kind),
            environment=self._plan.meshes["generator0"].env[0],
            imports=(
                "titan_rl.generation.engine_loop",
                "titan_rl.generation.simulated_engine",
                "titan_rl.weights.puller",
            ),
        )
        self.provisioner = Provisioner(
            log_directory=str(scratch), imports=(), on_fault=self._on_fault, stage=lambda host: stage
        )
        self.publisher = SharedMemoryPublisher(channel="policy", rank=0, group=None, max_live=2, directory=scratch)
        self.generators = {
            name: GeneratorClient(name, self._spawn(name), start_seconds=SECONDS)
            for name in (f"generator{index}" for index in range(count))
        }
        self.router = RouterClient(*self._spawn("router"), seconds=SECONDS, is_replaced=True)
        self.pids: dict[str, int] = {}

    async def set_up(self) -> None:
        """Every generator serves v0."""
        await asyncio.gather(*map(self._set_up, [*self.generators, "router"]))
        await self.pull(0)

    async def pull(self, step: int) -> None:
        shards = list(shards_of_files(self._model))
        tied = (("lm_head.weight", "model.embed_tokens.weight"),)
        version = PolicyVersion(0, step)
        await self.router.pull_model_state_dict(
            self.publisher.publish(version, shards, dtype=torch.float32, aliases=tied)
        )

    async def kill(self, name: str) -> None:
        """Kill a process, and tell those whose business it is."""
        self._ends[name] = asyncio.Event()
        os.kill(self.pids[name], signal.SIGKILL)
        await asyncio.wait_for(self._ends[name].wait(), SECONDS)
        if name == "router":
            self.router.lose("it was killed")
        else:
            self.generators[name].lose("it was killed")
            await self.router.call(GeneratorRouter.generator_lost, name, "it was killed")
        await self.provisioner.stop(name)

    async def replace(self, name: str) -> None:
        mesh = self._spawn(name)
        if name == "router":
            self.router.replace(mesh)
            await self._set_up(name)
        else:
            self.generators[name].replace(mesh)
            await self._set_up(name)
            await self.router.call(GeneratorRouter.generator_joined, name, self.generators[name].actor)

    async def until_all_serve(self) -> None:
        async def wait() -> None:
            while any(status.state != "serving" for status in await self.router.fleet_status()):
                pass  # each look is a round trip

        await asyncio.wait_for(wait(), SECONDS)

    def _spawn(self, name: str) -> Any:
        mesh = self.provisioner.spawn(self._plan.meshes[name])
        if name == "router":
            handles = {each: generator.actor for each, generator in self.generators.items()}
            return mesh.spawn(name, GeneratorRouter, RouterConfig(), handles)
        return mesh.spawn(name, Generator, name, self._config.generator, model_path=str(self._model), device="cpu")

    async def _set_up(self, name: str) -> None:
        if name == "router":
            (self.pids[name],) = await self.router.setup()
        else:
            (self.pids[name],) = await self.generators[name].setup()

    def _on_fault(self, fault: ActorFailed) -> None:
        """From a thread of the provisioner."""
        if isinstance(fault, MeshFailed) and fault.mesh in self._ends:
            self._event_loop.call_soon_threadsafe(self._ends[fault.mesh].set)


@asynccontextmanager
async def mortal_fleet(scratch: Path, count: int) -> AsyncIterator[MortalFleet]:
    fleet = MortalFleet(scratch, count)
    try:
        await fleet.set_up()
        yield fleet
        await fleet.router.disconnect()
    finally:
        fleet.publisher.close()
        await fleet.provisioner.stop_all()
