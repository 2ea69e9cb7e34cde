"""Meshes with processes and clients that a test stands in for."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from titan_rl.actors.router import GeneratorRouter
from titan_rl.config import RunConfig, ServeConfig
from titan_rl.config_registry import copy4
from titan_rl.errors import MeshFailed, TitanError
from titan_rl.gateway.config import GatewayConfig
from titan_rl.hosts.elastic import HostControl
from titan_rl.hosts.facts import HostFacts
from titan_rl.rpc.connection import RemoteMethod
from titan_rl.supervision import managed_mesh
from titan_rl.supervision import supervisor as module
from titan_rl.supervision.mesh_kinds import KINDS, MeshKind
from titan_rl.supervision.placement import Kind, MeshPlan
from titan_rl.supervision.supervisor import Supervisor


async def _try_rdma(_: Any) -> None:
    pass


class Processes:
    """In place of the provisioner. Every actor is a text, `router.2` for the second router."""

    def __init__(self, *hosts: HostFacts) -> None:
        self._spawned: list[str] = []
        self._on: dict[str, tuple[str, ...]] = {}  # hosts by mesh
        self.always, self.born = asyncio.Event(), dict[str, asyncio.Event]()
        self.always.set()
        self.late: list[str] = []
        """Monarch's reasons of the next starts."""
        self.devices: tuple[int, ...] = ()
        """Of hosts that join."""
        self.hosts = {host.name: SimpleNamespace(facts=host, name=host.name, lost="") for host in hosts}

    async def attach(self, workers: dict[str, str], *, on_lost: Any, **_: Any) -> list[Any]:
        self.on_lost = on_lost
        new = {
            name: SimpleNamespace(
                facts=HostFacts(cpus=2, name=name, cuda_devices=self.devices), name=name, try_rdma=_try_rdma
            )
            for name in workers
        }
        self.hosts |= new
        return [*new.values()]

    def on(self, host: Any) -> list[str]:
        return [name for name, hosts in self._on.items() if host.name in hosts]

    async def detach(self, host: str) -> None:
        assert not self.on(self.hosts[host])
        del self.hosts[host]

    def spawn(self, name: Any, *_: Any, **arguments: Any) -> Any:
        if isinstance(name, MeshPlan):
            self._on[name.name] = name.hosts
            return self
        self._spawned.append(name)
        actor = f"{name}.{self._spawned.count(name)}"
        return [actor]

    async def stop(self, name: str, *, kill: bool = False, remove: str = "") -> None:
        await asyncio.sleep(0)
        self._on.pop(name, None)

    async def started(self, name: str) -> str:
        await self.born.get(name, self.always).wait()
        return self.late.pop() if self.late else ""

    async def stop_all(self) -> None: ...


class Client:
    """In place of every client. `peers` are the actors that the mesh calls; `held` keeps its set-up."""

    actor_class: Any = None

    def __init__(self, name: str) -> None:
        self.name, self.actor, self.store = name, "", ""
        self.has_worked, self.files_left = None, ""
        self.peers: dict[str, Any] = {}
        self.held = asyncio.Event()
        self.held.set()
        self.joined: list[tuple[str, ...]] = []
        self.lost: list[str] = []
        self.serving: int | None = None
        self.spares: list[str] = []
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fails(self, error: TitanError) -> None:
        """Whoever watches it gets this error."""
        self.failed.set_exception(error)

    def lose(self, reason: str) -> None:
        self.lost.append(reason)

    def replace(self, actors: Any) -> None:
        (self.actor,) = actors
        self.failed = asyncio.get_running_loop().create_future()

    async def setup(self, **peers: Any) -> list[int]:
        self.peers = peers
        await self.held.wait()
        return [1]

    async def set_peers(self, **peers: Any) -> None:
        self.peers |= peers

    async def watch(self) -> None:
        await self.failed

    async def pulse(self) -> list[int]:
        await asyncio.Event().wait()
        return []

    async def close(self) -> None: ...

    async def call(self, endpoint: RemoteMethod[..., Any], *args: Any) -> None:
        """Of the router."""
        if endpoint is GeneratorRouter.resize:
            (self.serving,) = args
        elif endpoint is GeneratorRouter.generator_joined:
            self.joined.append(args)

    async def fleet_status(self) -> list[Any]:
        counts = {"in_flight": 0, "version": "none"}
        return [SimpleNamespace(name=name, state="asleep", **counts) for name in self.spares]


class Run:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, config: RunConfig, *hosts: HostFacts) -> None:
        def client(kind: MeshKind, plan: MeshPlan) -> Any:
            client = self.clients[plan.name] = Client(plan.name)
            if plan.kind is Kind.ROLLOUT:
                client.store = f"{plan.name}-store"
            return client

        async def check(host: Any) -> None: ...

        self.clients: dict[str, Client] = {}
        self.said: list[str] = []
        self.doing: dict[str, str] = {}
        for kind in KINDS.values():
            monkeypatch.setattr(kind, "client", client)
        self.processes = Processes(*(hosts or [HostFacts(cpus=2)]))
        monkeypatch.setattr(module, "Provisioner", lambda **_: self.processes)
        monkeypatch.setattr(managed_mesh, "LONGEST_PAUSE", 0.0)
        monkeypatch.setattr(module, "sweep_dead_segments", lambda: None)
        monkeypatch.setattr(module, "remove_segments_of", lambda pid: None)
        self.meshes = Supervisor(config, on_mesh=self.doing.__setitem__, say=self.said.append)
        self.run_end = self.meshes.run_end
        self.hosts = HostControl(self.meshes, check)

    def kill(self, *names: str) -> None:
        for name in names:
            self.meshes.report(MeshFailed(f"{name} rank 0 was killed", name))

    def generator_on(self, host: str) -> str:
        return next(mesh.name for mesh in self.meshes.table.of(Kind.GENERATOR) if host in mesh.plan.hosts)

    def lose(self, host: str) -> None:
        del self.processes.hosts[host]
        self.kill(*(mesh.name for mesh in self.meshes.table.placed if host in mesh.plan.hosts))

    async def ended(self, why: str, kind: type[TitanError] = MeshFailed) -> None:
        """Until a fault of this kind has ended the run."""
        with pytest.raises(kind, match=why):
            await asyncio.wait_for(self.run_end.watch(asyncio.Event().wait()), 5)

    async def until(self, said: str) -> None:
        async with asyncio.timeout(5):
            while not any(said in line for line in self.said):
                await asyncio.sleep(0)

    async def until_back(self, *names: str) -> None:
        async with asyncio.timeout(5):
            while not all(any(line.startswith(f"{name} is back") for line in self.said) for name in names):
                await asyncio.sleep(0)


CPU = HostFacts(cpus=4), HostFacts(cpus=4, name="host1")


def one_host(**placement: Any) -> RunConfig:
    config = copy4()
    return dataclasses.replace(config, placement=dataclasses.replace(config.placement, **placement))


def served() -> RunConfig:
    return ServeConfig.of(copy4(), GatewayConfig())


def two_hosts(**placement: Any) -> RunConfig:
    """The trainer is on host0; host1 has generator1 and rollout0."""
    config = copy4()
    where = dataclasses.replace(
        config.placement, trainer=("host0",), generators=("host0", "host1"), rollouts=("host1",), **placement
    )
    generator = dataclasses.replace(config.generator, count=2, tensor_parallel=2)
    return dataclasses.replace(config, placement=where, generator=generator)


class Runs:
    """Makes the runs of a test, and closes them after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch, self._made = monkeypatch, list[Run]()

    async def begin(self, config: RunConfig, *hosts: HostFacts) -> Run:
        """One whose processes start."""
        self._made.append(run := Run(self._monkeypatch, config, *hosts))
        await run.hosts.place()
        run.meshes.spawn()
        return run

    async def up(self, config: RunConfig, *hosts: HostFacts) -> Run:
        """One whose meshes are all up."""
        run = await self.begin(config, *hosts)
        await run.meshes.set_up(*run.meshes.meshes)
        return run

    async def close(self) -> None:
        for run in self._made:
            await run.meshes.close()
