"""A gateway, or generators, that die under the programs of a rollout worker, and what takes their place (15 s)."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from scripted_router import ScriptedRouter
from support.meshes import mesh_plan
from support.rollouts import TASKS

from titan_rl.actors.gateway import Gateway, GatewayClient
from titan_rl.actors.rollout_worker import RolloutWorker
from titan_rl.actors.rollouts import RolloutWorkers
from titan_rl.config import RunConfig
from titan_rl.errors import ActorGone, ConfigError, GatewayGone, RequestLost
from titan_rl.gateway.config import GatewayConfig
from titan_rl.policy.config import TinyPolicyConfig
from titan_rl.policy.models.tiny import make_tiny_policy
from titan_rl.rollout.config import EnvironmentConfig
from titan_rl.rpc.connection import bounded
from titan_rl.supervision.provisioner import Provisioner
from titan_rl.types import GroupRequest, PolicyVersion, Purpose, SamplingParams

SECONDS = 120.0
PROGRAMS = 2

pytestmark = pytest.mark.asyncio(loop_scope="module")


def group(group_id: int, *, attempt: int = 0) -> GroupRequest:
    return GroupRequest(
        group_id=group_id,
        purpose=Purpose.TRAIN,
        samples=PROGRAMS,
        sampling=SamplingParams(max_new_tokens=8),
        min_version=PolicyVersion(0, 0),
        attempt=attempt,
    )


class Parts:
    """A router and a gateway; `worker` makes a worker that asks them."""

    def __init__(self, provisioner: Provisioner, model_path: Path) -> None:
        self.provisioner = provisioner
        self._model_path = str(model_path)
        self.router = self._spawn("router", ScriptedRouter)

    def gateway(self, config: GatewayConfig) -> Any:
        return self._spawn("gateway", Gateway, RunConfig(), config, model_path=self._model_path)

    async def end(self, gateway: GatewayClient, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        gateway.lose("it was killed")
        await self.provisioner.stop("gateway")

    async def worker(self, gateway: GatewayClient) -> RolloutWorkers:
        config = RunConfig(environment=EnvironmentConfig(name=f"{TASKS / 'careless.py'}:Careless"))
        rollouts = RolloutWorkers(config)
        settings = {"mesh": "rollout0", "model_path": self._model_path}
        rollouts.workers[0].replace([self._spawn("rollout", RolloutWorker, config, **settings)])
        await rollouts.workers[0].setup(router=self.router, gateway=gateway.actor)
        return rollouts

    async def route(self, endpoint: str, *args: Any) -> None:
        await bounded(getattr(self.router, endpoint).call_one(*args), what=endpoint, seconds=SECONDS)

    def _spawn(self, name: str, actor: type[Any], *args: Any, **settings: Any) -> Any:
        return self.provisioner.spawn(mesh_plan(name, beside=__file__)).spawn(name, actor, *args, **settings)[0]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def parts(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Parts]:
    provisioner = Provisioner(log_directory="", imports=(), on_fault=lambda fault: None)
    try:
        yield Parts(provisioner, make_tiny_policy(TinyPolicyConfig(), tmp_path_factory.mktemp("tiny")))
    finally:
        await provisioner.stop_all()


async def test_rollouts_under_which_a_part_died_are_lost_whatever_their_programs_made_of_it(parts: Parts) -> None:
    config = GatewayConfig(port=0, rollout_keys=True)
    gateway = GatewayClient(start_seconds=SECONDS)
    gateway.replace([parts.gateway(config)])
    (pid,) = await gateway.setup(router=parts.router)
    url = gateway.url
    rollouts = await parts.worker(gateway)
    await parts.route("hold")
    play = asyncio.create_task(rollouts.run_group(group(1)))
    await parts.route("wait_for_requests", PROGRAMS)

    await parts.end(gateway, pid)
    early = asyncio.create_task(rollouts.run_group(group(2)))
    await rollouts.held()  # the worker has begun it
    gateway.replace([parts.gateway(config)])
    await gateway.setup(router=parts.router)
    assert gateway.url == url
    await rollouts.workers[0].set_peers(router=parts.router, gateway=gateway.actor)
    with pytest.raises(GatewayGone):
        await play

    await parts.route("wait_for_requests", 2 * PROGRAMS)  # those of the killed one are still there
    await parts.route("fail", RequestLost("2 generators died under it"))
    with pytest.raises(ActorGone, match="was lost: 2 generators died under it"):
        await early

    await parts.route("let_go")
    for attempted in (group(1, attempt=1), group(2, attempt=1)):
        report = await rollouts.run_group(attempted)
        assert report.first_error == "" and report.samples.trained_tokens == 8 * PROGRAMS
        await rollouts.release(report.samples)
    await rollouts.workers[0].close()


@pytest.mark.parametrize("rollout_keys", [True, False])
async def test_where_its_port_was_taken_a_gateway_of_rollouts_takes_another_one(
    parts: Parts, rollout_keys: bool
) -> None:
    config = GatewayConfig(port=0, rollout_keys=rollout_keys)
    await parts.provisioner.stop("gateway")
    gateway = GatewayClient(start_seconds=SECONDS)
    gateway.replace([parts.gateway(config)])
    (pid,) = await gateway.setup(router=parts.router)
    url = gateway.url
    await parts.end(gateway, pid)
    with socket.create_server(("127.0.0.1", urlsplit(url).port or 0)):
        gateway.replace([parts.gateway(config)])
        if rollout_keys:
            await gateway.setup(router=parts.router)
            assert gateway.url != url
        else:
            with pytest.raises(ConfigError, match="Address already in use"):
                await gateway.setup(router=parts.router)
    if not rollout_keys:
        await gateway.setup(router=parts.router)
        assert gateway.url == url
