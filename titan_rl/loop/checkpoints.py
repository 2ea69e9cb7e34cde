"""Exact resume: a checkpoint is one consistent cut through a run, between two steps.

    cut      the ledger is encoded, the trainer copies its state and the finished samples in memory    training waits
    write    trainer: state, samples, older versions; here: ledger, config, packages                   training goes on
    commit   checksums, everything on disk, then one rename; then older checkpoints are removed

- The ledger and the trainer are of the same step: the trainer is between two steps while the ledger is encoded.
- A checkpoint holds data and no code: to read one runs nothing that is in it.
- Of the groups in flight, finished ones are kept with their samples. The others are played again after a restart, by
  the versions that played them before, where that must be so: those publications are kept too.
- A checkpoint that cannot be written costs no run. It is said, and the ones before it are as they were.
"""

import asyncio
import dataclasses
import itertools
import json
import logging
from collections.abc import Callable
from pathlib import Path

from titan_rl.actors.trainer import SAMPLES
from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.data_plane.store import references_in
from titan_rl.directories import CONFIG
from titan_rl.errors import ActorGone, SampleError, StorageError
from titan_rl.importing import installed
from titan_rl.loop.checkpoint_files import checkpoints, commit, directory_of, new_draft, prune, remove_drafts
from titan_rl.loop.ledger import LEDGER, PACKAGES, Ledger
from titan_rl.loop.recording import Recorder
from titan_rl.loop.system import System
from titan_rl.loop.versions import EVALUATED, KEPT, SERVED, Publications
from titan_rl.metrics.activity import Activities
from titan_rl.metrics.writer import MetricsWriter
from titan_rl.overrides import to_toml
from titan_rl.rollout.report import GroupReport
from titan_rl.types import PolicyVersion

_NAMED_PACKAGES = ("titan-rl", "torch", "torchmonarch", "torchtitan", "vllm", "numpy", "transformers")
"""Those that decide what a run computes."""

_log = logging.getLogger(__name__)


async def restore(ledger: Ledger, directory: Path, system: System) -> None:
    """Bring the trainer, the sample stores and the ledger to where they were when this checkpoint was cut. Raises
    CheckpointError: the trainer cannot read it; SampleError: a sample is damaged."""
    buffer, config = ledger.buffer, system.config
    before = max(buffer.trainer_version.incarnation, system.trainer.version.incarnation)
    version = PolicyVersion(before + 1, buffer.trainer_version.step)
    reports = _reports_in(directory, ledger)
    ledger.reports.clear()  # their references are to stores of a process that is gone: nothing here to release
    await system.trainer.restore(directory, version.incarnation)
    taken = await system.rollouts.take_over(reports)
    ledger.reports.update({report.group_id: report for report in taken})
    buffer.restart_from(version)
    if config.loop.steps != ledger.schedule.steps:
        ledger.summary.stopped_early = ""
        ledger.streak.trainable()
    ledger.schedule.change_settings(config.loop.steps, config.evaluation.every)


def _reports_in(directory: Path, ledger: Ledger) -> list[GroupReport]:
    """The reports of a checkpoint's finished groups; their samples lie in its file."""
    reports = ledger.reports.values()
    refs = iter(references_in(directory / SAMPLES, SampleBatch.concat(report.samples for report in reports)).refs)
    return [
        dataclasses.replace(report, samples=SampleBatch.of(itertools.islice(refs, len(report.samples))))
        for report in reports
    ]


@dataclasses.dataclass(eq=False)
class Checkpoints:
    """Writes the checkpoints of one run, one at a time. Belongs to one event loop."""

    run: Path
    system: System
    metrics: MetricsWriter
    say: Callable[[str], None]
    """Told what was not written, and why."""
    recorder: Recorder

    def __post_init__(self) -> None:
        self._writing: asyncio.Task[None] | None = None

    async def cut(self, ledger: Ledger, publications: Publications, activity: Activities) -> None:
        """Cut between two steps. Returns when training may go on; the checkpoint is written beside it. Before the first
        step there is nothing to write: a run that ends there starts over. A step has one checkpoint, its first. Raises
        TrainingError: the trainer is at another step than the ledger."""
        step = ledger.buffer.trainer_version.step
        if self._writing is not None and not self._writing.done():
            return self.say(f"no checkpoint of step {step}: the one before is still being written")
        await self.written()
        await self.recorder.settled()
        if not step or directory_of(self.run, step).exists():
            return
        ledger.older = publications.older_than(
            ledger.buffer.trainer_version,
            needed_by={SERVED, EVALUATED} if ledger.buffer.limits.exact_versions else {EVALUATED},
        )
        ledger.metrics_bytes, ledger.rollouts_bytes = self.metrics.nbytes, self.recorder.nbytes
        encoded = ledger.encode()
        samples = SampleBatch.concat(report.samples for report in ledger.reports.values())
        for version in ledger.older:
            publications.hold(version, KEPT)
        try:
            with activity("checkpoint", step=step):
                draft = new_draft(self.run, step)
                await self.system.trainer.begin_checkpoint(draft, step, samples)
        except (StorageError, SampleError, ActorGone) as error:
            await self._give_up(step, error, publications)
        else:
            self._writing = asyncio.create_task(self._write(draft, step, encoded, publications))

    async def written(self) -> Path | None:
        """Wait until the checkpoint that is being written is there; returns the newest one. None: there is none."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing
        return next(reversed(checkpoints(self.run)), None)

    async def _write(self, draft: Path, step: int, encoded: bytes, publications: Publications) -> None:
        kept = tuple(publications[version] for version in publications.held_by(KEPT))
        try:
            await self.system.trainer.finish_checkpoint(draft, kept)
            await asyncio.to_thread(self._commit, draft, step, encoded)
        except Exception as error:  # whatever it is, a trainer that is gone too
            await self._give_up(step, error, publications)
        else:
            await publications.release_all(KEPT)

    def _commit(self, draft: Path, step: int, encoded: bytes) -> None:
        (draft / LEDGER).write_bytes(encoded)
        (draft / CONFIG).write_text(to_toml(self.system.config), encoding="utf-8")
        versions = {name: found for name in _NAMED_PACKAGES if (found := installed(name))}
        (draft / PACKAGES).write_text(json.dumps(versions, indent=1) + "\n", encoding="utf-8")
        self.metrics.sync()  # a checkpoint does not outlive the steps before it
        commit(draft)
        prune(self.run, keep=self.system.config.checkpoint.keep, newest=step)

    async def _give_up(self, step: int, error: Exception, publications: Publications) -> None:
        self.say(f"no checkpoint of step {step}, the run goes on: {error}")
        _log.warning("no checkpoint", exc_info=error)
        await asyncio.to_thread(remove_drafts, self.run)
        await publications.release_all(KEPT)
