"""Who gets whose handles: a mesh that is up, for the first time or again, is introduced to those that call it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from titan_rl.actors.relay import RelayMesh
from titan_rl.controller.faults import kind_of
from titan_rl.errors import ActorGone

if TYPE_CHECKING:
    from titan_rl.launch.meshes import Meshes


class Introductions:
    """Among the meshes of one run or service."""

    def __init__(self, meshes: Meshes) -> None:
        self._meshes = meshes

    @property
    def relays(self) -> list[RelayMesh]:
        """Those of the hosts that are not lost."""
        meshes = self._meshes
        known = (meshes.clients.get(name) for name in meshes.specs if kind_of(name) == "relay")
        return [relay for relay in known if relay is not None and relay.host in meshes.hosts]

    def relay_on(self, host: str) -> Any:
        """Handle of a host's relay; None: there is none, because there is one host."""
        return next((relay.actor for relay in self.relays if relay.host == host), None)

    async def introduce(self, name: str) -> None:
        """Give handles to those who call the mesh, and to the mesh, because others may have been replaced while it was
        set up."""
        meshes = self._meshes
        match kind_of(name):
            case "generator":
                generator = meshes.generators[name] = meshes.clients[name]
                host = meshes.specs[name].plan.hosts[0]
                await meshes.router.generator_joined(name, generator.rank0)
                if (relay := self.relay_on(host)) is not None:
                    await generator.use_relay(relay)
            case "relay":
                there = meshes.clients[name].host
                await self.tell_relays()
                on_it = [
                    mesh
                    for mesh in meshes.generators
                    if mesh in meshes.specs and there in meshes.specs[mesh].plan.hosts
                ]
                await asyncio.gather(*(meshes.generators[mesh].use_relay(self.relay_on(there)) for mesh in on_it))
            case "router" | "gateway":
                await asyncio.gather(*map(self.update, meshes.up))
            case "rollout":
                await self.update(name)
                await self.attach_stores()

    async def farewell(self, name: str, reason: str) -> None:
        """The mesh will not be back, because its host has left or nobody wants it any more."""
        if kind_of(name) == "relay":
            await self.tell_relays()
        else:
            await self._meshes.router.generator_left_out(name, reason)

    async def tell_relays(self) -> None:
        """Each of all others."""
        up = (relay for relay in self.relays if f"relay{relay.host.removeprefix('host')}" in self._meshes.up)
        await asyncio.gather(*(relay.use(self.relays) for relay in up))

    async def attach_stores(self) -> None:
        """Let trainer ranks read the samples on other hosts than theirs."""
        meshes = self._meshes
        if len(meshes.hosts) > 1:
            where = {worker.store: meshes.specs[worker.name].plan.hosts[0] for worker in meshes.rollouts.workers}
            handles = meshes.rollouts.stores
            await meshes.trainer.attach_stores({store: (where[store], handles[store]) for store in handles})

    async def update(self, name: str) -> None:
        """Give a mesh the handles that it calls."""
        meshes = self._meshes
        with suppress(ActorGone):  # it is being replaced
            if kind_of(name) == "gateway":
                await meshes.clients[name].use(meshes.router.actor)
            elif kind_of(name) == "rollout":
                await meshes.clients[name].use(meshes.router.actor, meshes.gateway and meshes.gateway.actor)
