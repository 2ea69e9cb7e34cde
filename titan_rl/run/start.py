"""The one way up and down: the meshes of a config, for the length of a `with` block.

    async with start(config) as system:
        publication = await system.trainer.push_model_state_dict()
        ...

Whatever happens inside the block, no process, port or shared-memory file is left after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from titan_rl.config import RunConfig
from titan_rl.directories import CONTROL
from titan_rl.errors import ConfigError
from titan_rl.hosts.facts import transport
from titan_rl.run.checks import check_open_files
from titan_rl.supervision.process import prepare_controller
from titan_rl.supervision.run_end import Options

if TYPE_CHECKING:
    from titan_rl.hosts.host import AttachedHost
    from titan_rl.loop.system import System
    from titan_rl.supervision.supervisor import Supervisor
    from titan_rl.weights.manifest import Publication


Serving = Callable[[Path, Options], Coroutine[Any, Any, tuple[int, str]]]
"""Work in a directory of its own that serves weights. Returns the exit code, and how it ended, in words."""


@asynccontextmanager
async def start(config: RunConfig, **options: Unpack[Options]) -> AsyncIterator[System]:
    """`bring_up` for a script that trains."""
    async with bring_up(config, **options) as meshes:
        yield meshes.system()


@asynccontextmanager
async def bring_up(config: RunConfig, **options: Unpack[Options]) -> AsyncIterator[Supervisor]:
    """Start every mesh of the config on its hosts, and stop all of them at the end. That of a `ServeConfig` trains
    nothing, and serves the policy to any HTTP client:

        checkpoint ─published as v0─▶ generators pull and verify ─▶ router serves ─▶ gateway listens

    Raises ConfigError: the hosts cannot hold the placement, or one lacks something; or the gateway cannot listen there;
    TitanError: a part did not start."""
    prepare_controller()
    from titan_rl.hosts.elastic import HostControl, controlled
    from titan_rl.supervision.supervisor import Supervisor

    logs = options.get("log_directory")
    run_directory = logs and logs.parent

    async def check(host: AttachedHost) -> None:
        await host.require_same(config)
        placement = meshes.table.placement
        assert placement is not None
        trainer = placement.meshes.get("trainer")
        if run_directory and trainer is not None and host.name in trainer.hosts:
            await host.require_sees(run_directory)
        try:
            check_open_files(host.facts, placement.processes)
        except ConfigError as error:
            raise ConfigError(f"{host.label}: {error}") from error

    async def publish_and_serve() -> None:
        publishing = asyncio.to_thread(_publish, config, meshes.table.model_path)
        others = (name for name in meshes.meshes if name != "gateway")
        publication, _ = await asyncio.gather(publishing, meshes.set_up(*others))
        await meshes.router.pull_model_state_dict(publication)
        await meshes.set_up("gateway")

    meshes = Supervisor(config, **options)
    hosts = HostControl(meshes, check)
    try:
        if config.placement.several_hosts and transport() == "tls":
            meshes.say("connections between hosts are encrypted and mutually authenticated (TLS)")
        await meshes.run_end.watch(hosts.place())
        meshes.spawn()
        await meshes.run_end.watch(publish_and_serve() if config.serving else meshes.set_up(*meshes.meshes))
        watched = "run_end" in options  # otherwise calls would wait for ever for what is replaced no more
        async with (
            controlled(hosts, run_directory and run_directory / CONTROL, meshes.say),
            nullcontext() if watched else meshes.run_end.cancels(),
        ):
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
