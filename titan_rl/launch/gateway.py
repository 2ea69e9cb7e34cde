"""The gateway of a served checkpoint or of a run: spawned, set up, waited for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from titan_rl.actors.connection import Connection
from titan_rl.actors.gateway import Gateway
from titan_rl.config import RunConfig
from titan_rl.errors import ActorFailed
from titan_rl.gateway.config import GatewayConfig


def spawn_gateway(mesh: Any, gateway: GatewayConfig, config: RunConfig, router: Any, *, model_path: Path) -> Any:
    """Handle of a `Gateway` actor in its mesh; nothing is waited for.

    Args:
        router: handle of the `GeneratorRouter`.
        model_path: directory with the tokenizer.
    """
    spawned = mesh.spawn(
        "gateway",
        Gateway,
        gateway,
        router,
        model_path=str(model_path),
        renderer=config.rollout.renderer,
        renderer_kwargs=config.rollout.renderer_kwargs,
        max_model_len=config.generator.max_model_len,
        run_seed=config.seed,
    )
    return spawned.slice(ranks=0)


async def set_up_gateway(gateway: Any, *, seconds: float) -> tuple[int, str]:
    """Let it listen. Returns its process id, and its URL without `/v1`."""
    return await Connection(gateway, what="gateway.{}").call(seconds, Gateway.setup)


async def gateway_ends(gateway: Any) -> None:
    """Wait for its end; raises ActorFailed when it ends by itself or its process is gone."""
    await Connection(gateway, what="gateway.{}").call(None, Gateway.serve)


async def report_end(gateway: Any, report: Callable[[ActorFailed], None]) -> None:
    """The same, told instead of raised."""
    try:
        await gateway_ends(gateway)
    except ActorFailed as fault:
        report(fault)
