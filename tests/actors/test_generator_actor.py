"""Real generator meshes: their event loops stay free, they sleep and wake, and a follower that fails or is killed
ends its generator at once. About 25 s: it starts nine processes, two of them with vLLM.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import faulty_engines
import numpy as np
import pytest
import pytest_asyncio
import torch
from router_fleet import streamed

from titan_rl.actors.generator import Generator, GeneratorClient
from titan_rl.actors.router_client import RouterClient
from titan_rl.config import RunConfig
from titan_rl.errors import ActorFailed, GeneratorFailed, GeneratorNotServing, WeightsError
from titan_rl.generation.config import GeneratorConfig
from titan_rl.hosts.facts import detect_host
from titan_rl.policy.config import PolicyConfig, TinyPolicyConfig
from titan_rl.policy.models.tiny import make_tiny_policy
from titan_rl.supervision.fork_server import Stage
from titan_rl.supervision.placement import Kind, plan
from titan_rl.supervision.provisioner import Provisioner
from titan_rl.types import Completion, FinishReason, GenerationRequest, Piece, PolicyVersion, SamplingParams
from titan_rl.weights.manifest import Publication
from titan_rl.weights.publisher import SharedMemoryPublisher
from titan_rl.weights.tensor_files import shards_of_files

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = np.array([2, 3, 4, 5, 12], np.int32)
BOUND = 60.0
"""Seconds for any one call; the collectives of a generator time out after ten minutes."""
START = 240.0
UNREPLACED = 0.2
"""Seconds that a client waits for a replacement, which never comes here."""
LONG = 2000
"""New tokens of a request that is to be stopped: at 50 ms each it is far from its end whenever that comes."""
ENGINES = {"slow": 1, "idle": 2, "falling": 2, "leading": 2, "patient": 2}
"""Functions of faulty_engines, without `_engine`, and their ranks: one generator each."""


def request(*, new: int = 8, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id=uuid.uuid4().hex,
        prompt_token_ids=PROMPT,
        sampling=SamplingParams(max_new_tokens=new, **sampling),
        seed=5,
    )


class One:
    """One generator and a client of its rank 0."""

    def __init__(self, name: str, mesh: Any, ranks: int) -> None:
        self.name = name
        self.mesh = GeneratorClient(name, mesh, start_seconds=START)
        self.client = RouterClient(self.mesh.actor, seconds=UNREPLACED, name=name)
        self.pids: list[int] = []

    async def call(self, endpoint: Any, *args: Any) -> Any:
        return await self.mesh.ranks[0].call(BOUND, endpoint, *args)

    async def begin(self) -> asyncio.Task[Completion]:
        """A long request of which a token is sampled by now."""
        stream = streamed(self.client, request(new=LONG))
        await asyncio.wait_for(anext(stream), BOUND)

        async def completion() -> Completion:
            *_, last = [each async for each in stream]
            assert isinstance(last, Completion)
            return last

        return asyncio.create_task(completion())


class Fleet:
    def __init__(self, generators: dict[str, One], publications: list[Publication]) -> None:
        self.generators = generators
        self.publications = publications
        self._faults: asyncio.Queue[str] = asyncio.Queue()
        self._heard: list[str] = []
        self._event_loop = asyncio.get_running_loop()

    def on_fault(self, fault: ActorFailed) -> None:
        """From Monarch's thread."""
        self._event_loop.call_soon_threadsafe(self._faults.put_nowait, str(fault))

    async def ends(self, one: One) -> None:
        """Wait until every process of this generator has ended by itself."""
        expected = {f"{one.name} rank {rank}" for rank in range(len(one.pids))}
        while not all(any(rank in fault for fault in self._heard) for rank in expected):
            self._heard.append(await asyncio.wait_for(self._faults.get(), BOUND))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """Every generator serves the first of two publications."""
    scratch = tmp_path_factory.mktemp("generators")
    policy = TinyPolicyConfig(max_length=2 * LONG)
    model = make_tiny_policy(policy, scratch)
    publisher = SharedMemoryPublisher(channel="policy", rank=0, group=None, max_live=2, directory=scratch)
    shards = list(shards_of_files(model))
    publications = [
        publisher.publish(
            PolicyVersion(0, step),
            shards,
            dtype=torch.float32,
            aliases=(("lm_head.weight", "model.embed_tokens.weight"),),
        )
        for step in range(2)
    ]
    generators: dict[str, One] = {}
    fleet = Fleet(generators, publications)
    configs = {
        name: GeneratorConfig(
            count=1,
            tensor_parallel=ranks,
            max_num_seqs=1 if name == "slow" else 16,
            max_model_len=2 * LONG,
            kv_cache_bytes=64 << 20,
            engine=f"{Path(faulty_engines.__file__)}:{name}_engine",
        )
        for name, ranks in ENGINES.items()
    }
    places = {
        name: plan(RunConfig(policy=PolicyConfig(tiny=policy), generator=config), detect_host()).meshes["generator0"]
        for name, config in configs.items()
    }
    # nine processes with torch, two of them with vLLM, from one that has imported both
    imports = ("titan_rl.generation.vllm.engine", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.qwen3")
    stage = Stage(name="vLLM", kinds=tuple(Kind), environment=places["patient"].env[0], imports=imports)
    provisioner = Provisioner(log_directory=str(scratch), imports=(), on_fault=fleet.on_fault, stage=lambda host: stage)
    try:
        for name, config in configs.items():
            mesh = provisioner.spawn(dataclasses.replace(places[name], name=name))
            actor = mesh.spawn(name, Generator, name, config, model_path=str(model), device="cpu")
            generators[name] = One(name, actor, ENGINES[name])

        async def start(one: One) -> None:
            one.pids = await one.mesh.setup()
            await one.call(Generator.pull_model_state_dict, publications[0])

        await asyncio.gather(*(start(one) for one in generators.values()))
        yield fleet
        for one in generators.values():
            await one.client.disconnect()
    finally:
        publisher.close()
        await provisioner.stop_all()


async def test_a_stream_gets_its_tokens_while_more_are_sampled_and_frees_its_slot_when_it_is_closed(
    fleet: Fleet,
) -> None:
    slow = fleet.generators["slow"]
    whole = await slow.client.generate(request(new=8))
    stream = streamed(slow.client, request(new=LONG))
    tokens: list[int] = []
    while len(tokens) < 8:
        piece = await asyncio.wait_for(anext(stream), BOUND)
        assert isinstance(piece, Piece) and piece.offset == len(tokens)
        tokens += piece.token_ids.tolist()
    assert tokens[:8] == whole.token_ids.tolist() and whole.finish_reason is FinishReason.LENGTH
    await stream.aclose()
    await asyncio.wait_for(slow.client.generate(request(new=1)), BOUND)  # the slot is the only one


async def test_a_sleeping_generator_wakes_only_with_weights(fleet: Fleet) -> None:
    patient = fleet.generators["patient"]
    flying = await patient.begin()
    assert await patient.call(Generator.sleep) == 0, "vLLM frees nothing on CPU, and says so"
    assert (await flying).finish_reason is FinishReason.ABORT
    with pytest.raises(GeneratorNotServing, match="patient: asleep: wake it up with a publication first"):
        await patient.client.generate(request())
    with pytest.raises(GeneratorNotServing, match="asleep"):
        await patient.call(Generator.pull_model_state_dict, fleet.publications[1])
    gone = dataclasses.replace(fleet.publications[1], location="/dev/shm/nothing")
    with pytest.raises(WeightsError, match="v1 cannot be served: .* is gone"):
        await patient.call(Generator.wake_up, gone)
    with pytest.raises(GeneratorNotServing, match="patient: stale: .* is gone"):
        await patient.client.generate(request())
    assert await patient.call(Generator.wake_up, fleet.publications[1]) == PolicyVersion(0, 1)
    assert set((await patient.client.generate(request())).versions.tolist()) == {1}


async def test_a_follower_that_raises_fails_what_is_open_and_what_comes_later(fleet: Fleet) -> None:
    falling = fleet.generators["falling"]
    calls = [falling.client.generate(request(new=50)) for _ in range(3)]
    cause = "falling rank 1 failed: ArithmeticError: the GPU fell off the bus"
    for error in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(error, GeneratorFailed) and cause in str(error), repr(error)
    with pytest.raises((GeneratorFailed, ActorFailed), match=f"{cause}|gone"):
        await falling.call(Generator.pull_model_state_dict, fleet.publications[1])
    await fleet.ends(falling)


async def test_when_rank_0_raises_its_callers_hear_why_and_every_process_ends(fleet: Fleet) -> None:
    one = fleet.generators["leading"]
    with pytest.raises(GeneratorFailed, match="leading rank 0 failed: ArithmeticError: the GPU fell off the bus"):
        await one.client.generate(request(new=50))
    await fleet.ends(one)
    with pytest.raises(ActorFailed, match="gone"):
        await one.client.generate(request())


async def test_a_killed_follower_fails_what_was_under_way(fleet: Fleet) -> None:
    patient = fleet.generators["patient"]
    calls = [await patient.begin() for _ in range(3)]
    os.kill(patient.pids[1], signal.SIGKILL)
    others = [(Generator.pull_model_state_dict, fleet.publications[1]), (Generator.sleep,)]
    for error in await asyncio.gather(*(patient.call(*each) for each in others), return_exceptions=True):
        assert isinstance(error, (GeneratorFailed, ActorFailed)), "calls of every kind fail: " + repr(error)
    for error in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(error, GeneratorFailed), repr(error)
        assert "patient rank 0 failed: RuntimeError" in str(error), "its collective broke"
    await fleet.ends(patient)


async def test_a_generator_whose_follower_is_killed_while_idle_ends_as_a_whole(fleet: Fleet) -> None:
    idle = fleet.generators["idle"]
    os.kill(idle.pids[1], signal.SIGKILL)
    await fleet.ends(idle)
