"""Brings a run's parts up: processes, actors, models and engines, all at once.

    provisioner ──spawns──▶ trainer mesh · generator meshes · router · gateway (if any) · rollout workers ──▶ System

`bring_up` returns only when every part has answered its `setup`; a part that fails is named.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from titan_rl.actors.generator import Generator, GeneratorMesh
from titan_rl.actors.rollout_worker import RolloutWorker
from titan_rl.actors.rollouts import Rollouts
from titan_rl.actors.router import GeneratorRouter
from titan_rl.actors.router_client import Router
from titan_rl.actors.trainer import PolicyTrainer, Trainer
from titan_rl.config import RunConfig
from titan_rl.controller.system import System
from titan_rl.gateway.config import GatewayConfig
from titan_rl.launch.gateway import set_up_gateway, spawn_gateway
from titan_rl.launch.placement import Placement
from titan_rl.launch.provisioner import Provisioner
from titan_rl.weights.transports.segment_files import sweep_dead_segments


async def bring_up(
    config: RunConfig,
    placement: Placement,
    provisioner: Provisioner,
    *,
    model_path: Path,
    imports: tuple[str, ...] = (),
    on_mesh: Callable[[str, str], None] = lambda mesh, doing: None,
) -> System:
    """Spawn every mesh of the placement and set all of them up at once.

    Args:
        model_path: Hugging Face directory that trainer and generators load.
        imports: the user's modules.
        on_mesh: told what each mesh is doing.

    Raises:
        TitanError: a part did not come up; the caller must stop the provisioner.
    """
    sweep_dead_segments()
    plans = {plan.name: plan for plan in placement.meshes}
    start_seconds, step_seconds = config.placement.start_seconds, config.placement.step_seconds
    meshes = {}
    for name, plan in plans.items():
        on_mesh(name, "starting processes")
        meshes[name] = provisioner.spawn(plan)

    trainer_mesh = meshes["trainer"].spawn(
        "trainer",
        PolicyTrainer,
        config.trainer_settings(),
        config.weights,
        model_path=str(model_path),
        served_dtype=config.generator.dtype,
        temperature=config.rollout.sampling.temperature,
        total_steps=config.loop.steps,
        device=placement.device,
        seed=config.seed,
        owner_pid=os.getpid(),
    )
    names = [name for name in plans if name.startswith("generator")]
    generators = {
        name: GeneratorMesh(
            meshes[name].spawn(
                name, Generator, name, config.generator_settings(), model_path=str(model_path), device=placement.device
            ),
            name,
            ranks=config.generator.tensor_parallel,
        )
        for name in names
    }
    rank0 = {name: generator.rank0 for name, generator in generators.items()}
    router_actor = meshes["router"].spawn("router", GeneratorRouter, config.router, rank0).slice(ranks=0)
    gateway = None
    if "gateway" in meshes:
        agents = config.rollout.agents
        gateway_config = GatewayConfig(host=agents.host, port=agents.port, sessions=True)
        gateway = spawn_gateway(meshes["gateway"], gateway_config, config, router_actor, model_path=model_path)
    worker_mesh = meshes["rollout"].spawn(
        "rollout",
        RolloutWorker,
        config,
        model_path=str(model_path),
        imports=imports,
        owner_pid=os.getpid(),
    )

    system = System(
        config=config,
        model_path=model_path,
        trainer=Trainer(trainer_mesh, config.trainer, start_seconds=start_seconds, step_seconds=step_seconds),
        router=Router(router_actor, seconds=step_seconds),
        rollouts=Rollouts(
            worker_mesh, workers=config.rollout.workers, start_seconds=start_seconds, step_seconds=step_seconds
        ),
        generators=generators,
        gateway=gateway,
    )

    async def ready(mesh: str, doing: str, setup: Coroutine[Any, Any, Any]) -> Any:
        on_mesh(mesh, doing)
        result = await setup
        on_mesh(mesh, "ready")
        return result

    async def generator_setup(name: str) -> None:
        system.pids[name] = await generators[name].setup(seconds=start_seconds)

    async def gateway_setup(handle: Any) -> None:
        pid, _ = await set_up_gateway(handle, seconds=start_seconds)
        system.pids["gateway"] = [pid]

    await asyncio.gather(
        ready("trainer", "building the policy", system.trainer.setup()),
        ready("rollout", "starting the environment process", system.rollouts.setup(router_actor, gateway)),
        *(ready(name, "building the engine", generator_setup(name)) for name in names),
        *(ready("gateway", "listening", gateway_setup(handle)) for handle in [gateway] if handle is not None),
    )
    if placement.sample_transport == "rdma":
        await system.trainer.attach_stores(system.rollouts.stores)
    system.pids["trainer"] = system.trainer.pids
    system.pids["rollout"] = system.rollouts.pids
    on_mesh("router", "ready")
    return system
