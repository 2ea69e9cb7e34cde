"""A checkpoint's generators, their router and the gateway, for the length of a `with` block.

    checkpoint ─published as v0─▶ generators pull and verify ─▶ router serves ─▶ gateway listens

The way to the engines is the one that every version of a training run takes, so what answers is what the checkpoint
holds. Whatever happens inside the block, afterwards no process, port or shared-memory file is left.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from titan_rl.actors.connection import Connection
from titan_rl.actors.gateway import Gateway
from titan_rl.actors.generator import Generator, GeneratorMesh
from titan_rl.actors.router import GeneratorRouter
from titan_rl.actors.router_client import Router
from titan_rl.config import RunConfig
from titan_rl.controller.faults import FaultBoard
from titan_rl.controller.system import close_parts
from titan_rl.errors import ActorFailed, MeshFailed
from titan_rl.gateway.config import GatewayConfig
from titan_rl.launch.gateway import gateway_ends, set_up_gateway, spawn_gateway
from titan_rl.launch.placement import detect_host, plan
from titan_rl.launch.provisioner import Provisioner
from titan_rl.launch.session import model_directory
from titan_rl.weights.transports.segment_files import remove_segments_of, sweep_dead_segments


@dataclass(slots=True)
class Serving:
    """What is up."""

    url: str
    """Of the gateway, without `/v1`."""
    router: Router
    gateway: Any
    """Handle of the `Gateway` actor."""
    faults: FaultBoard
    """Hears of the end of what the service cannot do without: the router, the gateway."""
    pids: dict[str, list[int]] = field(default_factory=dict)
    """Process ids of the generators' ranks."""

    async def run(self) -> None:
        """Wait for the gateway's end; raises ActorFailed when it ends by itself, or its process or the router's is
        gone."""
        await self.faults.watch(gateway_ends(self.gateway))


@asynccontextmanager
async def serve(
    config: RunConfig,
    gateway_config: GatewayConfig,
    *,
    imports: tuple[str, ...] = (),
    log_directory: Path | None = None,
    faults: FaultBoard | None = None,
    on_fault: Callable[[ActorFailed], None] = lambda fault: None,
    on_mesh: Callable[[str, str], None] = lambda mesh, doing: None,
    on_stop: Callable[[str], None] = lambda what: None,
) -> AsyncIterator[Serving]:
    """Bring up everything that serves the config's policy on this host, and take it down at the end.

    Args:
        config: its policy, generators, router, renderer and placement are used.
        imports: files or modules of the user, imported first in every process.
        log_directory: one log file per process goes here; None: processes print to the terminal.
        faults: what is reported to it ends the start, and is raised by its next `watch`.
        on_fault: told about processes that die, from any thread. The router goes on without a generator.
        on_mesh: told what each mesh is doing while it comes up.
        on_stop: told in words, from any thread, that a process was stopped (SIGSTOP) and is waited for, or goes on.

    Raises:
        ConfigError: the host cannot hold the placement, or the address cannot be listened on.
        TitanError: a part did not come up.
    """
    sweep_dead_segments()
    placement = plan(config, detect_host(), serving=True)
    model_path = model_directory(config)
    board = faults if faults is not None else FaultBoard()
    loop = asyncio.get_running_loop()
    up: list[Serving] = []
    telling: set[asyncio.Task[None]] = set()

    def hear(fault: ActorFailed) -> None:
        on_fault(fault)
        if not loop.is_closed():
            loop.call_soon_threadsafe(act, fault)

    def act(fault: ActorFailed) -> None:
        if up and isinstance(fault, MeshFailed) and fault.mesh in up[0].pids:
            board.report(fault, ends=False)
            task = loop.create_task(up[0].router.generator_lost(fault.mesh, str(fault)))
            telling.add(task)
            task.add_done_callback(telling.discard)
        else:
            board.report(fault)

    provisioner = Provisioner(
        log_directory=str(log_directory) if log_directory is not None else "",
        imports=imports,
        on_fault=hear,
        on_stop=on_stop,
    )
    start_seconds, step_seconds = config.placement.start_seconds, config.placement.step_seconds
    polite: dict[str, Callable[[], Any]] = {}

    async def start() -> Serving:
        meshes = {}
        for mesh in placement.meshes:
            on_mesh(mesh.name, "starting processes")
            meshes[mesh.name] = provisioner.spawn(mesh)
        names = [name for name in meshes if name.startswith("generator")]
        settings = config.generator_settings()
        generators = {
            name: GeneratorMesh(
                meshes[name].spawn(
                    name, Generator, name, settings, model_path=str(model_path), device=placement.device
                ),
                name,
                ranks=config.generator.tensor_parallel,
            )
            for name in names
        }
        polite.update({name: generator.close for name, generator in generators.items()})
        # No version comes after the first, so an interrupted completion (its generator died) can start over and give
        # the same tokens; only then are penalties and min_tokens possible.
        router_config = replace(config.router, resume=False)
        rank0 = {name: generator.rank0 for name, generator in generators.items()}
        router_actor = meshes["router"].spawn("router", GeneratorRouter, router_config, rank0).slice(ranks=0)
        router = Router(router_actor, seconds=step_seconds)
        polite["router"] = router.close
        gateway = spawn_gateway(meshes["gateway"], gateway_config, config, router_actor, model_path=model_path)
        serving = Serving(url="", router=router, gateway=gateway, faults=board)

        async def generator_setup(name: str) -> None:
            on_mesh(name, "building the engine")
            serving.pids[name] = await generators[name].setup(seconds=start_seconds)
            on_mesh(name, "ready")

        published, *_ = await asyncio.gather(
            asyncio.to_thread(_publish, config, model_path), *map(generator_setup, names)
        )
        publisher, publication = published
        polite["publication"] = lambda: asyncio.to_thread(publisher.close)
        await router.pull_model_state_dict(publication)
        polite["gateway"] = lambda: Connection(gateway, what="gateway.{}").call(None, Gateway.close)
        _, serving.url = await set_up_gateway(gateway, seconds=start_seconds)
        on_mesh("gateway", "listening")
        return serving

    try:
        up.append(await board.watch(start()))
        yield up[0]
    finally:
        board.settle()
        if "gateway" in polite:  # first who takes calls, then who answers them
            await close_parts({"gateway": polite.pop("gateway")}, board)
        await close_parts(polite, board)
        await provisioner.stop_all()
        remove_segments_of(os.getpid())


def _publish(config: RunConfig, model_path: Path) -> tuple[Any, Any]:
    """The publisher, which holds the weights for whoever pulls later, and what it published."""
    import torch

    from titan_rl.weights.checkpoint import publish_checkpoint
    from titan_rl.weights.transports.shared_memory import SharedMemoryPublisher

    publisher = SharedMemoryPublisher(channel="policy", owner_pid=os.getpid(), rank=0, group=None, max_live=1)
    dtype = getattr(torch, config.generator.dtype)
    return publisher, publish_checkpoint(model_path, publisher, dtype=dtype)
