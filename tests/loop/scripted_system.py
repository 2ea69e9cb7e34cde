"""The real `TrainingLoop` over parts that do what a test tells them, in one process and without a clock.

Everything that a real part takes time for passes a gate of `Script`, named by what it is: "play 3", "train 1",
"pull v2", "evaluate v0", … A gate that is held stays closed until the test opens it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from scripted_parts import Script, ScriptedRouter, ScriptedTrainer, settle

from titan_rl.config import CheckpointConfig, EvaluationConfig, LoopConfig, RunConfig, WeightsConfig
from titan_rl.data_plane.sample_batch import SampleBatch, SampleRef
from titan_rl.data_plane.store import HeldReport
from titan_rl.errors import InvariantError
from titan_rl.loop.checkpoints import Checkpoints
from titan_rl.loop.ledger import new_ledger, read_ledger
from titan_rl.loop.loop import TrainingLoop
from titan_rl.loop.recording import Recorder
from titan_rl.loop.records import RunSummary
from titan_rl.loop.system import System
from titan_rl.metrics.rollout_record import RolloutRecord, RolloutWriter, TurnRecord
from titan_rl.policy.config import TrainerConfig, WarmupConfig
from titan_rl.rollout.config import RolloutConfig
from titan_rl.rollout.report import GroupReport
from titan_rl.run.runs import Resume
from titan_rl.types import NO_VERSION, GroupRequest, PolicyVersion, Purpose, StopReason
from titan_rl.view.display import RunDisplay


class ScriptedRollouts:
    """Plays what `outcome` says: the rewards of a group's rollouts; an empty tuple is a group that failed."""

    def __init__(self, script: Script, router: ScriptedRouter) -> None:
        self.script = script
        self.router = router
        self.held_out = 2
        self.outcome: Callable[[GroupRequest], tuple[float, ...]] = lambda request: (0.0, 1.0)
        self.started: list[GroupRequest] = []
        self.evaluated: list[PolicyVersion] = []
        self.owned: dict[int, int] = {}
        """Sample id → group."""
        self.released = 0
        self.evaluation: tuple[RolloutRecord, ...] = (rollout(0, 1.0), rollout(0, 1.0))
        """The rollout of each held-out prompt."""
        self.wanted = "{0}{0}"
        """Of group 0: 00."""
        self.store = "store0"
        """Of the one worker that lives."""
        self.on_lost: Callable[[str], None] = lambda reason: None
        self._next_id = 0

    def lose(self) -> None:
        """The worker dies with its samples, and another one takes its place."""
        self.store = f"store{int(self.store[5:]) + 1}"
        self.owned.clear()
        self.on_lost("rollout0 was killed")

    def holds(self, batch: SampleBatch) -> bool:
        return batch.stored_ids.keys() <= {self.store}

    async def play(self, request: GroupRequest) -> GroupReport:
        return await self.run_group(request)

    async def run_group(self, request: GroupRequest) -> GroupReport:
        self.started.append(request)
        again = f" again {request.attempt}" if request.attempt else ""
        what = "demonstrate" if request.purpose is Purpose.DEMONSTRATE else "play"
        served = request.exact_version or self.router.serving
        await self.script.gate(f"{what} {request.group_id}{again}")
        rewards = self.outcome(request)
        refs = [self._ref(request, served, index, reward) for index, reward in enumerate(rewards)]
        return GroupReport(
            group_id=request.group_id,
            purpose=request.purpose,
            attempt=request.attempt,
            rollouts=tuple(rollout(sample, reward, group=request.group_id) for sample, reward in enumerate(rewards))
            or (rollout(0, 0.0, "the task raised", group=request.group_id),),
            samples=SampleBatch.of(refs),
        )

    async def run_groups(self, requests: list[GroupRequest]) -> list[GroupReport]:
        """Evaluations only."""
        version = requests[0].min_version
        await self.script.gate(f"evaluate {version}")
        assert {request.exact_version for request in requests} == {version}
        await self.router.until(lambda: version in self.router.wanted)
        self.evaluated.append(version)
        return [
            GroupReport(
                group_id=request.group_id,
                purpose=request.purpose,
                attempt=0,
                rollouts=(msgspec.structs.replace(played, group=request.group_id, purpose=Purpose.EVALUATE),),
                samples=SampleBatch.of(()),
            )
            for request, played in zip(requests, self.evaluation, strict=True)
        ]

    async def describe(self, chosen: Sequence[RolloutRecord], reports: Sequence[GroupReport]) -> list[RolloutRecord]:
        return [
            msgspec.structs.replace(
                each,
                wanted=self.wanted.format(each.group),
                messages=[{"role": "user", "content": f"{each.group}="}, {"role": "assistant", "content": "7"}],
                turns=[TurnRecord(finish="length" if each.truncated else "stop", tokens=2)],
            )
            for each in chosen
        ]

    async def take_over(self, reports: Iterable[GroupReport]) -> list[GroupReport]:
        taken = []
        for report in reports:
            refs = [ref._replace(sample_id=ref.sample_id + 1000) for ref in report.samples.refs]
            self.owned |= {ref.sample_id: ref.group_id for ref in refs}
            taken.append(dataclasses.replace(report, samples=SampleBatch.of(refs)))
        return taken

    async def stop_groups(self) -> None:
        """The loop has cancelled what it waits for before it says so."""

    async def release(self, samples: SampleBatch) -> list[HeldReport]:
        for ref in samples.refs:
            if ref.store != self.store:
                continue
            if self.owned.pop(ref.sample_id, None) is None:
                raise InvariantError(f"sample {ref.sample_id} of group {ref.group_id} was released before")
            self.released += 1
        return await self.held()

    async def held(self) -> list[HeldReport]:
        return [HeldReport(self.store, dict(Counter(self.owned.values())), 64 * len(self.owned))]

    def _ref(self, request: GroupRequest, served: PolicyVersion | None, index: int, reward: float) -> SampleRef:
        self._next_id += 1
        self.owned[self._next_id] = request.group_id
        version = served.encode() if served is not None else NO_VERSION
        return SampleRef(
            store=self.store,
            sample_id=self._next_id,
            group_id=request.group_id,
            sample=index,
            length=4,
            trained_tokens=2,
            reward=reward,
            oldest_version=version,
            location="nowhere",
            offset=0,
            checksum=0,
            advantage=0.0,
        )


def rollout(
    sample: int, reward: float, error: str = "", *, group: int = 0, purpose: Purpose = Purpose.TRAIN
) -> RolloutRecord:
    return RolloutRecord(
        purpose=purpose,
        group=group,
        sample=sample,
        reward=reward,
        error=error,
        stop_reason=StopReason.STOP,
        turn_count=1,
        sampled_tokens=2,
        branch_count=1,
    )


class Metrics:
    def __init__(self) -> None:
        self.written: list[tuple[int, dict[str, float]]] = []

    def write(self, step: int, numbers: dict[str, float], *, groups: Sequence[int] = ()) -> None:
        self.written.append((step, numbers))

    @property
    def nbytes(self) -> int:
        return len(self.written)

    def sync(self) -> None: ...


class World:
    """One loop and its parts."""

    def __init__(
        self,
        *,
        steps: int = 3,
        groups: int = 2,
        staleness: int = 0,
        window: int = 1,
        every: int = 0,
        max_live: int = 2,
        filter: str = "",
        untrainable_batches: int = 20,
        warmup: int = 0,
        enough_loss: float = 0.0,
        watchdog_seconds: float = 1e6,
        deterministic: bool = False,
        directory: Path | None = None,
        checkpoint_every: int = 1,
        restore: bool = False,
        recorded: bool = False,
        most_samples: int = 0,
    ) -> None:
        """
        Args:
            directory: where checkpoints are written; None: nowhere.
            recorded: record rollouts there.
            restore: go on from the newest of them.
        """
        config = RunConfig(
            deterministic=deterministic,
            loop=LoopConfig(
                steps=steps,
                groups_per_step=groups,
                max_staleness=staleness,
                window=window,
                filter=filter,
                untrainable_batches=untrainable_batches,
                watchdog_seconds=watchdog_seconds,
            ),
            rollout=RolloutConfig(samples_per_group=2, most_samples=most_samples),
            evaluation=EvaluationConfig(every=every),
            weights=WeightsConfig(max_live=max_live),
            checkpoint=CheckpointConfig(every=checkpoint_every, keep=100),
            trainer=TrainerConfig(
                warmup=WarmupConfig(steps=warmup, batch=2, lr_warmup_steps=0, enough_loss=enough_loss)
            ),
        )
        self.now = 0.0
        self.script = Script()
        self.trainer = ScriptedTrainer(self.script)
        self.router = ScriptedRouter(self.script)
        self.rollouts = ScriptedRollouts(self.script, self.router)
        self.metrics = Metrics()
        self._printed = io.StringIO()
        self.display = RunDisplay(steps=steps, live=False, console=Console(file=self._printed, width=10_000))
        self.system = System(
            config=config,
            model_path=Path(),
            trainer=self.trainer,  # type: ignore[arg-type]
            router=self.router,  # type: ignore[arg-type]
            rollouts=self.rollouts,  # type: ignore[arg-type]
            generators=lambda: {"generator0": None, "generator1": None},  # type: ignore[dict-item]
        )
        self.recorded = recorded
        self.begin(directory, restore=restore)

    def begin(self, directory: Path | None, *, restore: bool, incarnation: int = 0) -> None:
        """Make a loop, which may not be the first."""
        writer: Any = self.metrics
        found = Resume(directory).checkpoint(print) if directory is not None and restore else None
        ledger = read_ledger(found.directory) if found else new_ledger(self.system.config, incarnation)
        recorder, checkpoints = Recorder(self.rollouts), None  # type: ignore[arg-type]
        if directory is not None and self.recorded:
            file = RolloutWriter(directory, keep_bytes=ledger.rollouts_bytes, warn=self.display.print_line)
            recorder = Recorder(self.rollouts, file, each=1)  # type: ignore[arg-type]
        if directory is not None:
            say = self.display.print_line
            checkpoints = Checkpoints(directory, self.system, metrics=writer, say=say, recorder=recorder)
        self.loop = TrainingLoop(
            self.system,
            display=self.display,
            metrics=writer,
            checkpoints=checkpoints,
            ledger=ledger,
            recorder=recorder,
            restore_from=found and found.directory,
            clock=lambda: self.now,
        )

    @property
    def printed(self) -> str:
        return self._printed.getvalue()

    @property
    def playing(self) -> list[int]:
        """Training groups in flight, where plays are held."""
        return sorted(int(gate.split()[1]) for gate in self.script.held if gate.startswith("play "))

    async def run(self) -> RunSummary:
        """The run and its end, with nothing to be saved between."""
        failed = True
        try:
            summary = await self.loop.run()
            failed = False
            return summary
        finally:
            await self.loop.end(failed=failed)

    @asynccontextmanager
    async def running(self) -> Any:
        """The run as a task that has come as far as it can; ended at the end."""
        task = asyncio.create_task(self.run())
        try:
            await settle()
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def holding(*kinds: str) -> Callable[[str], bool]:
    """Hold every gate whose first word is one of these."""
    return lambda gate: gate.split()[0] in kinds


def plays(groups: Iterable[int]) -> list[str]:
    return [f"play {group}" for group in groups]
