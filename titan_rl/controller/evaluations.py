"""Greedy evaluation on held-out prompts, and when its version is served.

- Where training continues meanwhile, one of several generators is pinned to the version, and the others go on.
- Where versions are exact, the version is served beside others.
- Else the whole fleet stays at the version until the evaluation is over.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from titan_rl.controller.publications import EVALUATED, Publications
from titan_rl.errors import CallTimeout, GeneratorFailed, GeneratorNotServing, TaskError, WeightsError
from titan_rl.observability.activity import Activities
from titan_rl.rollout.record import Record, choose_evaluated, record
from titan_rl.scheduling.group_buffer import GroupBuffer
from titan_rl.scheduling.schedule import Schedule
from titan_rl.types import PolicyVersion, Purpose
from titan_rl.weights.manifest import FleetPull, Publication

if TYPE_CHECKING:
    from titan_rl.controller.system import System

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Means over the held-out prompts whose rollouts were graded."""

    version: PolicyVersion
    prompts: int
    """Those that were graded."""
    exact_match: float
    reward: float
    rollouts: tuple[Record, ...] = ()
    """Records of the first that are wrong, and the first that are right."""
    failed: int = 0
    """Prompts without a reward because user code failed. They are left out of all means."""
    first_error: str = ""


class Evaluations:
    """The evaluations of one run, one at a time. Belongs to one event loop."""

    def __init__(
        self,
        system: System,
        buffer: GroupBuffer,
        schedule: Schedule,
        publications: Publications,
        activity: Activities,
        *,
        record: Callable[[Evaluation], None],
        warn: Callable[[str], None],
    ) -> None:
        self._system = system
        self._schedule = schedule
        self._publications = publications
        self._activity = activity
        self._record = record
        self._warn = warn
        self._exact = buffer.knobs.exact_versions
        self._asynchronous = buffer.knobs.max_staleness > 0
        self.pinned: str | None = None
        """The generator that the running evaluation has for itself."""

    def keep(self, version: PolicyVersion) -> None:
        """Keep the publication of a version that is due."""
        self._publications.hold(version, EVALUATED)
        if self._exact:
            self._schedule.release_fleet(version)  # it is served beside later ones

    async def run(self, version: PolicyVersion, changed: Callable[[], None]) -> None:
        """Evaluate a version that was kept, and let it go. If its pinned generator is lost, it is not evaluated.

        Args:
            changed: called when something that others wait for may have happened.
        """
        if self._pins and version.step < self._schedule.last:
            try:
                self.pinned = await self._system.router.pin(version)
            except GeneratorNotServing as reason:
                _log.info("%s is evaluated by all generators: %s", version, reason)
        if self.pinned is not None:
            self._schedule.release_fleet(version)
            changed()
        try:
            await self.evaluate(version)
            await self.unpin()
        except GeneratorFailed as error:
            if self.pinned is None:
                raise
            self.pinned = None
            self._warn(f"{version} is not evaluated, the generator that was pinned for it is lost: {error}")
            self._schedule.evaluated(version)
        self._schedule.release_fleet(version)
        changed()
        await self._publications.release(version, EVALUATED)
        changed()

    async def go_on(
        self,
        directory: Path,
        older: Mapping[PolicyVersion, set[str]],
        pull: Callable[[Publication], Awaitable[FleetPull]],
    ) -> None:
        """Publish the older versions of a checkpoint again, for their holders. Those that were being evaluated are
        evaluated first, from the beginning."""
        for version, holders in older.items():
            publication = await self._publications.publish_again(directory, version, holders)
            if EVALUATED in holders:
                if not self._schedule.is_evaluated(version):
                    await pull(publication)
                    await self.evaluate(version)
                await self._publications.release(version, EVALUATED)

    async def evaluate(self, version: PolicyVersion) -> None:
        """Evaluate a version that is served."""
        with self._activity("evaluate", version=version, on=self.pinned or "all generators"):
            evaluation = await evaluate(self._system, version, exact=self._exact, pinned_to=self.pinned)
        self._record(evaluation)
        self._schedule.evaluated(version)

    async def unpin(self) -> None:
        """End the pin, if there is one."""
        if (pinned := self.pinned) is None:
            return
        with self._activity("unpin", generator=pinned):
            try:
                await self._system.router.unpin(pinned)
            except (WeightsError, GeneratorFailed, CallTimeout) as error:  # as in a pull: it waits for the next one
                self._warn(f"{pinned} does not serve after its evaluation: {error}")
        self.pinned = None

    @property
    def _pins(self) -> bool:
        """Whether generation continues during an evaluation, so that a generator for itself pays off."""
        return self._asynchronous and not self._exact and len(self._system.generators) > 1


async def evaluate(
    system: System, version: PolicyVersion, *, exact: bool = False, pinned_to: str | None = None
) -> Evaluation:
    """Play the held-out prompts greedily under `version`.

    Args:
        version: served until the evaluation is over, by every generator or, if set, by `pinned_to`.
        exact: other generators serve other versions meanwhile.
        pinned_to: a generator that this evaluation has for itself.

    Raises:
        TaskError: every rollout failed, or there is nothing to play.
    """
    if not system.rollouts.held_out:
        raise TaskError(f"the environment {system.config.environment.name} gave no held-out prompts to evaluate on")
    prompts = range(system.rollouts.held_out)
    groups = [system.held_out_group(prompt, version, exact=exact, pinned_to=pinned_to) for prompt in prompts]
    reports = await system.rollouts.run_groups(groups)
    rollouts = [rollout for report in reports for rollout in report.rollouts]
    errors = [error for report in reports for error in report.errors]
    errors += [error for report in reports for error in report.late]
    graded = [rollout for rollout in rollouts if not rollout.error]
    if not graded:
        raise TaskError(f"all {len(rollouts)} held-out rollouts failed; the first: {errors[0]}")
    chosen = choose_evaluated(reports)
    said = await system.rollouts.conversations(Purpose.EVALUATE, chosen)
    matches = [rollout.exact_match for rollout in graded]
    return Evaluation(
        version=version,
        prompts=len(graded),
        exact_match=sum(matches) / len(matches),
        reward=sum(rollout.reward for rollout in graded) / len(graded),
        rollouts=tuple(record(version.step, each, said[each.name], {}) for each in chosen if each.name in said),
        failed=len(errors),
        first_error=next(iter(errors), ""),
    )
