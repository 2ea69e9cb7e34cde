"""What is replaced when, with processes and clients that a test stands in for."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from titan_rl.config import RunConfig
from titan_rl.config_registry import copy4
from titan_rl.controller.faults import FaultBoard, kind_of
from titan_rl.errors import MeshFailed
from titan_rl.gateway.config import GatewayConfig
from titan_rl.launch import meshes as module
from titan_rl.launch.host_facts import HostFacts
from titan_rl.launch.mesh_specs import describe
from titan_rl.launch.meshes import Meshes
from titan_rl.launch.placement import MeshPlan

pytestmark = pytest.mark.asyncio


class Processes:
    """In place of the provisioner. Every actor is a text, `router.2` for the second router."""

    def __init__(self) -> None:
        self._spawned: list[str] = []
        self.hosts = {"host0": SimpleNamespace(facts=HostFacts(cpus=2))}

    async def attach(self, *workers: str, **_: Any) -> None: ...

    def spawn(self, name: Any, *_: Any, **arguments: Any) -> Any:
        if isinstance(name, MeshPlan):
            return self
        self._spawned.append(name)
        actor = f"{name}.{self._spawned.count(name)}"
        return [actor]

    async def stop(self, name: str, *, kill: bool = False, remove: str = "") -> None:
        await asyncio.sleep(0)

    async def stop_all(self) -> None: ...


class Client:
    """In place of every client. `asks` are the actors that the mesh calls; `held` keeps its set-up and its `use`."""

    def __init__(self, name: str, actor: str) -> None:
        self.name, self.actor, self.rank0 = name, actor, actor
        self.asks: Any = None
        self.held = asyncio.Event()
        self.held.set()
        self.joined: list[tuple[str, str]] = []

    def lose(self, reason: str) -> None: ...

    def replace(self, actors: Any) -> None:
        self.actor = self.rank0 = actors[0] if isinstance(actors, list) else actors

    async def setup(self, *asks: Any) -> list[int]:
        self.asks = asks
        await self.held.wait()
        return [1]

    async def use(self, *asks: Any) -> None:
        self.asks = asks

    async def pulse(self) -> list[int]:
        await asyncio.Event().wait()
        return []

    async def close(self) -> None: ...

    async def generator_lost(self, name: str, reason: str) -> None: ...

    async def client_lost(self, name: str) -> None: ...

    async def generator_joined(self, name: str, rank0: str) -> None:
        self.joined.append((name, rank0))


class Run:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, config: RunConfig, *, serving: bool = False) -> None:
        def spec(plan: MeshPlan, meshes: Meshes) -> Any:
            name = plan.name
            asks = {
                "rollout": lambda: (meshes.router.actor, meshes.gateway and meshes.gateway.actor),
                "gateway": lambda: (meshes.router.actor,),
            }.get(kind_of(name), tuple)

            def client(actors: Any) -> Client:
                actor = actors[0] if isinstance(actors, list) else actors
                self.clients[name] = Client(name, actor)
                if kind_of(name) == "generator":
                    meshes.generators[name] = self.clients[name]  # type: ignore[assignment]
                return self.clients[name]

            return dataclasses.replace(
                describe(plan, meshes), client=client, setup=lambda client: client.setup(*asks()), end=None
            )

        self.clients: dict[str, Client] = {}
        self.said: list[str] = []
        self.faults = FaultBoard()
        monkeypatch.setattr(module, "describe", spec)
        monkeypatch.setattr(module, "Provisioner", lambda **_: Processes())
        monkeypatch.setattr(module, "sweep_dead_segments", lambda: None)
        monkeypatch.setattr(module, "remove_segments_of", lambda pid: None)
        self.meshes = Meshes(config, GatewayConfig(), faults=self.faults, say=self.said.append, serving=serving)

    async def begin(self) -> Run:
        await self.meshes.place()
        self.meshes.spawn()
        return self

    def kill(self, *names: str) -> None:
        for name in names:
            self.faults.report(MeshFailed(f"{name} rank 0 was killed", name))

    async def until_back(self, *names: str) -> None:
        async with asyncio.timeout(5):
            while not all(any(line.startswith(f"{name} is back") for line in self.said) for name in names):
                await asyncio.sleep(0)


@pytest.mark.parametrize("late", ["rollout0", "gateway"])
async def test_whoever_is_still_being_set_up_when_the_router_is_replaced_asks_the_new_one(
    monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    run = await Run(monkeypatch, copy4(), serving=late == "gateway").begin()
    run.clients[late].held.clear()
    start = asyncio.create_task(run.meshes.set_up(*run.meshes.names))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert run.clients[late].asks[0] == "router.1"
    run.kill("router")
    await run.until_back("router")
    run.clients[late].held.set()
    await asyncio.wait_for(start, 5)
    assert run.clients[late].asks[0] == "router.2"
    await run.meshes.close()
