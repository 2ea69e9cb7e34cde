"""Which group is admitted, played, trained, and when: the whole of asynchronous scheduling.

    admit ─▶ WAITING ─ start ─▶ RUNNING ─ finish ─▶ FINISHED ─ take ─▶ TAKEN ─ trained ─▶ gone
                ▲                  │                    │                │
                └────── lost ──────┴────────────────────┴────────────────┘    filtered, failed: gone, from any state

Always true, after every method:

- every admitted group leaves exactly once: `admitted == trained + filtered + failed + active`;
- at most (S + 1)·P groups hold a slot. A group holds it from its admission until it is filtered or has failed, or
  until the version that it was trained into is published;
- a step trains exactly P groups; at most one batch is out at a time;
- every group of a batch is at most S + ⌈(W - 1)/P⌉ steps old, and 0 at S = 0. A violation raises: it would be a bug.

`README.md` says how a batch is put together from the line, proves the bound, and that nobody starves. In a
deterministic run admissions follow `logical_time`, with a proof of its own.

Pure: the caller plays groups, trains batches and publishes versions, and says here what happened.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import msgspec

from titan_rl.errors import InvariantError
from titan_rl.scheduling.config import StalenessLimits
from titan_rl.scheduling.group import Batch, Counts, Group, GroupState, Outcome
from titan_rl.scheduling.logical_time import LogicalTime
from titan_rl.types import PolicyVersion

INITIAL_VERSION = PolicyVersion(0, 0)
"""Of a trainer that has not trained yet."""


class GroupBuffer:
    """The groups of one run.

    A method called with something impossible (a group in another state than the method expects, a version that does not
    follow) raises ValueError and changes nothing.
    """

    def __init__(self, limits: StalenessLimits, *, version: PolicyVersion = INITIAL_VERSION) -> None:
        """`version`: what the trainer holds and what is published."""
        self.limits = limits
        self._trainer = version
        self._published = version
        self._groups: dict[int, Group] = {}  # active
        self._waiting: dict[int, None] = {}
        # The line. Ids grow with every admission, so theirs is its order; those not active overtook the anchor.
        self._line: OrderedDict[int, None] = OrderedDict()
        self._batch: list[int] = []  # TAKEN
        self._short = 0  # at least so many more must finish before a batch is ready,
        self._anchor: int | None = None  # or this one, behind which the window begins
        self._unpublished: deque[tuple[int, int]] = deque()  # (step, groups trained in it)
        self._admitted = 0  # so it is the next id
        self._ended = dict.fromkeys(Outcome, 0)
        self._time = LogicalTime(limits)
        self._undecided: dict[int, None] = {}  # in the order in which they ended, where that decides

    def state_dict(self) -> dict[str, Any]:
        return {
            "knobs": asdict(self.limits),
            "logical_time": self._time.state_dict(),
            "trainer": self._trainer,
            "published": self._published,
            "groups": [asdict(group) for group in self._groups.values()],
            "line": [*self._line],
            "batch": self._batch,
            "unpublished": [*self._unpublished],
            "admitted": self._admitted,
            "ended": self._ended,
            "undecided": [*self._undecided],
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> GroupBuffer:
        buffer = cls(StalenessLimits(**state["knobs"]))
        buffer._time = LogicalTime.from_state_dict(state["logical_time"], buffer.limits)
        buffer._trainer, buffer._published = PolicyVersion(*state["trainer"]), PolicyVersion(*state["published"])
        for group in msgspec.convert(state["groups"], list[Group]):
            buffer._groups[group.group_id] = group
            if group.state is GroupState.WAITING:
                buffer._waiting[group.group_id] = None
        buffer._line = OrderedDict.fromkeys(state["line"])
        buffer._batch = state["batch"]
        buffer._unpublished = deque((step, count) for step, count in state["unpublished"])
        buffer._admitted = state["admitted"]
        buffer._ended = {Outcome(outcome): count for outcome, count in state["ended"].items()}
        buffer._undecided = dict.fromkeys(state["undecided"])
        return buffer

    # What may happen next.

    @property
    def trainer_version(self) -> PolicyVersion:
        return self._trainer

    @property
    def published_version(self) -> PolicyVersion:
        """The newest version that generators may be asked for."""
        return self._published

    @property
    def free_slots(self) -> int:
        if self.limits.deterministic:
            return self._time.free_slots(self._admitted)
        return self.limits.slots - len(self._groups) - sum(count for _, count in self._unpublished)

    @property
    def expected(self) -> int:
        """Groups that were trained or may be."""
        if self.limits.deterministic:
            return self._time.expected(self._admitted)
        return self._ended[Outcome.TRAINED] + len(self._groups)

    @property
    def counts(self) -> Counts:
        states = Counter(group.state for group in self._groups.values())
        return Counts(
            admitted=self._admitted,
            **{outcome.value: count for outcome, count in self._ended.items()},
            **{state.value: states[state] for state in GroupState},
        )

    def __getitem__(self, group_id: int) -> Group:
        """An active group. Raises KeyError."""
        return self._groups[group_id]

    def waiting(self) -> tuple[Group, ...]:
        """Groups whose rollouts are to be started, oldest first: those whose version is published."""
        waiting = (self._groups[group_id] for group_id in sorted(self._waiting))
        return tuple(group for group in waiting if group.min_version <= self._published)

    @property
    def last_certain_step(self) -> int:
        """The step until which the groups of all batches are known."""
        if self.limits.deterministic:
            return self._time.step
        return self._trainer.step + bool(self._batch)

    def active_versions(self) -> set[PolicyVersion]:
        """Versions that play the active groups, or would play them again if they were lost."""
        return {group.min_version for group in self._groups.values()}

    def unfinished_versions(self) -> set[PolicyVersion]:
        """Versions of the groups that are WAITING or RUNNING."""
        return {group.min_version for group in self._unfinished()}

    @property
    def ready(self) -> int:
        return len(self._pick())

    def waits_for(self) -> str:
        """Why the next batch is not ready, in words: how many groups are there, and the oldest that is missing."""
        if self._batch:
            return f"the trainer, which has a batch since {self._trainer}"
        ready, needed = self.ready, self.limits.groups_per_step
        if ready == needed:
            return f"nothing: {ready} of {needed} groups are ready"
        if (late := next(self._unfinished(), None)) is not None:
            missing = f"the oldest that is not finished is {late}"
        elif self.free_slots:
            missing = f"{self.free_slots} slots are free, no group is admitted"
        else:
            missing = f"no slot is free until {self._trainer} is published"
        return f"{needed} groups, of which {ready} are ready; {missing}"

    # What happens.

    def admit(self, count: int | None = None) -> list[Group]:
        """Let the next prompts of the stream in; default: as many as slots are free. Raises ValueError: more than
        `free_slots`."""
        count = self.free_slots if count is None else count
        if not 0 <= count <= self.free_slots:
            raise ValueError(f"{count} groups cannot be admitted: {self.free_slots} slots are free")
        version = self._published
        if self.limits.deterministic:
            version = PolicyVersion(self._trainer.incarnation, self._time.step)
        groups = [
            Group(group_id=self._admitted + number, state=GroupState.WAITING, min_version=version)
            for number in range(count)
        ]
        for group in groups:
            self._groups[group.group_id] = group
            self._waiting[group.group_id] = None
            self._line[group.group_id] = None
        self._admitted += count
        return groups

    def start(self, group_id: int) -> Group:
        return self._move(group_id, GroupState.RUNNING, GroupState.WAITING)

    def finish(self, group_id: int, oldest: PolicyVersion | None) -> Group:
        """The group's samples are ready. `oldest`: the smallest version among its trained tokens; None if it has none.
        Raises InvariantError: a token is older than the group's `min_version`."""
        group = self._active(group_id, GroupState.RUNNING)
        if oldest is not None and oldest < group.min_version:
            raise InvariantError(f"{group} has a token of {oldest}, which its requests did not allow")
        self._end(group_id, trainable=True)
        self._short = 0 if group_id == self._anchor else max(0, self._short - 1)
        return self._move(group_id, GroupState.FINISHED, GroupState.RUNNING, oldest=oldest)

    def lost(self, group_id: int) -> Group:
        """The group's samples are lost: play it again. It keeps its id and its slot. If it was TAKEN, the batch is
        given up and its other groups are FINISHED again."""
        group = self._active(group_id, GroupState.RUNNING, GroupState.FINISHED, GroupState.TAKEN)
        self._give_batch_up(group)
        self._waiting[group_id] = None
        return self._move(group_id, GroupState.WAITING, attempt=group.attempt + 1, oldest=None)

    def drop(self, group_id: int, outcome: Outcome) -> None:
        """The group is not trained: it is FILTERED, or FAILED. Its slot is free. A batch is given up as by `lost`."""
        group = self._active(group_id)
        self._end(group_id, trainable=False)
        self._give_batch_up(group)
        self._leave(group_id, outcome)

    def decide(self) -> int | None:
        """The next group that has ended: the next by id if deterministic, otherwise the next that ended. None: it has
        not ended yet. Call it until then, and `admit` after every call."""
        if self.limits.deterministic:
            return self._time.decide()
        group_id = next(iter(self._undecided), None)
        if group_id is not None:
            del self._undecided[group_id]
        return group_id

    def is_undecided(self, group_id: int) -> bool:
        """Whether a group that has ended is still to be decided. One that was lost after its decision is not."""
        return self._time.waits(group_id) if self.limits.deterministic else group_id in self._undecided

    @property
    def batch(self) -> Batch | None:
        """The batch that is out; None: none is, or it was given up."""
        if not self._batch:
            return None
        return Batch(version=self._trainer, groups=tuple(self._groups[group_id] for group_id in self._batch))

    def take(self) -> Batch | None:
        """Exactly P groups for the next step, or None: not enough can be taken now, or a batch is out. Raises
        InvariantError: a group is older than the proven bound."""
        if self._batch or self._short:  # to look at the whole window whenever a group ends would be quadratic in it
            return None
        if len(picked := self._pick()) < self.limits.groups_per_step:
            self._short = self.limits.groups_per_step - len(picked)
            self._anchor = next((group.group_id for group in self._unfinished()), None)
            return None
        for group_id in picked:
            self._check_age(self._groups[group_id])
        for group_id in picked:
            self._move(group_id, GroupState.TAKEN)
        self._batch = picked
        return self.batch

    def trained(self, version: PolicyVersion) -> Batch:
        """The batch was trained, and the trainer holds `version` now. The slots stay taken until that is published.
        Returns the batch, with the version before the step."""
        batch = self.batch
        if batch is None:
            raise ValueError(f"{version} was trained, but no batch is out")
        if version != PolicyVersion(self._trainer.incarnation, self._trainer.step + 1):
            raise ValueError(f"{version} does not follow {self._trainer} by one step")
        for group in batch.groups:
            self._leave(group.group_id, Outcome.TRAINED)
        self._batch = []
        self._unpublished.append((version.step, len(batch.groups)))
        self._trainer = version
        return batch

    def published(self, version: PolicyVersion) -> None:
        """Generators may be asked for `version` now; the slots of what was trained into it are free."""
        if not self._published <= version <= self._trainer:
            raise ValueError(f"{version} cannot be published after {self._published} by a trainer at {self._trainer}")
        self._published = version
        while self._unpublished and self._unpublished[0][0] <= version.step:
            self._unpublished.popleft()

    def restart_from(self, trainer: PolicyVersion) -> None:
        """The run was restored, and its trainer as a new incarnation at the same step.

        Finished groups are kept, those of a batch that was out too. Running ones are to be played again. A version that
        the trainer holds, or is still to make, belongs to the new incarnation. Raises ValueError: the trainer is at
        another step, or of an older incarnation.
        """
        if trainer.step != self._trainer.step or trainer < self._trainer:
            raise ValueError(f"a buffer at {self._trainer} does not go with a trainer restored to {trainer}")
        self._trainer = trainer
        self._batch = []
        back = {GroupState.RUNNING: GroupState.WAITING, GroupState.TAKEN: GroupState.FINISHED}
        for group_id, group in self._groups.items():
            version = group.min_version
            again = PolicyVersion(trainer.incarnation, version.step) if version.step >= trainer.step else version
            self._move(group_id, back.get(group.state, group.state), min_version=again)
            if self._groups[group_id].state is GroupState.WAITING:
                self._waiting[group_id] = None

    # How.

    def _unfinished(self) -> Iterator[Group]:
        """Those that are WAITING or RUNNING, oldest first."""
        states = (GroupState.WAITING, GroupState.RUNNING)
        return (group for group in self._groups.values() if group.state in states)

    def _pick(self) -> list[int]:
        """The groups of the next batch that are ready."""
        needed = self.limits.groups_per_step
        if self._batch:
            return []
        picked: list[int] = []
        place = 0  # in the line of those that are left: it begins behind the groups that are chosen from its front
        for group_id in self._line:
            group = self._groups.get(group_id)
            finished = group is not None and group.state is GroupState.FINISHED
            if finished:
                picked.append(group_id)
            if place or (group is not None and not finished):
                place += 1
            if place == self.limits.window or len(picked) == needed:
                break
        return picked

    def _check_age(self, group: Group) -> None:
        if group.oldest is None:
            return
        age = self._trainer.step - group.oldest.step
        if not 0 <= age <= self.limits.bound:
            raise InvariantError(
                f"{group} has a token of {group.oldest} and would be trained by {self._trainer}, {age} steps later; "
                f"the bound is {self.limits.bound} ({self.limits.describe()})"
            )

    def _active(self, group_id: int, *states: GroupState) -> Group:
        group = self._groups.get(group_id)
        if group is None:
            raise ValueError(f"group {group_id} is not active")
        if states and group.state not in states:
            raise ValueError(f"{group} should be {' or '.join(states)}")
        return group

    def _move(self, group_id: int, to: GroupState, *states: GroupState, **changes: Any) -> Group:
        group = self._active(group_id, *states)
        if group.state is GroupState.WAITING:
            del self._waiting[group_id]
        if group.state is not GroupState.WAITING and to is not GroupState.FINISHED:
            self._short = 0
        self._groups[group_id] = moved = replace(group, state=to, **changes)
        return moved

    def _end(self, group_id: int, *, trainable: bool) -> None:
        if self.limits.deterministic:
            self._time.end(group_id, trainable=trainable)
        else:
            self._undecided[group_id] = None

    def _leave(self, group_id: int, outcome: Outcome) -> None:
        del self._groups[group_id]
        self._short = 0
        self._waiting.pop(group_id, None)
        self._ended[outcome] += 1
        if outcome is not Outcome.TRAINED:
            del self._line[group_id]
        while self._line and (front := next(iter(self._line))) not in self._groups:
            del self._line[front]

    def _give_batch_up(self, group: Group) -> None:
        """Before a group leaves the batch that it was taken for."""
        if group.state is GroupState.TAKEN:
            for group_id in self._batch:
                self._move(group_id, GroupState.FINISHED)
            self._batch = []
