"""The parts of a scripted system (`scripted_system`): gates that a test holds and opens, the trainer, the router."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.errors import TrainingError
from titan_rl.policy.token_score_recorder import TokenScoreRecorder
from titan_rl.types import PolicyVersion
from titan_rl.weights.manifest import FleetPull, Manifest, Publication

TURNS_UNTIL_STILL = 300
"""Of the event loop; nothing here waits for anything but other tasks, so then whoever can go on has done so."""


async def settle() -> None:
    for _ in range(TURNS_UNTIL_STILL):
        await asyncio.sleep(0)


class Script:
    """Gates, what passed them, and the errors that wait behind some."""

    def __init__(self) -> None:
        self.holds: Callable[[str], bool] = lambda gate: False
        self.errors: dict[str, list[BaseException]] = {}
        """By gate: raised one by one by those who pass."""
        self.events: list[str] = []
        """"gate" when somebody arrives, "gate done" when it passes."""
        self.cancelled: list[str] = []
        self._closed: dict[str, asyncio.Event] = {}

    async def gate(self, name: str) -> None:
        self.events.append(name)
        if self.holds(name):
            closed = self._closed.setdefault(name, asyncio.Event())  # several may wait at one gate
            try:
                await closed.wait()
            except asyncio.CancelledError:
                self.cancelled.append(name)
                raise
            finally:
                self._closed.pop(name, None)
        if self.errors.get(name):
            raise self.errors[name].pop(0)
        self.events.append(f"{name} done")

    @property
    def held(self) -> list[str]:
        """Gates where somebody waits."""
        return list(self._closed)

    async def open(self, *names: str) -> None:
        """Let those pass who wait there, and everything that follows happen."""
        for name in names:
            self._closed[name].set()
        await settle()

    def at(self, event: str) -> int:
        """When it happened, among all events."""
        return self.events.index(event)


class ScriptedTrainer:
    def __init__(self, script: Script) -> None:
        self.script = script
        self.step = 0
        self.incarnation = 0
        self.restored: list[str] = []
        """From where, "" is the policy as it was loaded, and as which version."""
        self.batches: list[list[int]] = []
        """Group ids of every finished step."""
        self.live: list[PolicyVersion] = []
        self.freed: list[PolicyVersion] = []
        self.lost: Exception | None = None
        self.on_state_lost: Callable[[], None]

    def require_state(self) -> None:
        if self.lost is not None:
            raise self.lost

    async def train_step(self, samples: SampleBatch, recorder: TokenScoreRecorder | None = None) -> dict[str, float]:
        await self.script.gate(f"train {self.step + 1}")
        self.step += 1
        self.batches.append(list(dict.fromkeys(samples.group_ids)))
        await self.script.gate(f"news of {self.step}")
        return {"loss": 0.0, "entropy": 1.0}

    async def warm_up_step(self, samples: SampleBatch) -> dict[str, float]:
        await self.script.gate(f"warm up {samples.group_ids[0]}")
        return {"loss": 1e-6, "entropy": 1.0}

    async def push_model_state_dict(self) -> Publication:
        await self.script.gate(f"publish v{self.step}")
        version = PolicyVersion(self.incarnation, self.step)  # of the moment: the call may have waited for a step
        self.live.append(version)
        return Publication(channel="policy", version=version, manifest=Manifest(entries=(), nbytes=0), location="")

    async def release(self, publication: Publication) -> None:
        self.live.remove(publication.version)
        self.freed.append(publication.version)
        await self.script.gate(f"free {publication.version}")

    async def save(self, directory: Path) -> int:
        await self.script.gate("save")
        return self.step

    async def freeze_reference(self) -> None:
        await self.script.gate("freeze")

    async def begin_checkpoint(self, directory: Path, step: int, samples: SampleBatch) -> None:
        await self.script.gate(f"copy {self.step}")
        if step != self.step:
            raise TrainingError(f"no checkpoint of step {step}: the trainer is at step {self.step}")
        self.copied = (self.step, samples)

    async def finish_checkpoint(self, directory: Path, publications: tuple[Publication, ...]) -> None:
        step, samples = self.copied
        await self.script.gate(f"write {step}")
        assert all(publication.version in self.live for publication in publications)
        kept = [publication.version for publication in publications]
        (directory / "state").write_bytes(pickle.dumps((step, samples, kept)))

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(self.incarnation, self.step)

    async def restore(self, directory: Path, incarnation: int) -> None:
        await self.script.gate("restore")
        self.lost, self.incarnation = None, incarnation
        self.step, self.kept_samples, self.kept = pickle.loads((directory / "state").read_bytes())
        self.restored.append(f"{directory.name} {self.version}")

    async def start_over(self, incarnation: int) -> None:
        self.lost, self.step, self.incarnation = None, 0, incarnation
        self.restored.append(str(self.version))

    async def publish_again(self, directory: Path, version: PolicyVersion) -> Publication:
        await self.script.gate(f"publish {version} again")
        assert version in self.kept
        self.live.append(version)
        return Publication(channel="policy", version=version, manifest=Manifest(entries=(), nbytes=0), location="")


class ScriptedRouter:
    """Serves all that is wanted; with `one_generator` the newest only once nothing else is."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.serving: PolicyVersion | None = None
        """The newest."""
        self.wanted: list[PolicyVersion] = []
        self.one_generator = False
        self.failures: dict[str, str] = {}
        """Of every pull."""
        self.unavailable = ""
        """Why a version that was served is served no more."""
        self._changed = asyncio.Event()

    async def pull_model_state_dict(self, *wanted: Publication, version: PolicyVersion | None = None) -> FleetPull:
        self.wanted = sorted(publication.version for publication in wanted)
        self.say_unavailable("")
        version = version or self.wanted[-1]
        await self.script.gate(f"pull {version}")
        await self.until(lambda: not self.one_generator or self.wanted[0] >= version)
        self.serving = version
        return FleetPull(version=version, serving=(), failures=self.failures)

    async def until_unavailable(self) -> str:
        await self.until(lambda: bool(self.unavailable))
        return self.unavailable

    def say_unavailable(self, why: str) -> None:
        self.unavailable = why
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._changed.wait()

    async def fleet_status(self) -> list[Any]:
        return []
