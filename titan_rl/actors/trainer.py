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
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from monarch.actor import current_rank

from titan_rl.actors.calls import served
from titan_rl.actors.connection import ConnectedActor, Connection
from titan_rl.data_plane.fetch import SampleSources, SharedMemorySource
from titan_rl.data_plane.refs import RDMA, SHARED_MEMORY
from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.errors import TrainingError, WeightsError
from titan_rl.policy.config import TrainerConfig
from titan_rl.policy.packing import PackingPlan, plan_packing
from titan_rl.types import PolicyVersion
from titan_rl.weights.config import WeightsConfig
from titan_rl.weights.manifest import Publication

if TYPE_CHECKING:
    from titan_rl.policy.updater import PolicyUpdater
    from titan_rl.weights.transport import WeightPublisher

T = TypeVar("T")

_log = logging.getLogger(__name__)

POLICY_CHANNEL = "policy"
"""Channel on which the trained policy is published for generators: in their dtype, as the config says."""

REFERENCE_CHANNEL = "reference"
"""Channel from which the trainer mesh takes the weights that its KL term compares with. What is published on this or
any other channel but the policy's is exactly what the trainer computes with, in its own dtype."""


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
    `pull_reference`, `logprobs`, `state_digest`, `save`, `close`."""

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
        self._publishers: dict[str, WeightPublisher] = {}  # by channel
        self._live: Counter[str] = Counter()  # publications by channel
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
        from titan_rl.data_plane.rdma import RdmaSource

        await self._run(sequence, lambda: self._sources.add(RDMA, RdmaSource(stores)))

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
    async def push_model_state_dict(self, sequence: int, channel: str) -> Publication:
        """Publish the current weights on a channel; returns when they can be pulled."""
        return await self._run(sequence, lambda: self._publish(channel))

    @served
    async def release(self, sequence: int, channel: str, version: PolicyVersion) -> None:
        """Nobody needs this publication any more."""
        await self._run(sequence, lambda: self._release(channel, version))

    @served
    async def pull_reference(self, sequence: int, publication: Publication) -> int:
        """Take these weights for the KL term; see `PolicyUpdater.pull_reference`."""
        return await self._run(sequence, lambda: self._ready().pull_reference(publication))

    @served
    async def logprobs(self, sequence: int, batch: SampleBatch) -> dict[tuple[int, int], np.ndarray]:
        """This rank's share of the batch scored under the current weights, by (group id, sample)."""
        return await self._run(sequence, lambda: self._ready().logprobs(batch))

    @served
    async def state_digest(self, sequence: int) -> str:
        """Of this rank's part of the training state; see `PolicyUpdater.state_digest`."""
        return await self._run(sequence, lambda: self._ready().state_digest())

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
        from titan_rl.policy.updater import PolicyUpdater

        self._updater = PolicyUpdater(
            self._config,
            model_path=self._model_path,
            temperature=self._temperature,
            total_steps=self._total_steps,
            device=self._device,
            seed=self._seed,
            samples=self._sources,
        )
        self._publishers[POLICY_CHANNEL] = self._make_publisher(POLICY_CHANNEL)
        return os.getpid()

    def _make_publisher(self, channel: str) -> WeightPublisher:
        import torch.distributed as dist

        from titan_rl.weights.transport import make_publisher

        exact = replace(self._weights, transfer_dtype="same", delta=False)
        return make_publisher(
            self._weights if channel == POLICY_CHANNEL else exact,
            channel=channel,
            owner_pid=self._owner_pid,
            rank=self._rank,
            group=dist.group.WORLD if self._config.ranks > 1 else None,
        )

    def _publish(self, channel: str) -> Publication:
        import torch

        updater = self._ready()
        if channel not in self._publishers:
            self._publishers[channel] = self._make_publisher(channel)
        publication = self._publishers[channel].publish(
            PolicyVersion(updater.incarnation, updater.step),
            updater.local_shards(),
            dtype=getattr(torch, self._served_dtype if channel == POLICY_CHANNEL else self._config.dtype),
            aliases=updater.aliases,
        )
        self._live[channel] += 1
        return publication

    def _release(self, channel: str, version: PolicyVersion) -> None:
        if channel not in self._publishers:
            raise WeightsError(f"{channel} {version} cannot be released: nothing was published on this channel")
        self._publishers[channel].release(version)
        self._live[channel] -= 1
        if channel != POLICY_CHANNEL and not self._live[channel]:
            # The policy's room is written again after every step; another channel's would lie idle.
            self._publishers.pop(channel).close()

    def _close(self) -> None:
        for publisher in self._publishers.values():
            publisher.close()


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
        self.pids = await self._call("setup", seconds=self._start_seconds)

    async def attach_stores(self, stores: dict[str, Any]) -> None:
        """Let every rank fetch samples through Monarch from these workers, by the name of their store."""
        await self._call("attach_stores", stores)

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
        metrics: list[dict[str, float]] = await self._call_each("train_step", self._shares(batch))
        return metrics[0]

    async def warm_up_step(self, batch: SampleBatch) -> dict[str, float]:
        """Train one supervised step on demonstrations, before the first RL step; versions do not count it.

        Returns:
            Plain numbers, the same on every rank: loss, grad_norm, lr, trained_tokens, tokens, imbalance.

        Raises:
            SamplesLost, TrainingError, ActorFailed: as `train_step`.
        """
        metrics: list[dict[str, float]] = await self._call_each("warm_up_step", self._shares(batch))
        return metrics[0]

    async def push_model_state_dict(self, channel: str = POLICY_CHANNEL) -> Publication:
        """Publish the current weights on a channel: the policy's for generators to pull."""
        publications: list[Publication] = await self._call("push_model_state_dict", channel)
        return publications[0]

    async def freeze_reference(self, *, on_refused: Callable[[str], None] = _log.warning) -> int | None:
        """Make the current weights those that the KL term compares with. Does nothing where the config has no KL term.

        They go through the channel `REFERENCE_CHANNEL` and are verified by every rank like a generator's; the
        publication is released and its memory given back before this returns. What a rank refuses is published again,
        once.

        Args:
            on_refused: told why.

        Returns:
            The combined fingerprint; None without a KL term.

        Raises:
            WeightsError: what a rank loaded is not what was published; there is no reference now.
        """
        if not self._config.kl.coefficient:
            return None
        try:
            return await self._pull_reference()
        except WeightsError as error:
            on_refused(f"{error}; the trainer publishes it again")
        return await self._pull_reference()

    async def _pull_reference(self) -> int:
        publication = await self.push_model_state_dict(REFERENCE_CHANNEL)
        try:
            fingerprints: list[int] = await self._call("pull_reference", publication)
        finally:
            await self.release(publication)
        return fingerprints[0]

    async def release(self, publication: Publication) -> None:
        """Free a publication that nobody pulls any more."""
        await self._call("release", publication.channel, publication.version)

    async def logprobs(self, batch: SampleBatch) -> dict[tuple[int, int], np.ndarray]:
        """Score a batch under the current weights: (group id, sample) → [L] float32, position 0 is 0."""
        merged: dict[tuple[int, int], np.ndarray] = {}
        for part in await self._call("logprobs", batch):
            merged.update(part)
        return merged

    async def state_digest(self) -> list[str]:
        """Of every rank: equal exactly if weights, optimizer and schedule are bitwise equal."""
        return await self._call("state_digest")

    async def save(self, directory: Path) -> int:
        """Write a Hugging Face checkpoint; returns after which step its weights are."""
        steps: list[int] = await self._call("save", str(directory))
        return steps[0]

    async def close(self) -> None:
        await self._call("close")

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

    async def _call(self, endpoint: str, *args: Any, seconds: float | None = None) -> list[Any]:
        """Every rank's answer to the same question; see `_call_each`."""
        return await self._call_each(endpoint, [args] * len(self._ranks), seconds=seconds)

    async def _call_each(
        self, endpoint: str, args: Sequence[tuple[Any, ...]], *, seconds: float | None = None
    ) -> list[Any]:
        """Every rank's answer. The first rank that fails ends the wait: the others may be in a collective with it."""
        sequence = self._sequence
        self._sequence += 1
        seconds = self._step_seconds if seconds is None else seconds
        return await asyncio.gather(
            *(rank.call(endpoint, sequence, *own, seconds=seconds) for rank, own in zip(self._ranks, args, strict=True))
        )
