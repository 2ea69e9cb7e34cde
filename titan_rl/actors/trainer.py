"""`PolicyTrainer`: one rank of the trainer mesh, and `Trainer`, the handle that drives all ranks together.

Every call to the mesh carries a sequence number. A rank runs its calls one at a time, in the order of the numbers,
in one thread: however messages overtake each other, all ranks enter their collectives in the same order.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from monarch.actor import current_rank

from titan_rl.actors.calls import Endpoint, served
from titan_rl.actors.connection import ConnectedActor, Connection
from titan_rl.data_plane.fetch import SampleSources, SharedMemorySource
from titan_rl.data_plane.refs import RDMA, SHARED_MEMORY
from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.errors import TrainingError
from titan_rl.policy.config import TrainerConfig
from titan_rl.policy.packing import PackingPlan, plan_packing
from titan_rl.types import PolicyVersion
from titan_rl.weights.config import WeightsConfig
from titan_rl.weights.manifest import Publication

if TYPE_CHECKING:
    from titan_rl.policy.updater import PolicyUpdater
    from titan_rl.weights.transports.publisher import ChannelPublisher

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger(__name__)

CHANNEL = "policy"
"""On which the trained policy is published."""


class CallQueue:
    """Runs the calls of one rank in one thread, in the order of their numbers. Belongs to one event loop."""

    def __init__(self, *, rank: int) -> None:
        self._rank = rank
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._next = 0
        self._turns: dict[int, asyncio.Future[None]] = {}

    async def run(self, sequence: int, work: Callable[[], T]) -> T:
        """The result of `work`, which runs after all calls with a smaller number.

        Raises:
            TrainingError: the number was used before.
        """
        if sequence < self._next or sequence in self._turns:
            raise TrainingError(
                f"trainer rank {self._rank} got call {sequence} again (next is {self._next}); calls are numbered once"
            )
        loop = asyncio.get_running_loop()
        if sequence > self._next:
            self._turns[sequence] = loop.create_future()
            await self._turns[sequence]
            del self._turns[sequence]
        # Queued before the turn passes on: the one thread runs calls in the order of this line.
        running = loop.run_in_executor(self._thread, work)
        self._next += 1
        if (waiting := self._turns.get(self._next)) is not None:
            waiting.set_result(None)
        return await running


class PolicyTrainer(ConnectedActor):
    """One rank. Endpoints: `setup`, `attach_stores`, `warm_up_step`, `train_step`, `push_model_state_dict`, `release`,
    `freeze_reference`, `logprobs`, `save`, `close`."""

    def __init__(
        self,
        config: TrainerConfig,
        weights: WeightsConfig,
        *,
        model_path: str,
        served_dtype: str,
        temperature: float,
        total_steps: int,
        device: str,
        seed: int,
        owner_pid: int,
    ) -> None:
        """
        Args:
            served_dtype: dtype that generators compute with; weights are published in it.
            temperature: of the sampling whose logprobs are trained against.
            total_steps: length of the learning-rate schedule.
            owner_pid: process that names shared memory; its death lets others sweep it.
        """
        self._config = config
        self._weights = weights
        self._model_path = Path(model_path)
        self._served_dtype = served_dtype
        self._temperature = temperature
        self._total_steps = total_steps
        self._device = device
        self._seed = seed
        self._owner_pid = owner_pid
        self._rank = int(current_rank().rank)
        self._calls = CallQueue(rank=self._rank)
        self._updater: PolicyUpdater | None = None
        self._publisher: ChannelPublisher | None = None
        self._context = contextvars.Context()
        self._sources = SampleSources({SHARED_MEMORY: SharedMemorySource()})

    @served
    async def setup(self, sequence: int) -> int:
        """Build the model, load its weights, make the optimizer. Returns this process's id."""
        started = time.monotonic()
        self._context = contextvars.copy_context()  # this actor's: Monarch's memory transfers need it in the thread too
        pid = await self._run(sequence, self._build)
        _log.info("trainer rank %d is ready after %.1f s", self._rank, time.monotonic() - started)
        return pid

    @served
    async def attach_stores(self, sequence: int, stores: dict[str, Any]) -> None:
        """Samples whose location says so are fetched through Monarch from these workers, by the name of their store."""
        from titan_rl.actors.sample_stores import RemoteStore
        from titan_rl.data_plane.rdma import RdmaSource

        source = RdmaSource({name: RemoteStore(worker, name) for name, worker in stores.items()})
        await self._run(sequence, lambda: self._sources.add(RDMA, source))

    @served
    async def warm_up_step(self, sequence: int, batch: SampleBatch, plan: PackingPlan) -> dict[str, float]:
        """One supervised step on demonstrations; see `PolicyUpdater.warm_up_step`."""
        return await self._run(sequence, lambda: self._ready().warm_up_step(batch, plan))

    @served
    async def train_step(self, sequence: int, batch: SampleBatch, plan: PackingPlan) -> dict[str, float]:
        """One optimizer step on the batch; see `PolicyUpdater.train_step`."""
        metrics = await self._run(sequence, lambda: self._ready().train_step(batch, plan))
        _log.info("step %d: %s", self._ready().step, {name: round(value, 6) for name, value in metrics.items()})
        return metrics

    @served
    async def push_model_state_dict(self, sequence: int) -> Publication:
        """Publish the current weights; returns when they can be pulled."""
        return await self._run(sequence, self._publish)

    @served
    async def release(self, sequence: int, version: PolicyVersion) -> None:
        """Nobody needs this publication any more."""
        await self._run(sequence, lambda: self._ready_publisher().release(version))

    @served
    async def freeze_reference(self, sequence: int) -> None:
        """Compare the policy from now on with its weights as they are now; see `PolicyUpdater.freeze_reference`."""
        await self._run(sequence, lambda: self._ready().freeze_reference())

    @served
    async def logprobs(self, sequence: int, batch: SampleBatch) -> dict[tuple[int, int], np.ndarray]:
        """This rank's share of the batch scored under the current weights, by (group id, sample)."""
        return await self._run(sequence, lambda: self._ready().logprobs(batch))

    @served
    async def save(self, sequence: int, directory: str) -> int:
        """Write the current weights as a Hugging Face checkpoint; returns after which step they are."""
        await self._run(sequence, lambda: self._ready().save_hf(Path(directory)))
        return self._ready().step

    @served
    async def close(self, sequence: int) -> None:
        """Give back what outlives the process: shared memory."""
        await self._run(sequence, self._close)

    async def _run(self, sequence: int, work: Callable[[], T]) -> T:
        """In the calls' thread and order, and in this actor's context."""
        return await self._calls.run(sequence, lambda: self._context.run(work))

    def _ready(self) -> PolicyUpdater:
        if self._updater is None:
            raise TrainingError("the trainer was called before setup")
        return self._updater

    def _build(self) -> int:
        # Imported here: the controller imports this module and has no use for torch.
        import torch.distributed as dist

        from titan_rl.policy.updater import PolicyUpdater
        from titan_rl.weights.transport import make_publisher

        self._updater = PolicyUpdater(
            self._config,
            model_path=self._model_path,
            temperature=self._temperature,
            total_steps=self._total_steps,
            device=self._device,
            seed=self._seed,
            samples=self._sources,
        )
        self._publisher = make_publisher(
            self._weights,
            channel=CHANNEL,
            owner_pid=self._owner_pid,
            rank=self._rank,
            group=dist.group.WORLD if self._config.ranks > 1 else None,
        )
        return os.getpid()

    def _publish(self) -> Publication:
        import torch

        updater = self._ready()
        return self._ready_publisher().publish(
            PolicyVersion(updater.incarnation, updater.step),
            updater.local_shards(),
            dtype=getattr(torch, self._served_dtype),
            aliases=updater.aliases,
        )

    def _ready_publisher(self) -> ChannelPublisher:
        if self._publisher is None:
            raise TrainingError("the trainer was called before setup")
        return self._publisher

    def _close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()


class Trainer:
    """All ranks of the trainer mesh as one object. Belongs to one event loop."""

    def __init__(self, mesh: Any, config: TrainerConfig, *, start_seconds: float, step_seconds: float) -> None:
        self._config = config
        self._ranks = [
            Connection(mesh.slice(ranks=rank), what=f"trainer.{{}} of rank {rank}") for rank in range(config.ranks)
        ]
        self._start_seconds = start_seconds
        self._step_seconds = step_seconds
        self._sequence = 0
        self.pids: list[int] = []
        """Process ids of the ranks, known after `setup`."""

    async def setup(self) -> None:
        """Build the policy on every rank."""
        self.pids = await self._call(self._start_seconds, PolicyTrainer.setup)

    async def attach_stores(self, stores: dict[str, Any]) -> None:
        """Let every rank fetch samples through Monarch from these workers, by the name of their store."""
        await self._call(self._step_seconds, PolicyTrainer.attach_stores, stores)

    async def train_step(self, batch: SampleBatch) -> dict[str, float]:
        """Train one optimizer step on the batch.

        Which rank computes which sample is planned here, from lengths alone; each rank is told of its own and fetches
        them.

        Returns:
            Plain numbers, the same on every rank: loss, grad_norm, lr, entropy, clip_share, trained_tokens, …

        Raises:
            SamplesLost: samples are missing or damaged; the weights are untouched.
            TrainingError: NaN or inf; the weights are untouched.
            ActorFailed: a rank is gone or did not answer.
        """
        metrics = await self._call_each(PolicyTrainer.train_step, self._shares(batch))
        return metrics[0]

    async def warm_up_step(self, batch: SampleBatch) -> dict[str, float]:
        """Train one supervised step on demonstrations, before the first RL step; versions do not count it.

        Returns:
            Plain numbers, the same on every rank: loss, grad_norm, lr, trained_tokens, tokens, imbalance.

        Raises:
            SamplesLost, TrainingError, ActorFailed: as `train_step`.
        """
        metrics = await self._call_each(PolicyTrainer.warm_up_step, self._shares(batch))
        return metrics[0]

    async def push_model_state_dict(self) -> Publication:
        """Publish the current weights for generators to pull."""
        publications = await self._call(self._step_seconds, PolicyTrainer.push_model_state_dict)
        return publications[0]

    async def freeze_reference(self) -> None:
        """Make the current weights those that the KL term compares with: every rank copies its own shards. Does
        nothing where the config has no KL term."""
        if self._config.kl.coefficient:
            await self._call(self._step_seconds, PolicyTrainer.freeze_reference)

    async def release(self, publication: Publication) -> None:
        """Free a publication that nobody pulls any more."""
        await self._call(self._step_seconds, PolicyTrainer.release, publication.version)

    async def logprobs(self, batch: SampleBatch) -> dict[tuple[int, int], np.ndarray]:
        """Score a batch under the current weights: (group id, sample) → [L] float32, position 0 is 0."""
        merged: dict[tuple[int, int], np.ndarray] = {}
        for part in await self._call(self._step_seconds, PolicyTrainer.logprobs, batch):
            merged.update(part)
        return merged

    async def save(self, directory: Path) -> int:
        """Write a Hugging Face checkpoint; returns after which step its weights are."""
        steps = await self._call(self._step_seconds, PolicyTrainer.save, str(directory))
        return steps[0]

    async def close(self) -> None:
        await self._call(self._step_seconds, PolicyTrainer.close)

    def _shares(self, batch: SampleBatch) -> list[tuple[SampleBatch, PackingPlan]]:
        """For every rank its samples and their plan; tensor-parallel ranks, which lie together, have the same."""
        plan = plan_packing(
            batch.lengths,
            ranks=self._config.data_parallel,
            tokens_per_microbatch=self._config.max_tokens_per_microbatch,
            trained_tokens=batch.trained_tokens,
        )
        shares = [plan.share(rank // self._config.tensor_parallel) for rank in range(self._config.ranks)]
        return [(batch.select(positions), share) for positions, share in shares]

    async def _call(
        self, seconds: float, endpoint: Endpoint[Concatenate[int, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Every rank's answer to the same question. The first rank that fails ends the wait: the others may be in a
        collective with it."""
        sequence = self._next_call()
        return await asyncio.gather(*(rank.call(seconds, endpoint, sequence, *args, **kwargs) for rank in self._ranks))

    async def _call_each(
        self,
        endpoint: Endpoint[[int, SampleBatch, PackingPlan], T],
        shares: Sequence[tuple[SampleBatch, PackingPlan]],
    ) -> list[T]:
        """The same, each rank with a share of its own."""
        sequence = self._next_call()
        return await asyncio.gather(
            *(
                rank.call(self._step_seconds, endpoint, sequence, batch, plan)
                for rank, (batch, plan) in zip(self._ranks, shares, strict=True)
            )
        )

    def _next_call(self) -> int:
        self._sequence += 1
        return self._sequence - 1
