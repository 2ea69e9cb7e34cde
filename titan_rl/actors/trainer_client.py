"""`TrainerClient`: the handle that drives all ranks of the trainer mesh together, and those that replace them.

    rank dies ─▶ lose ─▶ mesh is spawned again ─▶ replace ─▶ setup: the policy is built, the copy of `version` is read
                  └ calls in flight wait … ─────────────────────────────────────────────▶ … and are made again

- A call is made to all ranks or, if they die before it has ended, again to the ones after them. They begin where the
  ranks before were when the last call ended that changed the state, so its effect is had once.
- If no copy of that state is usable, calls raise `RollbackNeeded` until `restore`.
"""

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from titan_rl.actors.trainer import PolicyTrainer
from titan_rl.config import RunConfig
from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.errors import ActorFailed, ActorGone, CallTimeout, CheckpointError, MeshLeaves, RollbackNeeded
from titan_rl.policy.packing import PackingPlan, plan_step
from titan_rl.policy.token_score_recorder import TokenScoreRecorder
from titan_rl.rpc.connection import RemoteMethod
from titan_rl.rpc.mesh_client import MeshClient
from titan_rl.types import PolicyVersion
from titan_rl.weights.manifest import Publication

P = ParamSpec("P")
T = TypeVar("T")

RankCall = Callable[[int, int], Coroutine[Any, Any, T]]
"""Makes a call to one rank: `call(rank, sequence number)`."""

WARM_UP = "; before the first RL step the trainer's state is copied only once the warm-up is over"

NEWS_SECONDS = 1.0
"""Within which a rank's end is heard of, if its host lives. Others that were in a collective with it fail at once."""


class TrainerClient(MeshClient):
    actor_class = PolicyTrainer

    def __init__(
        self,
        config: RunConfig,
        *,
        start_seconds: float,
        on_hung: Callable[..., None] = lambda reason, kind=None: None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`start_seconds`: bound on `setup` and `restore`. `on_hung`: told of a call that was not answered within its
        bound. Its ranks, stuck in a collective, are of no use any more: they must be ended and replaced; and of a
        start over, with MeshLeaves. `say`: told once if there is no room for copies of the state."""
        super().__init__("trainer", start_seconds=start_seconds)
        self._config, where = config.trainer, config.placement
        self._step_seconds = where.step_seconds  # bound on any other call
        self._news_seconds = NEWS_SECONDS + (where.host_seconds if where.several_hosts else 0)
        self._on_hung = on_hung
        self._say = say
        self._sequence = 0
        self._gone = ""  # why there are no ranks to call
        self._lost = asyncio.Event()
        self._published: dict[PolicyVersion, Publication] = {}
        self._serials = itertools.count(1)
        self.version = PolicyVersion(0, 0)
        """Incarnation and finished RL steps, as far as the answers tell."""
        self._as_loaded = True  # nothing was trained or restored
        self._state_lost = ""
        self.on_state_lost: Callable[[], None] = lambda: None
        """Called when there are ranks again, and no state. From then on `require_state` raises."""

    def lose(self, reason: str) -> None:
        self._gone = reason or "the trainer is gone"
        super().lose(self._gone)
        self._lost.set()

    def replace(self, actors: Sequence[Any]) -> None:
        self._gone = self._gone or "the trainer is being set up"  # ranks may die before anybody says that they are lost
        super().replace(actors)
        self.has_worked = False  # however long they live: a step may end, or hang, each time late
        self._sequence = 0
        self._lost.clear()

    async def _set_up(self, peers: dict[str, Any]) -> list[int]:
        """Build the policy on every rank, and bring it to where the ranks before were."""
        adopted, setup = tuple(self._published.values()), PolicyTrainer.setup
        place = await self.ranks[0].call(self.start_seconds, PolicyTrainer.open_rendezvous)
        pids = await self._all(self._call(self.start_seconds, setup, self.version.incarnation, adopted, place))
        if peers:
            await self._all(self._set_peers)
        self._state_lost = ""
        if not self._as_loaded:
            try:
                await self._all(self._call(self.start_seconds, PolicyTrainer.read_copies, self.version))
            except CheckpointError as error:
                why = f"no copy of {self.version} is usable: {error}"
                self._state_lost = f"the trainer's state is lost: {why}{'' if self.version.step else WARM_UP}"
                self.on_state_lost()
        self._gone = ""
        self._retry_now()
        for publication in adopted:
            if publication.version not in self._published:
                await self.release(publication)
        return pids

    def require_state(self) -> None:
        """Raises RollbackNeeded if a call that needs the state would."""
        if self._state_lost:
            raise RollbackNeeded(self._state_lost)

    async def train_step(self, batch: SampleBatch, recorder: TokenScoreRecorder | None = None) -> dict[str, float]:
        """Train one batch; returns its metrics. The packing is planned here, from lengths alone; each rank
        fetches its own samples. `recorder`: collects the scores of the samples that it names.

        Raises SamplesLost: samples are missing or damaged; the weights are untouched. TrainingError: NaN or inf; the
        weights are untouched, or are not saved. RollbackNeeded: the ranks died, and with them the state.
        """
        recorder = recorder or TokenScoreRecorder()
        answers = await self._step(PolicyTrainer.train_step, batch, recorder.names)
        for _, scores in answers:
            recorder.scores.update(scores)
        self.version, self._as_loaded = PolicyVersion(self.version.incarnation, self.version.step + 1), False
        return answers[0][0]

    async def warm_up_step(self, batch: SampleBatch) -> dict[str, float]:
        """Train one supervised step on demonstrations, before the first RL step. It does not count as a version, and
        there is no copy in memory before the end of the warm-up. Otherwise as `train_step`."""
        answers = await self._step(PolicyTrainer.warm_up_step, batch)
        self._as_loaded = False
        return answers[0]

    async def freeze_reference(self) -> None:
        """RL begins: the weights become the reference of the KL term, if there is one; the state is first copied."""
        reasons = await self._again(self._call(self._step_seconds, PolicyTrainer.freeze_reference))
        self._as_loaded = False
        self._tell(max(reasons))

    async def push_model_state_dict(self) -> Publication:
        return self._note(await self._again(self._call(self._step_seconds, PolicyTrainer.push_model_state_dict)))

    async def release(self, publication: Publication) -> None:
        """Free a publication that nobody pulls any more. Ranks that replace these do not take it over."""
        self._published.pop(publication.version, None)
        call = self._call(self._step_seconds, PolicyTrainer.release, publication.version)
        with suppress(ActorGone):
            await self._once(call, needs_state=False)

    async def save(self, directory: Path) -> int:
        """Write a Hugging Face checkpoint; returns the step of its weights."""
        return (await self._again(self._call(self._step_seconds, PolicyTrainer.save, str(directory))))[0]

    async def begin_checkpoint(self, directory: Path, step: int, samples: SampleBatch) -> None:
        """Copy in memory the trainer's state after `step` and these samples. Returns when training may go on. Raises
        TrainingError: the trainer is at another step, because nobody heard how the last one ended; SampleError,
        StorageError, ActorGone: a sample or the directory cannot be had, or the trainer died."""
        await self._once(self._call(self._step_seconds, PolicyTrainer.begin_checkpoint, str(directory), step, samples))

    async def finish_checkpoint(self, directory: Path, publications: tuple[Publication, ...]) -> None:
        """Write what was copied, and these live publications, to `directory`. Other calls go on meanwhile. Raises
        StorageError, WeightsError, ActorGone: it could not be written."""
        endpoint = PolicyTrainer.finish_checkpoint
        await self.call_all(self._step_seconds, endpoint, str(directory), publications)

    async def restore(self, directory: Path, incarnation: int) -> None:
        """Go on as this incarnation from the state in `directory`, which any layout of ranks has written. Raises
        CheckpointError: it cannot be read, or is of another policy."""
        self.version, self._as_loaded, self._state_lost = PolicyVersion(incarnation, 0), True, ""
        answers = await self._again(self._call(self.start_seconds, PolicyTrainer.restore, str(directory), incarnation))
        self.version, self._as_loaded = PolicyVersion(incarnation, answers[0][0]), False
        self._tell(max(why for _, why in answers))

    def outdate(self) -> None:
        """These ranks are not the ones to start over with: others are to be made, with other settings."""
        self._as_loaded, self._state_lost = False, ""

    async def start_over(self, incarnation: int) -> None:
        """Begin as this incarnation with the policy as it was loaded. Ranks that have trained are replaced."""
        trained = not (self._as_loaded or self._state_lost)
        self.version, self._as_loaded, self._state_lost = PolicyVersion(incarnation, 0), True, ""
        if trained:
            self.lose("the run starts over")
            self._on_hung("trainer: the run starts over, with new ranks", MeshLeaves)
        await self._again(self._call(self.start_seconds, PolicyTrainer.start_over, incarnation))

    async def publish_again(self, directory: Path, version: PolicyVersion) -> Publication:
        """Publish an older version that the checkpoint in `directory` keeps."""
        call = self._call(self._step_seconds, PolicyTrainer.publish_again, str(directory), version)
        return self._note(await self._again(call))

    async def close(self) -> None:
        await self._all(self._call(self._step_seconds, PolicyTrainer.free))

    async def _send_peers(self, peers: dict[str, Any]) -> None:
        # waits for ranks that are being set up: they may have got the peers before
        await self._again(self._set_peers, needs_state=False)

    def _set_peers(self, rank: int, sequence: int) -> Coroutine[Any, Any, None]:
        """The peers of now: those of a call that is made again may be gone."""
        return self.ranks[rank].call(self._step_seconds, PolicyTrainer.set_peers, sequence, **self._peers)

    async def _step(
        self,
        endpoint: RemoteMethod[Concatenate[int, SampleBatch, PackingPlan, P], T],
        batch: SampleBatch,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[T]:
        """Call each rank with its own samples and their plan; neighbours, which are tensor-parallel, with the same."""
        plan = plan_step(batch, self._config)
        shares = [plan.share(rank // self._config.tensor_parallel) for rank in range(self._config.ranks)]

        def call(rank: int, sequence: int) -> Coroutine[Any, Any, T]:
            positions, share = shares[rank]
            mine = batch.select(positions)
            return self.ranks[rank].call(self._step_seconds, endpoint, sequence, mine, share, *args, **kwargs)

        answers = await self._again(call)
        self.has_worked = True
        return answers

    def _call(
        self, seconds: float | None, endpoint: RemoteMethod[Concatenate[int, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> RankCall[T]:
        """The same call for every rank."""
        return lambda rank, sequence: self.ranks[rank].call(seconds, endpoint, sequence, *args, **kwargs)

    async def _again(self, call: RankCall[T], *, needs_state: bool = True) -> list[T]:
        """`_once`, and again whenever the ranks are replaced before they have answered."""
        return await self.retry_on_replacement(lambda: self._once(call, needs_state=needs_state))

    async def _once(self, call: RankCall[T], *, needs_state: bool = True) -> list[T]:
        """Call every rank. Raises RollbackNeeded: they do not have the state, and it is needed; ActorGone: they are not
        there, or one died or hung before all had answered."""
        if self._gone:
            raise ActorGone(self._gone)
        if needs_state:
            self.require_state()
        try:
            return await self._all(call)
        except CallTimeout as error:
            self._on_hung(str(error))
            raise ActorGone(str(error)) from error
        except ActorGone:
            raise
        except (ActorFailed, CheckpointError) as error:
            try:
                async with asyncio.timeout(self._news_seconds):
                    await self._lost.wait()
            except TimeoutError:
                raise error from None
            raise ActorGone(f"{self._gone}: {error}") from error

    async def _all(self, call: RankCall[T]) -> list[T]:
        """The answers of all ranks. The first rank that fails ends the wait, because the others may be stuck in a
        collective with it. A call that cannot be sent to a rank uses up no number if no rank has it; otherwise those
        that have it would wait for the others, and are replaced."""
        calls: list[Coroutine[Any, Any, T]] = []
        try:
            for rank in range(len(self.ranks)):
                calls.append(call(rank, self._sequence))
        except Exception as error:
            for sent in calls:
                sent.close()
            if calls:
                self._on_hung(f"trainer: a call could not be sent to rank {len(calls)}: {error}")
            raise
        self._sequence += 1
        return await asyncio.gather(*calls)

    def _note(self, answers: list[Publication | None]) -> Publication:
        assert answers[0] is not None
        publication = replace(answers[0], serial=next(self._serials))
        self._published[publication.version] = publication
        return publication

    def _tell(self, why: str) -> None:
        if why:
            self._say(f"no copies of the trainer's state are kept in memory, only checkpoints: {why}")
