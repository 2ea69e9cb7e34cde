"""A system that runs for the length of a `with` block: `start` for training, `serve` for a checkpoint behind HTTP.

    async with start(config) as system:
        publication = await system.trainer.push_model_state_dict()
        ...

Whatever happens inside the block, no process, port or shared-memory file is left after it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from titan_rl.config import RunConfig
from titan_rl.controller.faults import FaultBoard
from titan_rl.gateway.config import GatewayConfig
from titan_rl.launch.hosts.facts import transport
from titan_rl.launch.process import prepare_controller
from titan_rl.policy.config import TinyPolicyConfig
from titan_rl.policy.models.tiny import make_tiny_policy

if TYPE_CHECKING:
    from titan_rl.actors.router_client import RouterClient
    from titan_rl.controller.system import System
    from titan_rl.launch.meshes import Meshes
    from titan_rl.weights.manifest import Publication


def tiny_policy(config: RunConfig) -> TinyPolicyConfig | None:
    """The tiny policy of the config, if it is one, with its seed."""
    tiny = config.policy.tiny
    return tiny if tiny is None or tiny.seed is not None else dataclasses.replace(tiny, seed=config.seed)


def model_directory(config: RunConfig) -> Path:
    """The checkpoint that trainer and generators load. A tiny policy is made here if it does not exist yet."""
    tiny = tiny_policy(config)
    return Path(config.policy.path) if tiny is None else make_tiny_policy(tiny)


class Options(TypedDict, total=False):
    """Keyword arguments of `start` and `serve`."""

    imports: tuple[str, ...]
    """Files or modules of the user, imported first in every process."""
    log_directory: Path | None
    """One log file per process goes here; None, the default: processes print to the terminal."""
    faults: FaultBoard
    """Collects the death of every process. The first fault ends the start, and its next `watch` raises it. Without one,
    the first fault that ends a run ends the `with` block, and is raised there."""
    on_mesh: Callable[[str, str], None]
    """Called with a mesh's name and what it is doing, during the start and when it is lost; with "" when it is not to
    be there any more."""
    say: Callable[[str], None]
    """Called from any thread with a sentence when a process is stopped (SIGSTOP) or goes on, or when a mesh is lost or
    back."""


@asynccontextmanager
async def start(config: RunConfig, **options: Unpack[Options]) -> AsyncIterator[System]:
    """Start every mesh of the config on its hosts, and stop all of them at the end.

    Raises:
        ConfigError: the hosts cannot hold the placement, or one lacks something.
        TitanError: a part did not start.
    """

    async def bring_up(meshes: Meshes) -> None:
        await meshes.set_up(*meshes.names)
        await meshes.introductions.attach_stores()

    agents = config.rollout.agents
    gateway = GatewayConfig(host=agents.host, port=agents.port, rollout_keys=True)
    async with _running(config, gateway, bring_up, serving=False, **options) as meshes:
        from titan_rl.controller.system import System

        yield System(
            config=config,
            model_path=meshes.model_path,
            trainer=meshes.trainer,
            router=meshes.router,
            rollouts=meshes.rollouts,
            generators=meshes.generators,
            gateway=meshes.gateway,
            pids=meshes.pids,
        )


@dataclass(slots=True)
class Serving:
    """A service that is up."""

    url: str
    """Of the gateway, without `/v1`."""
    router: RouterClient
    gateway: Any
    """Handle of the `Gateway` actor."""
    pids: dict[str, list[int]]
    """Process ids by mesh."""
    faults: FaultBoard
    """Collects the faults that end the service."""

    async def run(self) -> None:
        """Wait until a fault or a signal ends the service, and raise it."""
        await self.faults.watch(asyncio.Event().wait())


@asynccontextmanager
async def serve(config: RunConfig, gateway: GatewayConfig, **options: Unpack[Options]) -> AsyncIterator[Serving]:
    """Start everything that serves the config's policy on this host, and stop it at the end.

        checkpoint ─published as v0─▶ generators pull and verify ─▶ router serves ─▶ gateway listens

    Args:
        config: only its policy, generators, router, renderer and placement are used.

    Raises:
        ConfigError: the host does not have the devices for the placement, or the gateway cannot listen on its address.
        TitanError: a part did not start.
    """
    # There is only one version, so a completion whose generator died can start over and gives the same tokens. Without
    # resuming, penalties and min_tokens can be allowed.
    config = dataclasses.replace(config, router=dataclasses.replace(config.router, resume=False))

    async def bring_up(meshes: Meshes) -> None:
        fleet = [name for name in meshes.names if name != "gateway"]
        publication, _ = await asyncio.gather(
            asyncio.to_thread(_publish, config, meshes.model_path), meshes.set_up(*fleet)
        )
        await meshes.router.pull_model_state_dict(publication)
        await meshes.set_up("gateway")

    async with _running(config, gateway, bring_up, serving=True, **options) as meshes:
        up = meshes.gateway
        assert up is not None
        yield Serving(url=up.url, router=meshes.router, gateway=up.actor, pids=meshes.pids, faults=meshes.faults)


@asynccontextmanager
async def _running(
    config: RunConfig,
    gateway: GatewayConfig,
    bring_up: Callable[[Meshes], Coroutine[Any, Any, None]],
    *,
    serving: bool,
    **options: Unpack[Options],
) -> AsyncIterator[Meshes]:
    """The meshes, spawned and brought up; closed at the end, however far they came."""
    prepare_controller()
    from titan_rl.launch.fleet import controlled
    from titan_rl.launch.meshes import Meshes

    meshes = Meshes(config, gateway, serving=serving, **options)
    try:
        if config.placement.several_hosts and transport() == "tls":
            meshes.say("connections between hosts are encrypted and mutually authenticated (TLS)")
        await meshes.faults.watch(meshes.place())
        meshes.spawn()
        await meshes.faults.watch(bring_up(meshes))
        logs = options.get("log_directory")
        watched = "faults" in options  # otherwise calls would wait for ever for what is replaced no more
        async with controlled(meshes, logs and logs.parent), nullcontext() if watched else meshes.faults.ends():
            yield meshes
    finally:
        await meshes.close()


def _publish(config: RunConfig, model_path: Path) -> Publication:
    """Publish the checkpoint's weights in shared memory of this process."""
    import torch

    from titan_rl.weights.publisher import SharedMemoryPublisher, publish_checkpoint

    publisher = SharedMemoryPublisher(channel="policy", rank=0, group=None, max_live=1)
    dtype = getattr(torch, config.generator.dtype)
    return publish_checkpoint(model_path, publisher, dtype=dtype)
