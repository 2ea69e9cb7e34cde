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

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from titan_rl.errors import InvariantError
from titan_rl.scheduling.config import StalenessLimits
from titan_rl.scheduling.group import Batch, Group, GroupState, Outcome
from titan_rl.scheduling.logical_time import LogicalTime
from titan_rl.types import PolicyVersion

INITIAL_VERSION = PolicyVersion(0, 0)
"""Of a trainer that has not trained yet."""


@dataclass
class GroupBuffer:
    """The groups of one run. What a checkpoint keeps is in its fields, which nobody else changes.

    A method called with something impossible (a group in another state than the method expects, a version that does not
    follow) raises ValueError and changes nothing.
    """

    limits: StalenessLimits
    trainer_version: PolicyVersion = INITIAL_VERSION
    published_version: PolicyVersion = INITIAL_VERSION
    """The newest version that generators may be asked for."""
    groups: dict[int, Group] = field(default_factory=dict)
    """Active ones."""
    line: dict[int, None] = field(default_factory=dict)
    """Ids grow with every admission, so theirs is its order; those not active overtook the anchor."""
    taken: list[int] = field(default_factory=list)
    """The batch that is out."""
    unpublished: list[tuple[int, int]] = field(default_factory=list)
    """Each (step, groups trained in it), oldest first."""
    admitted: int = 0
    """Groups so far, so it is the next id."""
    ended: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    time: LogicalTime = field(default_factory=LogicalTime)
    undecided: dict[int, None] = field(default_factory=dict)
    """In the order in which they ended, where that decides."""

    def __post_init__(self) -> None:
        self.line = OrderedDict(self.line)  # a dict looks for its first item among all that were before it
        self._waiting = {each for each, group in self.groups.items() if group.state is GroupState.WAITING}
        self._short = 0  # at least so many more must finish before a batch is ready,
        self._anchor: int | None = None  # or this one, behind which the window begins

    # What may happen next.

    @property
    def free_slots(self) -> int:
        if self.limits.deterministic:
            return self.time.free_slots(self.limits, self.admitted)
        return self.limits.slots - len(self.groups) - sum(count for _, count in self.unpublished)

    @property
    def expected(self) -> int:
        """Groups that were trained or may be."""
        if self.limits.deterministic:
            return self.time.expected(self.admitted)
        return self.ended[Outcome.TRAINED] + len(self.groups)

    @property
    def counts(self) -> Counter[str]:
        """Groups so far: `admitted`, those of each outcome and state, and `active`, which are those of all states."""
        states = Counter(group.state.value for group in self.groups.values())
        ended = {outcome.value: count for outcome, count in self.ended.items()}
        return Counter({**states, **ended, "admitted": self.admitted, "active": len(self.groups)})

    def waiting(self) -> tuple[Group, ...]:
        """Groups whose rollouts are to be started, oldest first: those whose version is published."""
        waiting = (self.groups[group_id] for group_id in sorted(self._waiting))
        return tuple(group for group in waiting if group.min_version <= self.published_version)

    @property
    def last_certain_step(self) -> int:
        """The step until which the groups of all batches are known."""
        if self.limits.deterministic:
            return self.time.step(self.limits)
        return self.trainer_version.step + bool(self.taken)

    def unfinished(self) -> Iterator[Group]:
        """Those that are WAITING or RUNNING, oldest first."""
        states = (GroupState.WAITING, GroupState.RUNNING)
        return (group for group in self.groups.values() if group.state in states)

    @property
    def ready(self) -> int:
        return len(self._pick())

    def waits_for(self) -> str:
        """Why the next batch is not ready, in words: how many groups are there, and the oldest that is missing."""
        if self.taken:
            return f"the trainer, which has a batch since {self.trainer_version}"
        ready, needed = self.ready, self.limits.groups_per_step
        if ready == needed:
            return f"nothing: {ready} of {needed} groups are ready"
        if (late := next(self.unfinished(), None)) is not None:
            missing = f"the oldest that is not finished is {late}"
        elif self.free_slots:
            missing = f"{self.free_slots} slots are free, no group is admitted"
        else:
            missing = f"no slot is free until {self.trainer_version} is published"
        return f"{needed} groups, of which {ready} are ready; {missing}"

    # What happens.

    def admit(self, count: int | None = None) -> list[Group]:
        """Let the next prompts of the stream in; default: `free_slots`. Raises ValueError: more than that."""
        count = self.free_slots if count is None else count
        if not 0 <= count <= self.free_slots:
            raise ValueError(f"{count} groups cannot be admitted: {self.free_slots} slots are free")
        version = self.published_version
        if self.limits.deterministic:
            version = PolicyVersion(self.trainer_version.incarnation, self.time.step(self.limits))
        first, self.admitted = self.admitted, self.admitted + count
        for group_id in range(first, self.admitted):
            self.groups[group_id] = Group(group_id=group_id, state=GroupState.WAITING, min_version=version)
            self.line[group_id] = None
        self._waiting.update(range(first, self.admitted))
        return [self.groups[group_id] for group_id in range(first, self.admitted)]

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
            return self.time.decide()
        group_id = next(iter(self.undecided), None)
        if group_id is not None:
            del self.undecided[group_id]
        return group_id

    def is_undecided(self, group_id: int) -> bool:
        """Whether a group that has ended is still to be decided. One that was lost after its decision is not."""
        return group_id in (self.time.ended if self.limits.deterministic else self.undecided)

    @property
    def batch(self) -> Batch | None:
        """The batch that is out; None: none is, or it was given up."""
        if not self.taken:
            return None
        return Batch(version=self.trainer_version, groups=tuple(self.groups[group_id] for group_id in self.taken))

    def take(self) -> Batch | None:
        """Exactly P groups, or None: not enough are ready, or a batch is out. Raises InvariantError: one is too old."""
        if self.taken or self._short:  # to look at the whole window whenever a group ends would be quadratic in it
            return None
        if len(picked := self._pick()) < self.limits.groups_per_step:
            self._short = self.limits.groups_per_step - len(picked)
            self._anchor = next((group.group_id for group in self.unfinished()), None)
            return None
        for group in map(self.groups.__getitem__, picked):
            age = 0 if group.oldest is None else self.trainer_version.step - group.oldest.step
            if not 0 <= age <= self.limits.bound:
                late = f"would be trained by {self.trainer_version}, {age} steps later"
                bound = f"the bound is {self.limits.bound} ({self.limits.describe()})"
                raise InvariantError(f"{group} has a token of {group.oldest} and {late}; {bound}")
        for group_id in picked:
            self._move(group_id, GroupState.TAKEN)
        self.taken = picked
        return self.batch

    def trained(self, version: PolicyVersion) -> Batch:
        """The batch was trained into `version`, until whose publication its slots stay taken. Returns it as taken."""
        batch = self.batch
        if batch is None:
            raise ValueError(f"{version} was trained, but no batch is out")
        if version != PolicyVersion(self.trainer_version.incarnation, self.trainer_version.step + 1):
            raise ValueError(f"{version} does not follow {self.trainer_version} by one step")
        for group in batch.groups:
            self._leave(group.group_id, Outcome.TRAINED)
        self.taken = []
        self.unpublished.append((version.step, len(batch.groups)))
        self.trainer_version = version
        return batch

    def published(self, version: PolicyVersion) -> None:
        """Generators may be asked for `version` now; the slots of what was trained into it are free."""
        if not self.published_version <= version <= self.trainer_version:
            raise ValueError(
                f"{version} cannot be published after {self.published_version} by a trainer at {self.trainer_version}"
            )
        self.published_version = version
        while self.unpublished and self.unpublished[0][0] <= version.step:
            del self.unpublished[0]

    def restart_from(self, trainer: PolicyVersion) -> None:
        """The run was restored, and its trainer as a new incarnation at the same step.

        Finished groups are kept, those of a batch that was out too. Running ones are to be played again. A version that
        the trainer holds, or is still to make, belongs to the new incarnation. Raises ValueError: the trainer is at
        another step, or of an older incarnation.
        """
        if trainer.step != self.trainer_version.step or trainer < self.trainer_version:
            raise ValueError(f"a buffer at {self.trainer_version} does not go with a trainer restored to {trainer}")
        self.trainer_version = trainer
        self.taken = []
        back = {GroupState.RUNNING: GroupState.WAITING, GroupState.TAKEN: GroupState.FINISHED}
        for group_id, group in self.groups.items():
            version = group.min_version
            again = PolicyVersion(trainer.incarnation, version.step) if version.step >= trainer.step else version
            self._move(group_id, back.get(group.state, group.state), min_version=again)

    # How.

    def _pick(self) -> list[int]:
        """The groups of the next batch that are ready."""
        needed = self.limits.groups_per_step
        if self.taken:
            return []
        picked: list[int] = []
        place = 0  # in the line of those that are left: it begins behind the groups that are chosen from its front
        for group_id in self.line:
            group = self.groups.get(group_id)
            finished = group is not None and group.state is GroupState.FINISHED
            if finished:
                picked.append(group_id)
            if place or (group is not None and not finished):
                place += 1
            if place == self.limits.window or len(picked) == needed:
                break
        return picked

    def _active(self, group_id: int, *states: GroupState) -> Group:
        group = self.groups.get(group_id)
        if group is None:
            raise ValueError(f"group {group_id} is not active")
        if states and group.state not in states:
            raise ValueError(f"{group} should be {' or '.join(states)}")
        return group

    def _move(self, group_id: int, to: GroupState, *states: GroupState, **changes: Any) -> Group:
        group = self._active(group_id, *states)
        if group.state is not GroupState.WAITING and to is not GroupState.FINISHED:
            self._short = 0
        self.groups[group_id] = moved = replace(group, state=to, **changes)
        self._waiting.discard(group_id)
        if to is GroupState.WAITING:
            self._waiting.add(group_id)
        return moved

    def _end(self, group_id: int, *, trainable: bool) -> None:
        if self.limits.deterministic:
            self.time.end(group_id, trainable=trainable)
        else:
            self.undecided[group_id] = None

    def _leave(self, group_id: int, outcome: Outcome) -> None:
        del self.groups[group_id]
        self._waiting.discard(group_id)
        self._short = 0
        self.ended[outcome] += 1
        if outcome is not Outcome.TRAINED:
            del self.line[group_id]
        while self.line and (front := next(iter(self.line))) not in self.groups:
            del self.line[front]

    def _give_batch_up(self, group: Group) -> None:
        """Before a group leaves the batch that it was taken for."""
        if group.state is GroupState.TAKEN:
            for group_id in self.taken:
                self._move(group_id, GroupState.FINISHED)
            self.taken = []
