"""`PolicyTrainer`: one rank of the trainer mesh. `trainer_client.TrainerClient` drives all ranks together.

Every call to the mesh carries a sequence number. A rank runs its calls one at a time in one thread, and refuses a call
whose turn it is not. So all ranks enter their collectives in the same order.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from titan_rl.config import RunConfig
from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.data_plane.store import write_samples
from titan_rl.errors import CheckpointError, StorageError, TrainingError
from titan_rl.metrics.activity import activity
from titan_rl.metrics.timeline import Pulse, timeline
from titan_rl.policy.packing import PackingPlan
from titan_rl.policy.token_score_recorder import SampleName, TokenScoreRecorder, TokenScores
from titan_rl.processes import HOST, RENDEZVOUS, open_rendezvous, owner_pid
from titan_rl.rpc.connection import ConnectedActor, RemoteMethod, endpoint
from titan_rl.types import PolicyVersion, TrainingSample
from titan_rl.weights.manifest import Publication, TensorShard

if TYPE_CHECKING:
    from titan_rl.policy.state_copies import StateCopies
    from titan_rl.policy.updater import PolicyUpdater
    from titan_rl.weights.publisher import SharedMemoryPublisher

P = ParamSpec("P")
T = TypeVar("T")

CHANNEL = "policy"
"""The channel on which the trained policy is published."""

STATE, SAMPLES = "trainer", "samples"
"""Of a checkpoint: a directory and a file. Each older version that it keeps is a directory too."""

_log = logging.getLogger(__name__)


def in_order(method: Callable[Concatenate[Any, P], T]) -> RemoteMethod[Concatenate[int, P], T]:
    """An endpoint of `PolicyTrainer` that runs when it is its turn; callers put the call's number first."""

    async def answer(self: PolicyTrainer, sequence: int, *args: P.args, **kwargs: P.kwargs) -> T:
        def work() -> T:
            timeline.doing(method.__name__)
            try:
                return method(self, *args, **kwargs)
            finally:
                timeline.doing("wait", "rollouts")

        return await self.in_turn(sequence, work)

    answer.__name__, answer.__qualname__, answer.__doc__ = method.__name__, method.__qualname__, method.__doc__
    return endpoint(answer)


class PolicyTrainer(ConnectedActor):
    """One rank: a `PolicyUpdater` and a publisher of its weights. `TrainerClient` documents the endpoints."""

    def __init__(self, config: RunConfig, *, model_path: str, device: str, hosts: Sequence[str] = ()) -> None:
        """`hosts`: of every rank, by rank, where there are several."""
        self._config = config
        self._model_path = Path(model_path)
        self._device = device
        self._hosts = hosts
        self._rank = int(os.environ["RANK"])
        self._updater: PolicyUpdater  # from `setup` on, as a client calls nothing before it
        self._publisher: SharedMemoryPublisher | None = None
        self._copies: StateCopies | None = None
        self._copied: tuple[TrainingSample, ...] = ()  # for the checkpoint that is being written
        self._in_step = 0  # the thread that makes a step
        self._is_warm = device == "cpu"  # on CUDA the first step may compile for minutes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")  # of all calls that have a turn
        self._next = 0  # the number of the call whose turn it is

    async def in_turn(self, sequence: int, work: Callable[[], T]) -> T:
        """Run `work` behind all calls with a smaller number. Raises TrainingError: another number is next."""
        if sequence != self._next:
            raise TrainingError(f"trainer rank {self._rank} got call {sequence}, and the next is {self._next}")
        self._next += 1
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    @endpoint
    async def pulse(self) -> Pulse:
        """In a step progress is the time that its thread has computed on a CPU, where a micro-batch may take minutes,
        and the micro-batches on CUDA, where a thread that waits computes too. Other calls have bounds of their own."""
        alive = await ConnectedActor.pulse.answer(self)
        thread = self._in_step  # it may end meanwhile
        if not (thread and self._is_warm):
            return alive
        if self._device == "cpu":
            return alive._replace(progress=time.clock_gettime_ns(time.pthread_getcpuclockid(thread)))
        return alive._replace(progress=self._updater.microbatches)

    @endpoint
    async def open_rendezvous(self) -> str:
        return await asyncio.to_thread(open_rendezvous)

    @in_order
    def setup(self, incarnation: int, published: tuple[Publication, ...], rendezvous: str) -> int:
        """Build the model, load its weights, make the optimizer. Returns this process's id. `published`: what the ranks
        before these left live. `rendezvous`: what rank 0 has opened."""
        os.environ[RENDEZVOUS] = rendezvous
        # Imported here: the controller imports this module and has no use for torch.
        import torch
        import torch.distributed as dist

        from titan_rl.policy.state_copies import StateCopies
        from titan_rl.policy.updater import PolicyUpdater
        from titan_rl.weights.fingerprint import compiled_sum
        from titan_rl.weights.publisher import SharedMemoryPublisher

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # torch may have been imported before a fork
        started = time.monotonic()
        config, ranks = self._config, self._config.trainer.ranks
        self._updater = PolicyUpdater(
            config.trainer_settings(),
            model_path=self._model_path,
            temperature=config.rollout.sampling.temperature,
            total_steps=max(1, config.loop.steps),
            device=self._device,
            seed=config.seed,
            architecture=config.policy.family,
        )
        self._updater.incarnation = incarnation
        if config.checkpoint.in_memory:
            here = self._hosts.count(os.environ[HOST]) if self._hosts else ranks
            self._copies = StateCopies(owner_pid=owner_pid(), rank=self._rank, ranks=here)
        group, max_live = dist.group.WORLD if ranks > 1 else None, config.weights_settings().max_live
        self._publisher = SharedMemoryPublisher(
            channel=CHANNEL, rank=self._rank, group=group, max_live=max_live, hosts=self._hosts
        )
        self._publisher.adopt(published)
        if self._device == "cpu":
            compiled_sum()  # now, and not when generators wait for weights
        _log.info("trainer rank %d is ready after %.1f s", self._rank, time.monotonic() - started)
        return os.getpid()

    @endpoint
    async def set_peers(self, sequence: int, stores: dict[str, tuple[str, Any]]) -> None:
        """`stores`: by name, the host of a store and the handle of its rollout worker."""
        from titan_rl.actors.sample_stores import AnyHostSource

        here = os.environ.get(HOST)
        source = AnyHostSource({name: worker for name, (host, worker) in stores.items() if host != here})

        def attach() -> object:
            before, self._updater.samples = self._updater.samples, source
            return before

        before = await self.in_turn(sequence, attach)
        if isinstance(before, AnyHostSource):
            await before.close()

    @in_order
    def warm_up_step(self, batch: SampleBatch, plan: PackingPlan) -> dict[str, float]:
        with self._step():
            return self._updater.warm_up_step(batch, plan)

    @in_order
    def freeze_reference(self) -> str:
        """Returns why no copies of the state are kept from now on; empty if they are."""
        if self._config.trainer.kl.coefficient:
            self._updater.freeze_reference()
        return self._copy(reference=True)

    @in_order
    def train_step(
        self, batch: SampleBatch, plan: PackingPlan, names: frozenset[SampleName]
    ) -> tuple[dict[str, float], dict[SampleName, TokenScores]]:
        """Returns the metrics, which rank 0 has for all, and the scores of this rank's samples among the named ones."""
        recorder = TokenScoreRecorder(names)
        with self._step():
            metrics = self._updater.train_step(batch, plan, recorder)
        self._copy()
        _log.info("step %d: %s", self._updater.step, {name: round(value, 6) for name, value in metrics.items()})
        return metrics if self._rank == 0 else {}, recorder.scores

    @in_order
    def read_copies(self, version: PolicyVersion) -> None:
        if self._copies is None:
            raise CheckpointError("checkpoint.in_memory is off")
        self._updater.restore_from_copies(self._copies, version)

    @in_order
    def push_model_state_dict(self) -> Publication | None:
        return self._publish(PolicyVersion(self._updater.incarnation, self._updater.step))

    @in_order
    def release(self, version: PolicyVersion) -> None:
        assert self._publisher is not None
        self._publisher.release(version)

    @in_order
    def save(self, directory: str) -> int:
        self._updater.save_hf(Path(directory))
        return self._updater.step

    @in_order
    def begin_checkpoint(self, directory: str, step: int, samples: SampleBatch) -> None:
        if (mine := self._updater.step) != step:
            raise TrainingError(f"no checkpoint of step {step}: the trainer is at step {mine}")
        self._updater.begin_save(Path(directory, STATE))
        self._copied = self._updater.samples.fetch(samples) if self._rank == 0 else ()

    @endpoint
    async def finish_checkpoint(self, directory: str, publications: tuple[Publication, ...]) -> None:
        from titan_rl.weights.puller import save_publication

        def write() -> None:
            try:
                if self._rank == 0:
                    write_samples(Path(directory, SAMPLES), self._copied)
                    for publication in publications:
                        save_publication(publication, Path(directory, str(publication.version)))
            finally:
                self._copied = ()
                self._updater.finish_save()  # in any case: `directory` may be removed when this has answered

        with activity("write checkpoint"):
            await asyncio.to_thread(write)

    @in_order
    def restore(self, directory: str, incarnation: int) -> tuple[int, str]:
        """Returns the step, and why no copies of the state are kept from now on."""
        self._updater.restore(Path(directory, STATE), incarnation)
        return self._updater.step, self._copy(reference=True)

    @in_order
    def start_over(self, incarnation: int) -> None:
        if step := self._updater.step:
            raise TrainingError(f"the trainer cannot start over: it is at step {step}")
        self._updater.incarnation = incarnation

    @in_order
    def publish_again(self, directory: str, version: PolicyVersion) -> Publication | None:
        return self._publish(version, Path(directory, str(version)))

    @in_order
    def free(self) -> None:
        """Free the shared memory, which would outlive the process."""
        if self._publisher is not None:
            self._publisher.close()
        if self._copies is not None:
            self._copies.remove()

    @contextmanager
    def _step(self) -> Iterator[None]:
        self._in_step = threading.get_ident()
        try:
            yield
            self._is_warm = True
        finally:
            self._in_step = 0

    def _publish(self, version: PolicyVersion, stored: Path | None = None) -> Publication | None:
        """The policy as it is, or what was `stored` of a publication. Returns it on rank 0."""
        import torch

        from titan_rl.weights.tensor_files import shards_of_files

        timeline.doing("publish")
        assert self._publisher is not None
        served_dtype = getattr(torch, self._config.generator.dtype)
        base, aliases = self._updater.base, self._updater.aliases
        shards: Iterable[TensorShard] = self._updater.local_shards()
        if stored is not None:
            shards = shards_of_files(stored) if base is not None or self._rank == 0 else ()
        publication = self._publisher.publish(version, shards, dtype=served_dtype, aliases=aliases, base=base)
        return publication if self._rank == 0 else None

    def _copy(self, *, reference: bool = False) -> str:
        """Copy the state in memory; returns why that cannot be done. Then it is not tried again."""
        if self._copies is not None:
            timeline.doing("copy state")
            try:
                self._updater.copy_state(self._copies, reference=reference)
            except StorageError as error:
                self._copies.remove()
                self._copies = None
                return str(error)
        return ""
