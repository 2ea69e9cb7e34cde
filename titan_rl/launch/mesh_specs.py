"""Every kind of mesh, described once: what runs in its processes, with which arguments, and how it is set up."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from titan_rl.actors.gateway import Gateway, GatewayMesh
from titan_rl.actors.generator import Generator, GeneratorMesh
from titan_rl.actors.relay import RelayMesh, WeightRelay
from titan_rl.actors.rollout_worker import RolloutWorker
from titan_rl.actors.router import GeneratorRouter
from titan_rl.actors.router_client import RouterClient
from titan_rl.actors.trainer import PolicyTrainer
from titan_rl.actors.trainer_client import Trainer
from titan_rl.controller.faults import kind_of
from titan_rl.errors import ConfigError, MeshFailed
from titan_rl.launch.fleet import first_kind_serving
from titan_rl.launch.placement import MeshPlan
from titan_rl.observability.timeline import Pulse

if TYPE_CHECKING:
    from titan_rl.launch.meshes import Meshes


class MeshClient(Protocol):
    """What the owner of a mesh needs of its client. The client outlives the mesh's processes."""

    def lose(self, reason: str) -> None:
        """The actors are gone: open calls fail, and so do later ones until `replace`."""
        ...

    def replace(self, actors: Any) -> None:
        """From now on these actors are called, or this one (see `MeshSpec.client`)."""
        ...

    async def pulse(self) -> list[Pulse]:
        """Of each rank."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSpec:
    """The description of one mesh."""

    plan: MeshPlan
    """Its processes."""
    actor: type[Any]
    """The actor that runs in each process."""
    arguments: Callable[[], dict[str, Any]]
    """Makes the arguments of the actor's constructor, with the current handles of other meshes."""
    client: Callable[[Any], Any]
    """Makes the client, a `MeshClient`, from the handle of each rank's actor; of a mesh that does not compute, from the
    handle of its only one."""
    setup: Callable[[Any], Awaitable[list[int]]]
    """Sets the mesh up through its client; returns its process ids."""
    doing: str
    """What the mesh does during `setup`, for the display."""
    end: Callable[[Any], Coroutine[Any, Any, None]] | None = None
    """Stays open; raises if the actor fails while its processes live."""


def describe(plan: MeshPlan, meshes: Meshes) -> MeshSpec:
    """The description of the mesh with this plan, among these meshes."""
    config, device, name = meshes.config, meshes.placement.device, plan.name
    model_path = str(meshes.model_path)
    start_seconds, step_seconds = config.placement.start_seconds, config.placement.step_seconds

    match kind_of(name):
        case "trainer":
            if len(set(plan.hosts)) > 1 and config.placement.untrusted():
                raise ConfigError(
                    "torch's connections between the hosts of a trainer are not encrypted: keep it on one host "
                    "(placement.trainer), or add --trusted-network"
                )
            return MeshSpec(
                plan=plan,
                actor=PolicyTrainer,
                arguments=lambda: {
                    "config": config.trainer_settings(),
                    "weights": config.weights_settings(),
                    "model_path": model_path,
                    "served_dtype": config.generator.dtype,
                    "temperature": config.rollout.sampling.temperature,
                    "total_steps": config.loop.steps,
                    "device": device,
                    "seed": config.seed,
                    "copies": config.checkpoint.in_memory,
                    "hosts": plan.hosts,
                },
                client=lambda actors: Trainer(
                    actors,
                    config.trainer,
                    start_seconds=start_seconds,
                    step_seconds=step_seconds,
                    host_seconds=config.placement.host_seconds if config.placement.several_hosts else 0.0,
                    on_hung=lambda reason: meshes.faults.report(MeshFailed(reason, name)),
                    say=meshes.say,
                ),
                setup=lambda trainer: trainer.setup(),
                doing="building the policy",
            )
        case "generator":
            return MeshSpec(
                plan=plan,
                actor=Generator,
                arguments=lambda: {
                    "mesh": name,
                    "config": config.generator_settings(name),
                    "model_path": model_path,
                    "device": device,
                    "relay": meshes.introductions.relay_on(plan.hosts[0]),
                },
                client=lambda actors: GeneratorMesh(actors, name),
                setup=lambda generator: generator.setup(seconds=start_seconds),
                doing="building the engine",
            )
        case "relay":
            return MeshSpec(
                plan=plan,
                actor=WeightRelay,
                arguments=lambda: {"host": plan.hosts[0]},
                client=lambda actor: RelayMesh(actor, plan.hosts[0]),
                setup=lambda relay: relay.setup(meshes.introductions.relays, seconds=start_seconds),
                doing="starting",
            )
        case "router":
            return MeshSpec(
                plan=plan,
                actor=GeneratorRouter,
                arguments=lambda: {
                    "config": config.router_settings(),
                    "generators": {name: generator.rank0 for name, generator in meshes.generators.items()},
                    "serving": first_kind_serving(meshes),
                    "awaited": meshes.awaited,
                    "others": config.other_generators(),
                },
                client=lambda actor: RouterClient(actor, seconds=start_seconds, who="controller", owned=True),
                setup=lambda router: router.setup(),
                doing="starting",
            )
        case "gateway":
            return MeshSpec(
                plan=plan,
                actor=Gateway,
                arguments=lambda: {
                    "config": meshes.gateway_config,
                    "model_path": model_path,
                    "renderer": config.rollout.renderer,
                    "renderer_kwargs": config.rollout.renderer_kwargs,
                    "max_model_len": config.generator.max_model_len,
                    "run_seed": config.seed,
                },
                client=GatewayMesh,
                setup=lambda gateway: gateway.setup(meshes.router.actor, seconds=start_seconds),
                doing="listening",
                end=lambda gateway: gateway.end(),
            )
        case _:
            worker = meshes.rollouts.workers[int(name.removeprefix("rollout"))]

            def client(actor: Any) -> Any:
                worker.replace(actor)
                return worker

            return MeshSpec(
                plan=plan,
                actor=RolloutWorker,
                arguments=lambda: {
                    "config": config,
                    "mesh": name,
                    "model_path": model_path,
                    "imports": meshes.imports,
                },
                client=client,
                setup=lambda worker: worker.setup(meshes.router.actor, meshes.gateway and meshes.gateway.actor),
                doing="starting the environment process",
            )
