"""All meshes of one run or service, and what each kind of mesh is: arguments, client, peers, cost of its loss.

A peer is an actor that a mesh calls: it gets the handle when it is set up, and again whenever the peer was replaced.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_rl.actors.gateway import GatewayClient
from titan_rl.actors.generator import GeneratorClient
from titan_rl.actors.relay import RelayClient
from titan_rl.actors.rollouts import RolloutWorkerClient, RolloutWorkers
from titan_rl.actors.router import GeneratorRouter
from titan_rl.actors.router_client import RouterClient
from titan_rl.actors.trainer_client import TrainerClient
from titan_rl.config import RunConfig
from titan_rl.errors import ConfigError, MeshFailed, TitanError
from titan_rl.hosts.host import Host
from titan_rl.policy.models.tiny import model_directory
from titan_rl.rpc.mesh_client import MeshClient
from titan_rl.supervision.managed_mesh import ManagedMesh, MeshState
from titan_rl.supervision.placement import Kind, MeshPlan, Placement, plan

CUDA_START = 6
"""Times `placement.start_seconds`."""


@dataclass(slots=True, kw_only=True)
class MeshTable:
    """All meshes of one run or service by name, and what they are made from."""

    config: RunConfig
    report: Callable[[TitanError], None]
    """Called with the fault of a mesh that hangs."""
    say: Callable[[str], None]
    hosts: Mapping[str, Host]
    """Those that are not lost, by name."""
    model_path: Path = field(init=False)
    """Hugging Face directory that trainer and generators load."""
    trainer_path: Path | None = None
    """That of the trainer, where it loads other weights of the same shape."""
    rollouts: RolloutWorkers = field(init=False)
    """All rollout workers as one object."""
    fleet: list[str] = field(init=False)
    """Names of the generators that there are to be, spares too."""
    spares: int = field(init=False)
    """How many of these wait for the place of another one."""
    leaving: set[str] = field(default_factory=set)
    """Hosts on which nothing is placed any more."""
    meshes: dict[str, ManagedMesh] = field(default_factory=dict)
    """Those that are to be, and those that are not gone yet."""
    placement: Placement | None = None
    """The newest one."""

    def __post_init__(self) -> None:
        self.model_path, self.rollouts = model_directory(self.config), RolloutWorkers(self.config)
        self.fleet, self.spares = self.config.generator_names(), self.config.placement.spares

    @property
    def placed(self) -> list[ManagedMesh]:
        """Those for which there is room, in the order of their start."""
        return [self.meshes[name] for name in self.placement.meshes] if self.placement else []

    def trial(self, fleet: Sequence[str], *, without: str = "") -> Placement:
        """The placement with these generators, without a host. What has no room is not in it. Raises ConfigError if
        that happens at the start."""
        hosts = [host.facts for host in self.hosts.values() if host.name not in {*self.leaving, without}]
        return plan(self.config, *hosts, generators=fleet, kept=self.placement)

    def place(self) -> list[MeshPlan]:
        """Place what has no place yet, or has lost it; returns the plans of meshes that are new."""
        self.placement = self.trial(self.fleet)
        plans = self.placement.meshes
        for name, mesh in self.meshes.items():
            mesh.plan = plans.get(name, mesh.plan)
            if mesh.kind in (Kind.RELAY, Kind.GENERATOR):  # its host may be gone, or it was taken out of the fleet
                mesh.wanted = name in plans or name in self.fleet
        for gone in [mesh for mesh in self.meshes.values() if mesh.is_idle and not mesh.wanted]:
            del self.meshes[gone.name]
        return [each for name, each in plans.items() if name not in self.meshes]

    def of(self, kind: Kind) -> Iterator[ManagedMesh]:
        return (mesh for mesh in self.meshes.values() if mesh.kind is kind)

    def relays(self) -> dict[str, ManagedMesh]:
        """By host, in the same order for everybody."""
        there = {mesh.plan.hosts[0]: mesh for mesh in self.of(Kind.RELAY)}
        return {host: there[host] for host in self.hosts if host in there and there[host].births}

    def generators(self) -> dict[str, GeneratorClient]:
        """Those that are up."""
        return {mesh.name: mesh.client for mesh in self.of(Kind.GENERATOR) if mesh.is_up}

    def left_out(self) -> set[str]:
        """Generators that failed too often."""
        return {mesh.name for mesh in self.of(Kind.GENERATOR) if mesh.state is MeshState.GIVEN_UP}

    def to_serve(self) -> int:
        """Generators that are to serve, left out or not, spares aside."""
        return len(self.fleet) - self.spares


class MeshKind:
    """One kind of mesh, among the meshes of one run."""

    calls: tuple[Kind, ...] = ()
    """The kinds of its peers."""
    doing = "starting"
    """What the mesh does during its set-up, for the display."""
    lost_with: str
    """What has to be done again when it loses a process or hangs."""

    def __init__(self, table: MeshTable) -> None:
        self.table = table

    def client(self, plan: MeshPlan) -> MeshClient:
        """Its client, before it has any actors. Raises ConfigError if the mesh must not be there."""
        raise NotImplementedError

    def arguments(self, mesh: ManagedMesh) -> dict[str, Any]:
        """Of the actor's constructor."""
        return {"config": self.table.config, "model_path": str(self.table.model_path)}

    def peers(self, mesh: ManagedMesh) -> dict[str, Any]:
        """As its client takes them."""
        return {kind.value: mesh.handle for kind in self.calls for mesh in self.table.of(kind)}

    async def announce(self, mesh: ManagedMesh) -> None:
        """It came up while others were. Its handle is not all that they have to know."""

    async def announce_loss(self, mesh: ManagedMesh, reason: str) -> None:
        """It is lost. Nobody waits any more for what it has asked the router for."""
        if Kind.ROUTER in self.calls:
            await self.router.call(GeneratorRouter.client_lost, mesh.name)

    async def announce_end(self, mesh: ManagedMesh, reason: str) -> None:
        """It will not be back."""

    @property
    def router(self) -> RouterClient:
        return self.table.meshes["router"].client

    @property
    def start_seconds(self) -> float:
        placement = self.table.placement
        slower = CUDA_START if placement is not None and placement.device == "cuda" else 1
        return slower * self.table.config.placement.start_seconds


class TrainerKind(MeshKind):
    doing = "building the policy"
    lost_with = "the step in flight"

    def client(self, plan: MeshPlan) -> TrainerClient:
        config, report = self.table.config, self.table.report
        if len(set(plan.hosts)) > 1 and config.placement.untrusted():
            raise ConfigError(
                "torch's connections between the hosts of a trainer are not encrypted: keep it on one host "
                "(placement.trainer), or add --trusted-network"
            )
        return TrainerClient(
            config,
            start_seconds=self.start_seconds,
            on_hung=lambda reason, kind=MeshFailed: report(kind(reason, plan.name)),
            say=self.table.say,
        )

    def arguments(self, mesh: ManagedMesh) -> dict[str, Any]:
        model = str(self.table.trainer_path or self.table.model_path)
        return super().arguments(mesh) | {"model_path": model, "device": mesh.plan.device, "hosts": mesh.plan.hosts}

    def peers(self, mesh: ManagedMesh) -> dict[str, Any]:
        """The stores, of which it may read the samples of other hosts."""
        if len(self.table.hosts) == 1:
            return {}
        host = {mesh.client.store: mesh.plan.hosts[0] for mesh in self.table.of(Kind.ROLLOUT)}
        return {"stores": {store: (host[store], actor) for store, actor in self.table.rollouts.stores.items()}}


class GeneratorKind(MeshKind):
    calls = (Kind.RELAY,)
    doing = "building the engine"
    lost_with = "the tokens that its requests have not streamed"

    def client(self, plan: MeshPlan) -> GeneratorClient:
        return GeneratorClient(plan.name, start_seconds=self.start_seconds)

    def arguments(self, mesh: ManagedMesh) -> dict[str, Any]:
        config = self.table.config.generator_settings()
        return {**super().arguments(mesh), "config": config, "mesh": mesh.name, "device": mesh.plan.device}

    def peers(self, mesh: ManagedMesh) -> dict[str, Any]:
        """The relay of its host; None: there is none, because there is one host."""
        relay = self.table.relays().get(mesh.plan.hosts[0])
        return {"relay": relay and relay.handle}

    async def announce(self, mesh: ManagedMesh) -> None:
        await self.router.call(GeneratorRouter.generator_joined, mesh.name, mesh.handle)

    async def announce_loss(self, mesh: ManagedMesh, reason: str) -> None:
        await self.router.call(GeneratorRouter.generator_lost, mesh.name, reason)

    async def announce_end(self, mesh: ManagedMesh, reason: str) -> None:
        await self.router.call(GeneratorRouter.generator_left_out, mesh.name, reason)


class RelayKind(MeshKind):
    calls = (Kind.RELAY,)
    lost_with = "the weights that it is bringing to its host"

    def client(self, plan: MeshPlan) -> RelayClient:
        return RelayClient(f"the relay on {plan.hosts[0]}", start_seconds=self.start_seconds)

    def arguments(self, mesh: ManagedMesh) -> dict[str, Any]:
        return {"host": mesh.plan.hosts[0]}

    def peers(self, mesh: ManagedMesh) -> dict[str, Any]:
        """The relay of every host, and which one it is."""
        return {"relays": {host: (relay.births, relay.handle) for host, relay in self.table.relays().items()}}


class RouterKind(MeshKind):
    lost_with = "which sessions stick to which generator"

    def client(self, plan: MeshPlan) -> RouterClient:
        return RouterClient(seconds=self.start_seconds, who="controller", is_replaced=True)

    def arguments(self, mesh: ManagedMesh) -> dict[str, Any]:
        table, generators = self.table, self.table.generators()
        return {
            "config": table.config.router_settings(),
            "generators": {name: generator.actor for name, generator in generators.items()},
            "serving": table.to_serve(),
            "awaited": tuple(name for name in table.fleet if name not in {*generators, *table.left_out()}),
        }


class GatewayKind(MeshKind):
    calls = (Kind.ROUTER,)
    doing = "listening"
    lost_with = "the rollouts that programs are playing"

    def client(self, plan: MeshPlan) -> GatewayClient:
        return GatewayClient(start_seconds=self.start_seconds)

    def arguments(self, mesh: ManagedMesh) -> dict[str, Any]:
        return {**super().arguments(mesh), "gateway": self.table.config.gateway_settings()}


class RolloutKind(MeshKind):
    calls = (Kind.ROUTER, Kind.GATEWAY)
    doing = "starting the environment process"
    lost_with = "the groups that it plays, and the samples that it holds"

    def client(self, plan: MeshPlan) -> RolloutWorkerClient:
        return next(worker for worker in self.table.rollouts.workers if worker.name == plan.name)

    def arguments(self, mesh: ManagedMesh) -> dict[str, Any]:
        return {**super().arguments(mesh), "mesh": mesh.name}


KINDS: dict[Kind, type[MeshKind]] = {
    Kind.RELAY: RelayKind,
    Kind.TRAINER: TrainerKind,
    Kind.GENERATOR: GeneratorKind,
    Kind.ROUTER: RouterKind,
    Kind.GATEWAY: GatewayKind,
    Kind.ROLLOUT: RolloutKind,
}
