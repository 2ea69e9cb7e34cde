"""A running system for the length of a `with` block: the door to everything for a script of one's own.

    async with start(config) as system:
        publication = await system.trainer.push_model_state_dict()
        ...

Whatever happens inside the block, afterwards no process, port or shared-memory file of the run is left.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from titan_rl.config import RunConfig
from titan_rl.controller.faults import FaultBoard
from titan_rl.launch.placement import detect_host, plan
from titan_rl.launch.process import prepare_controller
from titan_rl.policy.models.tiny import make_tiny_policy

if TYPE_CHECKING:
    from titan_rl.controller.system import System


def model_directory(config: RunConfig) -> Path:
    """The checkpoint that trainer and generators load; a tiny policy is made if there is none yet."""
    tiny = config.policy.tiny
    if tiny is None:
        return Path(config.policy.path)
    return make_tiny_policy(tiny if tiny.seed is not None else dataclasses.replace(tiny, seed=config.seed))


@asynccontextmanager
async def start(
    config: RunConfig,
    *,
    imports: tuple[str, ...] = (),
    log_directory: Path | None = None,
    faults: FaultBoard | None = None,
    on_mesh: Callable[[str, str], None] = lambda mesh, doing: None,
    on_stop: Callable[[str], None] = lambda what: None,
) -> AsyncIterator[System]:
    """Bring up every mesh of the config on this host, and take all of them down at the end.

    Args:
        config: the run.
        imports: files or modules of the user, imported first in every process.
        log_directory: one log file per process goes here; None: processes print to the terminal.
        faults: told about processes that die, and of a gateway that ends by itself; ends the start at the first.
        on_mesh: told what each mesh is doing while it comes up.
        on_stop: told in words, from any thread, that a process was stopped (SIGSTOP) and is waited for, or goes on.

    Raises:
        ConfigError: the host cannot hold the placement.
        TitanError: a part did not come up.
    """
    prepare_controller()
    from titan_rl.controller.system import close
    from titan_rl.launch.bring_up import bring_up
    from titan_rl.launch.gateway import report_end
    from titan_rl.launch.provisioner import Provisioner

    board = faults if faults is not None else FaultBoard()
    placement = plan(config, detect_host())
    model_path = model_directory(config)
    provisioner = Provisioner(
        log_directory=str(log_directory) if log_directory is not None else "",
        imports=imports,
        on_fault=board.report,
        on_stop=on_stop,
    )
    system: System | None = None
    watching: asyncio.Future[None] | None = None
    try:
        system = await board.watch(
            bring_up(config, placement, provisioner, model_path=model_path, imports=imports, on_mesh=on_mesh)
        )
        if system.gateway is not None:
            watching = asyncio.ensure_future(report_end(system.gateway, board.report))
        yield system
    finally:
        if watching is not None:
            watching.cancel()
        await close(system, provisioner, board)
