"""The training loop: fully asynchronous, and synchronous where `loop.max_staleness` is 0.

    data ─▶ rollouts ─▶ batcher ─▶ trainer ─▶ publisher ─▶ data: the slots of what was trained are free again
                                                 └─▶ evaluator                                  watchdog: looks at all

The tasks are independent and share one `GroupBuffer`, which makes all decisions. They never call each other; they wait
for the buffer's state.

- Every step trains P groups, none older than the buffer's bound. No group is dropped because it is late.
- The loop owns samples from their report to their release. It releases them once: after the step that trained them, or
  when their group is filtered, failed or lost. However a run ends, it leaves the stores empty. A lost group is played
  again and keeps its place (`lost_groups`).
- A failure in any task ends the run with that error and cancels all other tasks.
- Apart from filtered and failed groups, exactly `steps`·P groups are admitted, so nothing is left over at the end. A
  run with nothing left to learn ends early (`_stop_early`); one that cannot learn, with NothingToTrain.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.data_plane.store import HeldReport
from titan_rl.errors import ActorGone, NothingToTrain, RollbackNeeded, SamplesLost
from titan_rl.loop.changes import Changes
from titan_rl.loop.checkpoints import Checkpoints, restore
from titan_rl.loop.ledger import GroupOutcome, Ledger, new_ledger
from titan_rl.loop.lost_groups import RELEASE_SECONDS, LostGroups, check_stores_are_empty, release_samples
from titan_rl.loop.recording import Recorder
from titan_rl.loop.records import RunSummary, StepRecords
from titan_rl.loop.stages import evaluate, make_filter, warm_up
from titan_rl.loop.system import System
from titan_rl.loop.versions import EVALUATED, SERVED, Publications, ServedVersions
from titan_rl.metrics.activity import Activities
from titan_rl.metrics.rollout_record import Failed
from titan_rl.metrics.writer import MetricsWriter
from titan_rl.rollout.report import GroupReport
from titan_rl.scheduling.group import Batch, Group, GroupSize, Outcome
from titan_rl.scheduling.schedule import NEWEST, Untrainable, too_many_failures
from titan_rl.types import PolicyVersion
from titan_rl.view.display import RunDisplay

_log = logging.getLogger(__name__)


class TrainingLoop:
    """Trains `loop.steps` steps and evaluates before, during and after. Belongs to one event loop."""

    def __init__(
        self,
        system: System,
        *,
        display: RunDisplay,
        metrics: MetricsWriter,
        checkpoints: Checkpoints | None = None,
        ledger: Ledger | None = None,
        recorder: Recorder | None = None,
        restore_from: Path | None = None,
        on_start: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`checkpoints`: writes them; None: nobody does. `ledger`: of the checkpoint in the directory `restore_from`,
        where the run goes on. `on_start`: called when the trainer has the weights from which it begins or goes on."""
        config = system.config
        self._system = system
        self._display = display
        self._checkpoints = checkpoints
        self._restore_from, self._on_start = restore_from, on_start
        self.ledger = ledger = ledger or new_ledger(config)
        self.summary = ledger.summary
        self._buffer, self._schedule, self._streak = ledger.buffer, ledger.schedule, ledger.streak
        self._reports, self._outcomes = ledger.reports, ledger.outcomes
        self._newest: deque[Failed | None] = deque(maxlen=NEWEST)  # rollouts of decided groups
        self._filter = make_filter(config.loop.filter)
        self._recorder = recorder = recorder or Recorder(system.rollouts)
        self._activity = activity = Activities(clock=clock)
        self.records = StepRecords(self.summary, self._buffer, system, recorder, activity, display, metrics)
        display.follow(activity.open)
        changes = self._changes = Changes(display, activity)
        self._publications = Publications(system.trainer, changes, max_live=config.weights_settings().max_live)
        self._versions = ServedVersions(self._buffer, self._publications, system.router, changes)
        self._lost = LostGroups(ledger, system.rollouts, changes)
        self._exact = self._buffer.limits.exact_versions
        rollout = config.rollout
        self._size = GroupSize(first=rollout.samples_per_group, most=rollout.most_samples, grown=ledger.grown)
        self.has_weights = restore_from is None
        """Whether the trainer holds weights of this run: not while it is being restored."""
        self._stepping: asyncio.Future[None] | None = None  # the step that is under way, with its cut, or the last one

    async def run(self) -> RunSummary:
        """Do the whole run, or the rest of it. The final weights of the policy are the ones that were evaluated last.
        Call `end` in any case, after what is to be saved is saved, or `leave`. After RollbackNeeded it has left."""
        system = self._system
        system.rollouts.on_lost, system.trainer.on_state_lost = self._lost.store_lost, self._changes.notify
        self._display.print_line(self._buffer.limits.describe())
        seconds, warn = system.config.loop.watchdog_seconds, self._changes.warn
        watchdog = asyncio.create_task(self._activity.watch(seconds, lambda found: warn(f"watchdog: {found}")))
        failures: tuple[BaseException, ...] = ()
        try:
            if self._restore_from is None:
                if again := self._buffer.trainer_version.incarnation:  # the trainer's state was lost: it begins anew
                    await system.trainer.start_over(again)
                await warm_up(system, self._display, self._activity)
                await system.trainer.freeze_reference()
                self._on_start()
            else:
                await self._restore(self._restore_from)
            self.has_weights = True
            await self._publish(first=True)
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(self._versions.watch())
                work = [self._data(tasks), self._train(), self._publisher(), self._evaluator()]
                if self._exact:
                    done = self._schedule.all_done
                    work += [self._versions.serve_exactly(done, tasks), self._versions.release_old(done)]
                await asyncio.wait([tasks.create_task(each) for each in work])
                watch.cancel()
        except BaseExceptionGroup as group:
            failures = group.exceptions
        except BaseException as error:
            failures = (error,)
        finally:
            watchdog.cancel()
            await asyncio.gather(watchdog, return_exceptions=True)
        for later in failures[1:]:
            _log.warning("failed after the first: %s", later)
        if failures:
            if isinstance(failures[0], RollbackNeeded):
                await self.leave()
            raise failures[0]
        return self.summary

    async def save(self) -> str:
        """Write a last checkpoint, after the step that is under way; returns where it is, in words."""
        if self._stepping is not None:
            await asyncio.wait({self._stepping})
            if (error := self._stepping.exception()) is not None:
                _log.warning("the last step failed: %s", error)
        await self._recorder.settled()
        if self._checkpoints is None or not self.has_weights:
            return ""
        await self._checkpoints.written()
        await self._checkpoints.cut(self.ledger, self._publications, self._activity)
        newest = await self._checkpoints.written()
        return f"the newest checkpoint is {newest}" if newest else ""

    async def end(self, *, failed: bool, seconds: float | None = RELEASE_SECONDS) -> None:
        """Release everything that the run still owns, if it has failed as far as that goes within `seconds`. Raises
        InvariantError: the run has not failed and trained all that it admitted, and yet stores hold samples."""
        self._system.rollouts.on_lost = lambda reason: None  # the workers end: nothing is played again
        if self._stepping is not None:
            self._stepping.cancel()
            await asyncio.gather(self._stepping, return_exceptions=True)
        if failed or self._buffer.counts["active"]:  # some are left if it stops early, or goes on for fewer steps
            await release_samples(self._system.rollouts, self._reports.values(), seconds=seconds)
        else:
            await check_stores_are_empty(self._system.rollouts)

    async def leave(self) -> None:
        """End so that another loop can go on with the same parts: nothing of this one is in its way."""
        await self.end(failed=True, seconds=None)
        if self._checkpoints is not None:
            await self._checkpoints.written()
        await self._publications.drop()

    async def _restore(self, directory: Path) -> None:
        """Bring every part to where it was when the checkpoint was cut. Evaluations that were under way then are done
        first, from their beginning."""
        with self._activity("restore", step=self._buffer.trainer_version.step):
            await restore(self.ledger, directory, self._system)
        self._on_start()
        self._display.print_line(
            f"going on after step {self._buffer.trainer_version.step} from {directory}: {len(self._reports)} finished "
            f"groups are kept, {self._buffer.counts['waiting']} are played again"
        )
        for version, holders in self.ledger.older.items():
            await self._publications.publish_again(directory, version, holders)
            if EVALUATED in holders:
                if version.step > self._schedule.evaluated:
                    await self._versions.serve(version, alone=True)
                    async with asyncio.TaskGroup() as tasks:
                        watch = tasks.create_task(self._versions.watch())
                        await self._evaluate(version)
                        watch.cancel()
                await self._publications.release(version, EVALUATED)

    # The tasks.

    async def _data(self, tasks: asyncio.TaskGroup) -> None:
        """Consumes the stream of prompts. Waits for a free slot, or a group to be played again. Woken by the publisher
        and by groups that are filtered, fail or are lost. Produces a rollout task per group. On failure: the run."""
        playing: set[asyncio.Task[None]] = set()
        while await self._changes.until(
            "data",
            lambda: "a free slot",
            lambda: self._versions.startable() or self._schedule.admissible(),
            self._schedule.all_trained,
        ):
            self._buffer.admit(self._schedule.admissible())
            for group in self._versions.startable():
                task = tasks.create_task(self._rollout(self._buffer.start(group.group_id)))
                playing.add(task)
                task.add_done_callback(playing.discard)
        for task in playing:  # some are left if the run stops early
            task.cancel()

    async def _rollout(self, group: Group) -> None:
        """Consumes a started group. Waits for its report. Woken by the rollout workers. Produces a finished group, or
        one that is filtered or failed. If what plays it is gone, it is played again. On failure of all generators: the
        run."""
        with self._activity("rollout", group=group.group_id, attempt=group.attempt):
            prompt, version = group.group_id, group.min_version
            request = self._system.train_group(
                prompt, version, self._size.at(version.step), exact=self._exact, attempt=group.attempt
            )
            try:
                report = await self._system.rollouts.run_group(request)
            except ActorGone as error:  # its worker, or the gateway of its programs
                return self._lost.player_lost(group, error)
        outcome = replace(await self._ended(group, report), rollouts=tuple(each.failed for each in report.rollouts))
        if self._buffer.is_undecided(group.group_id):
            self._outcomes[group.group_id] = outcome
        while (decided := self._buffer.decide()) is not None:
            self._count(decided, self._outcomes.pop(decided))
            self._buffer.admit(self._schedule.admissible())
        self._changes.notify()

    async def _ended(self, group: Group, report: GroupReport) -> GroupOutcome:
        solved = Untrainable.SOLVED if report.solved else None
        if not report.samples.trained_tokens:
            await self._system.rollouts.release(report.samples)
            self.records.failed(report)
            self._buffer.drop(group.group_id, Outcome.FAILED)
            why = Untrainable.FAILED if report.first_error else Untrainable.EMPTY
            return GroupOutcome(solved or why, report.first_error)
        if refusal := self._filter(report):
            await self._system.rollouts.release(report.samples)
            self.summary.filtered_lengths += [each.sampled_tokens for each in report.rollouts]
            self._buffer.drop(group.group_id, Outcome.FILTERED)
            return GroupOutcome(solved or Untrainable.FILTERED, refusal)
        self._reports[group.group_id] = report
        oldest = report.oldest_version
        self._buffer.finish(group.group_id, None if oldest is None else PolicyVersion.decode(oldest))
        rewards = f"all {len(report.rollouts)} rollouts got {next(iter(report.rewards), 0.0):g}"
        return GroupOutcome(solved or Untrainable.EQUAL_REWARDS if self._is_still(report) else None, rewards)

    def _is_still(self, report: GroupReport) -> bool:
        """Whether equal rewards teach nothing."""
        still = len(report.rewards) <= 1 and not any(ref.advantage for ref in report.samples.refs)
        trainer = self._system.config.trainer
        return still and not (trainer.kl.teacher or trainer.critic.coefficient)  # they teach without different rewards

    def _count(self, group_id: int, outcome: GroupOutcome) -> None:
        if self.summary.stopped_early:
            return
        self._newest.extend(outcome.rollouts)
        if failures := too_many_failures(self._newest, self._system.config.rollout.failure_share):
            raise NothingToTrain(failures)
        if (why := outcome.untrainable) is None:
            return self._streak.trainable()
        if self._streak.untrainable(group_id, why, outcome.detail):
            self._stop_early()

    async def _train(self) -> None:
        """Consumes P finished groups. Waits for them. Woken by rollouts. Produces the trainer's next version. On
        failure: lost samples are played again, anything else ends the run."""
        schedule, until = self._schedule, self._changes.until
        while batch := await until("trainer", schedule.trainer_waits_for, self._take, schedule.all_trained):
            self._stepping = asyncio.ensure_future(self._step_and_cut(batch))
            await asyncio.shield(self._stepping)  # a run that ends saves a step that is under way, and its numbers

    def _take(self) -> Batch | None:
        """Raises RollbackNeeded even while no batch is ready: without the weights that are lost with the trainer's
        host, it might never be."""
        self._system.trainer.require_state()
        return self._schedule.take()

    async def _step_and_cut(self, batch: Batch) -> None:
        await self._step(batch)
        version, every = self._buffer.trainer_version, self._system.config.checkpoint.every
        due = every and version.step % every == 0
        if due and batch.version < version and not self._schedule.all_trained() and self._checkpoints:
            await self._checkpoints.cut(self.ledger, self._publications, self._activity)

    async def _step(self, batch: Batch) -> None:
        reports = [self._reports[group_id] for group_id in batch.group_ids]
        samples = SampleBatch.concat(report.samples for report in reports)
        step = batch.version.step + 1
        recording = self._recorder.begin(step, reports)
        try:
            with self._activity("train", step=step, samples=len(samples)):
                trained = await self._system.trainer.train_step(samples, recording.tokens)
        except SamplesLost as error:
            return await self._lost.batch_lost(batch, error)
        self._recorder.finish(recording)
        groups = [(len(each.rollouts), self._is_still(each) and not each.solved) for each in reports]
        if self._size.trained(step, groups):
            self._display.print_line(f"groups of {self._size.at(step)} from here on: most had equal rewards")
        self._buffer.trained(PolicyVersion(batch.version.incarnation, step))
        for group_id in batch.group_ids:
            del self._reports[group_id]
        self._changes.notify()
        held: list[HeldReport] = []
        try:
            held = await self._system.rollouts.release(samples)
        finally:
            await self.records.step(batch, reports, trained, held)

    async def _publisher(self) -> None:
        """Consumes the trainer's versions. Waits for one that is not published, and for a free publication slot. Woken
        by trainer and evaluator. Produces the version under which new groups are played. On failure: the run."""
        ready, over = self._schedule.may_publish, self._schedule.all_published
        while await self._changes.until("publisher", lambda: "the trainer's next version", ready, over):
            await self._publish()

    async def _evaluator(self) -> None:
        """Consumes versions that are due. Waits for the publisher and is woken by it. Produces an evaluation. On
        failure: the run."""
        due, over = self._schedule.next_due, self._schedule.all_evaluated
        while version := await self._changes.until("evaluator", lambda: "a version that is due", due, over):
            await self._evaluate(version)
            await self._versions.end_evaluation(version)
            self._changes.notify()

    async def _evaluate(self, version: PolicyVersion) -> None:
        with self._activity("evaluate", version=version):
            evaluation = await evaluate(self._system, version)
        self.records.evaluation(evaluation)
        self._schedule.evaluated = version.step

    async def _publish(self, *, first: bool = False) -> None:
        """Publish the trainer's weights, bring every generator to them, free the previous publication.

        Only the pull overlaps with the next step. The trainer writes the publication between two steps. Writing it in a
        second thread would save nothing: its 0.5–2 % of a step would come from the cores that the step computes with.
        """
        before = self._publications.newest
        version = (await self._publications.publish(SERVED)).version
        if self._exact and not first:
            return self._published(version)
        pull = await self._versions.serve_newest(version, alone=first)
        self.records.pulled(pull)
        # Only after the pull: otherwise the first generator with the version would get all groups that wait for it.
        self._published(pull.version)
        if before is not None and not first:
            await self._publications.release(before.version, SERVED)
            self._changes.notify()

    def _published(self, version: PolicyVersion) -> None:
        if self._schedule.is_due(version):
            self._schedule.make_due(version)
            self._publications.hold(version, EVALUATED)
        self._buffer.published(version)
        self._changes.notify()

    def _stop_early(self) -> None:
        """Nothing is left to learn: make the running step, or else the previous one, the last. Then the run ends as
        usual: the last version is published and evaluated."""
        newest = self._publications.newest
        served = newest.version if newest is not None and newest.version == self._buffer.published_version else None
        if self._schedule.stop_early(served) and served is not None:
            self._publications.hold(served, EVALUATED)
        why = f"nothing is left to learn after step {self._schedule.last}: {self._streak.describe()}"
        self.summary.stopped_early = why
        self._display.print_line(f"stopping early: {why}")
