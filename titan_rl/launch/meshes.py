"""The meshes of a run or a service. Each is described once and is started and closed from its description.

    placement ─▶ MeshSpec: processes · actor · constructor arguments · client · set-up
                    │ spawn                 │ set_up                    │ close
                    ▼                       ▼                          ▼
                processes, actors ─▶ models, engines, servers ─▶ nothing is left

`Meshes` belongs to one event loop. `set_up` returns when every part has answered; an error names the part that failed.
`close` never raises. It leaves no process and no shared memory behind, whatever state the parts are in, and does not
wait for a part that has lost a process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_rl.actors.connection import bounded
from titan_rl.actors.gateway import Gateway, GatewayMesh
from titan_rl.actors.generator import Generator, GeneratorMesh
from titan_rl.actors.rollouts import Rollouts, RolloutWorker
from titan_rl.actors.router import GeneratorRouter
from titan_rl.actors.router_client import RouterClient
from titan_rl.actors.trainer import PolicyTrainer, Trainer
from titan_rl.config import RunConfig
from titan_rl.controller.faults import FaultBoard, kind_of
from titan_rl.errors import MeshFailed, TitanError
from titan_rl.gateway.config import GatewayConfig
from titan_rl.launch.placement import MeshPlan, detect_host, plan
from titan_rl.launch.provisioner import Provisioner
from titan_rl.launch.start import model_directory
from titan_rl.weights.segment_files import remove_segments_of, sweep_dead_segments

CLOSE_SECONDS = 5.0
"""Time limit for a mesh's own `close`, before its processes are stopped. All meshes are closed at once."""

_log = logging.getLogger(__name__)


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
    """Makes the client from the handle of all actors."""
    setup: Callable[[Any], Awaitable[list[int]]]
    """Sets the mesh up through its client; returns its process ids."""
    doing: str
    """What the mesh does during `setup`, for the display."""
    end: Callable[[Any], Awaitable[None]] | None = None
    """Stays open; raises if the actor fails while its processes live."""


class _AllWorkers:
    """The rollout workers as one mesh."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts

    async def setup(self, router: Any, gateway: Any) -> list[int]:
        pids = await asyncio.gather(*(worker.setup(router, gateway) for worker in self._rollouts.workers))
        return [pid for [pid] in pids]

    async def close(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self._rollouts.workers))


class Meshes:
    """The meshes of one placement: their descriptions, and the clients of the running ones."""

    def __init__(
        self,
        config: RunConfig,
        gateway: GatewayConfig,
        *,
        serving: bool = False,
        imports: tuple[str, ...] = (),
        log_directory: Path | None = None,
        faults: FaultBoard | None = None,
        on_mesh: Callable[[str, str], None] = lambda mesh, doing: None,
        say: Callable[[str], None] = lambda what: None,
    ) -> None:
        """
        Args:
            gateway: settings of the gateway, if the placement has one.
            serving: serve a checkpoint, without trainer and rollout workers.
            imports, log_directory, faults, on_mesh, say: see `start.Options`.

        Raises:
            ConfigError: this host cannot hold the placement.
        """
        self.placement = plan(config, detect_host(), serving=serving)
        self.model_path = model_directory(config)
        """Hugging Face directory that trainer and generators load."""
        self.faults = FaultBoard() if faults is None else faults
        """Told of every process that ends and every actor that fails by itself."""
        self.clients: dict[str, Any] = {}
        """By mesh: the clients of all meshes that were spawned and are not lost."""
        self.generators: dict[str, GeneratorMesh] = {}
        self.pids: dict[str, list[int]] = {}
        self._config = config
        self._gateway_config = gateway
        self._imports = imports
        self._on_mesh = on_mesh
        self._say = say
        self._provisioner = Provisioner(
            log_directory=str(log_directory) if log_directory is not None else "",
            imports=imports,
            on_fault=self.faults.report,
            on_stop=say,
        )
        self._rollouts = Rollouts(
            workers=config.rollout.workers,
            start_seconds=config.placement.start_seconds,
            step_seconds=config.placement.step_seconds,
        )
        self._up: dict[str, None] = {}  # meshes whose set-up has begun
        self._watching: set[asyncio.Future[None]] = set()
        self._stopping: list[asyncio.Future[None]] = []
        self._specs = {plan.name: self._describe(plan) for plan in self.placement.meshes}

    def _describe(self, plan: MeshPlan) -> MeshSpec:
        config, device, name = self._config, self.placement.device, plan.name
        model_path, owner_pid = str(self.model_path), os.getpid()
        start_seconds, step_seconds = config.placement.start_seconds, config.placement.step_seconds
        match kind_of(name):
            case "trainer":
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
                        "owner_pid": owner_pid,
                    },
                    client=lambda actor: Trainer(
                        actor, config.trainer, start_seconds=start_seconds, step_seconds=step_seconds
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
                        "config": config.generator_settings(),
                        "model_path": model_path,
                        "device": device,
                    },
                    client=lambda actor: GeneratorMesh(actor, name, ranks=plan.ranks),
                    setup=lambda generator: generator.setup(seconds=start_seconds),
                    doing="building the engine",
                )
            case "router":
                return MeshSpec(
                    plan=plan,
                    actor=GeneratorRouter,
                    arguments=lambda: {
                        "config": config.router_settings(),
                        "generators": {name: generator.rank0 for name, generator in self.generators.items()},
                    },
                    client=lambda actor: RouterClient(actor.slice(ranks=0), seconds=step_seconds),
                    setup=lambda router: router.setup(),
                    doing="starting",
                )
            case "gateway":
                return MeshSpec(
                    plan=plan,
                    actor=Gateway,
                    arguments=lambda: {
                        "config": self._gateway_config,
                        "router": self.router.actor,
                        "model_path": model_path,
                        "renderer": config.rollout.renderer,
                        "renderer_kwargs": config.rollout.renderer_kwargs,
                        "max_model_len": config.generator.max_model_len,
                        "run_seed": config.seed,
                    },
                    client=lambda actor: GatewayMesh(actor.slice(ranks=0)),
                    setup=lambda gateway: gateway.setup(seconds=start_seconds),
                    doing="listening",
                    end=lambda gateway: gateway.end(),
                )
            case _:
                return MeshSpec(
                    plan=plan,
                    actor=RolloutWorker,
                    arguments=lambda: {
                        "config": config,
                        "model_path": model_path,
                        "imports": self._imports,
                        "owner_pid": owner_pid,
                    },
                    client=self._all_workers,
                    setup=lambda workers: workers.setup(self.router.actor, self.gateway and self.gateway.actor),
                    doing="starting the environment process",
                )

    @property
    def trainer(self) -> Trainer:
        return self.clients["trainer"]

    @property
    def router(self) -> RouterClient:
        return self.clients["router"]

    @property
    def rollouts(self) -> Rollouts:
        return self._rollouts

    @property
    def gateway(self) -> GatewayMesh | None:
        return self.clients.get("gateway")

    def _all_workers(self, actor: Any) -> _AllWorkers:
        for number, worker in enumerate(self._rollouts.workers):
            worker.replace(actor.slice(ranks=slice(number, number + 1)))
        return _AllWorkers(self._rollouts)

    # Up and down.

    @property
    def names(self) -> list[str]:
        """Names of all meshes in the order of their start: each uses handles of those before it."""
        return list(self._specs)

    def spawn(self) -> None:
        """Start the processes and actors of all meshes. Does not wait for them."""
        sweep_dead_segments()
        for name, spec in self._specs.items():
            self._on_mesh(name, "starting processes")
            actor = self._provisioner.spawn(spec.plan).spawn(name, spec.actor, **spec.arguments())
            self.clients[name] = spec.client(actor)
            if isinstance(self.clients[name], GeneratorMesh):
                self.generators[name] = self.clients[name]

    async def set_up(self, *names: str) -> None:
        """Set these meshes up concurrently. From then on `faults.POLICY` applies to them.

        Raises:
            TitanError: a part did not start.
        """
        await asyncio.gather(*(self._set_up(self._specs[name]) for name in names))

    async def close(self) -> None:
        """Close everything: first the gateway, which takes calls, then the other meshes, then every process."""
        self.faults.settle()
        for watch in self._watching:
            watch.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await asyncio.gather(*(self._close(name) for name in self._up if name == "gateway"))
        await asyncio.gather(*(self._close(name) for name in self._up if name != "gateway"))
        await asyncio.gather(*self._stopping)
        await self._provisioner.stop_all()
        remove_segments_of(os.getpid())

    async def _set_up(self, spec: MeshSpec) -> None:
        name = spec.plan.name
        self._on_mesh(name, spec.doing)
        self._up[name] = None
        client = self.clients[name]
        self.pids[name] = await spec.setup(client)
        self._on_mesh(name, "ready")
        self.faults.ready(name, self.go_on_without)
        if spec.end is not None:
            self._watch(spec.end(client))

    async def _close(self, name: str) -> None:
        started = time.monotonic()

        async def ask() -> None:
            await bounded(self.clients[name].close(), what=f"{name}.close", seconds=CLOSE_SECONDS)

        try:
            await self.faults.unless_lost(name, ask())
        except Exception as error:
            _log.warning("closing %s: %s", name, error)
        _log.info("closing %s took %.1f s", name, time.monotonic() - started)

    def go_on_without(self, fault: MeshFailed) -> None:
        """Go on without a lost generator while another one serves."""
        self._watch(self._go_on_without(fault))

    async def _go_on_without(self, fault: MeshFailed) -> None:
        """Tell the router that a generator is lost, and stop its remaining processes."""
        name = fault.mesh
        del self.generators[name], self.clients[name], self.pids[name], self._up[name]
        self._on_mesh(name, "lost")
        try:
            await self.router.generator_lost(name, str(fault))
            (heard,) = [status.last_error for status in await self.router.fleet_status() if status.name == name]
            why = "; ".join(dict.fromkeys((str(fault), heard)))  # the generator itself may have said why
            if self.generators:
                self._say(f"lost {name}, going on with {', '.join(self.generators)}: {why}")
        finally:
            self._stopping.append(asyncio.ensure_future(self._provisioner.stop(name)))

    def _watch(self, work: Awaitable[None]) -> None:
        """Run `work` beside everything else. If it raises, the run ends: nobody else would ever hear of it."""

        async def watched() -> None:
            try:
                await work
            except Exception as error:
                unknown = TitanError(f"{type(error).__name__}: {error}")
                self.faults.report(error if isinstance(error, TitanError) else unknown)

        task = asyncio.ensure_future(watched())
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)
