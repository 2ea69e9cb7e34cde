"""A generator on another host than the trainer pulls through its host's relay (10 s)."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from relay_hosts import SECONDS, TRAINER, RelayHosts
from spied_relay import SpiedRelay

from titan_rl.actors.generator import Generator, GeneratorMesh
from titan_rl.actors.router_client import RouterClient
from titan_rl.errors import WeightsError
from titan_rl.generation.config import GeneratorConfig
from titan_rl.processes import OWNER
from titan_rl.types import GenerationRequest, PolicyVersion, SamplingParams
from titan_rl.weights.manifest import Publication, PullReport

pytestmark = pytest.mark.asyncio(loop_scope="module")


class FarGenerator(Generator):
    def __init__(self, owner: int, *args: Any, **options: Any) -> None:
        os.environ[OWNER] = str(owner)
        super().__init__(*args, **options)


class Far:
    """The generator, which needs no model, and its host's relay."""

    def __init__(self, hosts: RelayHosts, model: Path) -> None:
        self.hosts = hosts
        config = GeneratorConfig(count=1, engine="simulated", max_model_len=64)
        (model / "config.json").write_text('{"vocab_size": 13}')
        mesh = hosts.spawn(
            "far",
            "generator",
            FarGenerator,
            "generator",
            config,
            model_path=str(model),
            device="cpu",
            relay=hosts.relays["far"].actor,
        )
        self.mesh = GeneratorMesh(mesh, "generator")
        self.client = RouterClient(self.mesh.rank0, seconds=SECONDS, name="generator")

    async def pull(self, publication: Publication) -> PullReport:
        report: PullReport = await self.mesh.ranks[0].call(SECONDS, Generator.pull_model_state_dict, publication)
        return report

    async def serves(self) -> int:
        """The step of the version that a request is served with."""
        request = GenerationRequest(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=np.array([2, 3], np.int32),
            sampling=SamplingParams(max_new_tokens=4),
            seed=1,
        )
        return PolicyVersion.decode(int((await self.client.generate(request)).versions[-1])).step


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def far(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Far]:
    hosts = RelayHosts()
    try:
        await hosts.start(TRAINER, "far")
        far = Far(hosts, tmp_path_factory.mktemp("model"))
        await far.mesh.setup(seconds=SECONDS)
        yield far
        await far.client.disconnect()
    finally:
        await hosts.stop()


async def test_its_engine_goes_on_while_the_weights_come(far: Far) -> None:
    assert (await far.pull(far.hosts.publish(1))).version.step == await far.serves() == 1
    await far.hosts.call(TRAINER, SpiedRelay.hold, 3)
    pull = asyncio.create_task(far.pull(far.hosts.publish(2)))
    await far.hosts.call(TRAINER, SpiedRelay.holds)
    assert await far.serves() == 1
    await far.hosts.call(TRAINER, SpiedRelay.release)
    assert (await pull).version.step == await far.serves() == 2


async def test_what_it_refuses_comes_again(far: Far) -> None:
    publication = far.hosts.publish(3)
    await far.hosts.bring("far", publication)
    far.hosts.damage("far", publication)
    with pytest.raises(WeightsError, match="t is not what was published"):
        await far.pull(publication)
    assert (await far.pull(publication)).version.step == await far.serves() == 3


async def test_a_pull_goes_on_with_the_relay_that_takes_the_place_of_a_dead_one(far: Far) -> None:
    publication = far.hosts.publish(4)
    await far.hosts.call(TRAINER, SpiedRelay.hold, 3)
    pull = asyncio.create_task(far.pull(publication))
    await far.hosts.call(TRAINER, SpiedRelay.holds)
    os.kill(far.hosts.pids["far"], signal.SIGKILL)
    far.hosts.relays["far"].lose("it was killed")
    await far.hosts.call(TRAINER, SpiedRelay.release)
    await far.hosts.replace("far")
    await far.mesh.ranks[0].call(SECONDS, Generator.use_relay, far.hosts.relays["far"].actor)
    assert (await pull).version.step == await far.serves() == 4
