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

**Window.** The line is all groups in order of admission, without those that were filtered or failed. It begins at
the anchor, the oldest group that is still to be trained, so what was trained before it is no longer part of it, and
what overtook it still is. A batch is put together from the front: the oldest finished group among the first W of the
line is next, the anchor moving on when it was itself chosen. So W = 1 is strict FIFO, and finished groups never
overtake each other. A group that is lost keeps its place, and with it the anchor.

**At most W - 1 younger groups are trained before a group g.** Let T be those groups and h the youngest of them. When
h was chosen, the anchor was g or older, and h among the first W of the line. Each other group of T was admitted
between g and h, and was never dropped, since it was trained in the end: it stood in the line between g and h. So the
line held g, T without h, and h among its first W: 1 + |T| ≤ W. This holds for batches that were really trained; a
batch that loses a group is given up (the others are FINISHED again), so nobody was overtaken by it.

**Bound.** Let g be admitted when the newest published version is m, and be taken by a trainer at version v. Steps m + 1
to v have trained (v - m)·P groups. None of them was trained into a version ≤ m, so each held a slot when g was
admitted, or was admitted after g. The former are at most (S + 1)·P - 1 (g has a slot too), the latter at most W - 1:

    (v - m)·P ≤ (S + 1)·P + W - 2   ⟹   v - m ≤ S + 1 + ⌊(W - 2)/P⌋ = S + ⌈(W - 1)/P⌉

At S = 0 only P groups are inside, so a batch is all of them: nobody is overtaken, and W - 1 is 0 above, whatever W is.
No token of g is older than m, because generators that serve less than m do not get its requests.

**Nobody starves.** By the same count at most (S + 1)·P + W - 2 groups are trained between a group's admission and its
own training. If every started group finishes sometime and free slots are filled, a batch can always be formed: when
all groups inside have finished and everything is published, they are (S + 1)·P ≥ P, and the front P of the line are
a batch for any W.

Pure: the caller plays groups, trains batches and publishes versions, and says here what happened.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from titan_rl.errors import StalenessViolation
from titan_rl.scheduling.config import Knobs
from titan_rl.scheduling.group import Batch, Counts, Group, GroupState, Outcome, PromptStream
from titan_rl.types import PolicyVersion

INITIAL_VERSION = PolicyVersion(0, 0)
"""Of a trainer that has not trained yet."""


class GroupBuffer:
    """The groups of one run.

    A method called with something impossible (a group in another state than the method expects, a version that does not
    follow) raises ValueError and changes nothing.
    """

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: int = 0,
        window: int = 1,
        prompts: PromptStream | None = None,
        version: PolicyVersion = INITIAL_VERSION,
    ) -> None:
        """
        Args:
            groups_per_step: P.
            max_staleness: S.
            window: W.
            prompts: where ids come from, and where every group's outcome is recorded; default: a new stream.
            version: what the trainer holds and what is published.

        Raises:
            ConfigError: a knob is out of range.
        """
        self.knobs = Knobs(groups_per_step=groups_per_step, max_staleness=max_staleness, window=window)
        self.prompts = prompts if prompts is not None else PromptStream()
        self._trainer = version
        self._published = version
        self._groups: dict[int, Group] = {}  # active
        self._waiting: dict[int, None] = {}
        # The line. Ids grow with every admission, so theirs is its order; those not active overtook the anchor.
        self._line: OrderedDict[int, None] = OrderedDict()
        self._batch: list[int] = []  # TAKEN
        self._unpublished: deque[tuple[int, int]] = deque()  # (step, groups trained in it)
        self._admitted = 0
        self._ended = dict.fromkeys(Outcome, 0)
        self._in = dict.fromkeys(GroupState, 0)

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
        """How many groups may be admitted now."""
        return self.knobs.slots - len(self._groups) - sum(count for _, count in self._unpublished)

    @property
    def counts(self) -> Counts:
        return Counts(
            admitted=self._admitted,
            **{outcome.value: count for outcome, count in self._ended.items()},
            **{state.value: count for state, count in self._in.items()},
        )

    def __getitem__(self, group_id: int) -> Group:
        """An active group. Raises KeyError."""
        return self._groups[group_id]

    def __contains__(self, group_id: int) -> bool:
        """Whether the group is active."""
        return group_id in self._groups

    def waiting(self) -> tuple[Group, ...]:
        """Groups whose rollouts are to be started, oldest first."""
        return tuple(self._groups[group_id] for group_id in sorted(self._waiting))

    @property
    def oldest_unfinished(self) -> Group | None:
        """The oldest group that is WAITING or RUNNING; None: there is none."""
        unfinished = (GroupState.WAITING, GroupState.RUNNING)
        return next((group for group in self._groups.values() if group.state in unfinished), None)

    @property
    def ready(self) -> int:
        """How many of the P groups of the next batch are there."""
        return len(self._pick())

    def waits_for(self) -> str:
        """Why the next batch is not ready, in words: how many groups are there, and the oldest that is missing."""
        if self._batch:
            return f"the trainer, which has a batch since {self._trainer}"
        ready, needed = self.ready, self.knobs.groups_per_step
        if ready == needed:
            return f"nothing: {ready} of {needed} groups are ready"
        if (late := self.oldest_unfinished) is not None:
            missing = f"the oldest that is not finished is {late}"
        elif self.free_slots:
            missing = f"{self.free_slots} slots are free, no group is admitted"
        else:
            missing = f"no slot is free until {self._trainer} is published"
        return f"{ready} of {needed} groups are ready; {missing}"

    # What happens.

    def admit(self, count: int | None = None) -> list[Group]:
        """Let the next prompts of the stream in; default: as many as slots are free.

        Raises:
            ValueError: more than `free_slots`.
        """
        count = self.free_slots if count is None else count
        if not 0 <= count <= self.free_slots:
            raise ValueError(f"{count} groups cannot be admitted: {self.free_slots} slots are free")
        groups = [
            Group(group_id=group_id, state=GroupState.WAITING, min_version=self._published)
            for group_id in self.prompts.take(count)
        ]
        for group in groups:
            self._groups[group.group_id] = group
            self._waiting[group.group_id] = None
            self._line[group.group_id] = None
        self._admitted += count
        self._in[GroupState.WAITING] += count
        return groups

    def start(self, group_id: int) -> Group:
        """The group's rollouts begin."""
        return self._move(group_id, GroupState.RUNNING, GroupState.WAITING)

    def finish(self, group_id: int, oldest: PolicyVersion | None) -> Group:
        """The group's samples are ready.

        Args:
            oldest: the smallest version among its trained tokens; None if it has none.

        Raises:
            StalenessViolation: a token is older than the group's `min_version`.
        """
        group = self._active(group_id, GroupState.RUNNING)
        if oldest is not None and oldest < group.min_version:
            raise StalenessViolation(f"{group} has a token of {oldest}, which its requests did not allow")
        return self._move(group_id, GroupState.FINISHED, GroupState.RUNNING, oldest=oldest)

    def lost(self, group_id: int) -> Group:
        """The group's samples are lost: play it again. It keeps its id and its slot.

        If it was TAKEN, the batch is given up and its other groups are FINISHED again.
        """
        group = self._active(group_id, GroupState.RUNNING, GroupState.FINISHED, GroupState.TAKEN)
        self._give_batch_up(group)
        self._waiting[group_id] = None
        return self._move(group_id, GroupState.WAITING, attempt=group.attempt + 1, oldest=None)

    def filtered(self, group_id: int) -> None:
        """A filter refuses a group that was played; its slot is free.

        If it was TAKEN, the batch is given up and its other groups are FINISHED again.
        """
        group = self._active(group_id, GroupState.RUNNING, GroupState.FINISHED, GroupState.TAKEN)
        self._give_batch_up(group)
        self._leave(group_id, Outcome.FILTERED)

    def failed(self, group_id: int) -> None:
        """The group cannot be played; its slot is free.

        If it was TAKEN, the batch is given up and its other groups are FINISHED again.
        """
        group = self._active(group_id)
        self._give_batch_up(group)
        self._leave(group_id, Outcome.FAILED)

    @property
    def batch(self) -> Batch | None:
        """The batch that is out; None: none is, or it was given up."""
        if not self._batch:
            return None
        return Batch(version=self._trainer, groups=tuple(self._groups[group_id] for group_id in self._batch))

    def take(self) -> Batch | None:
        """Exactly P groups for the next step, or None: not enough can be taken now, or a batch is out.

        Raises:
            StalenessViolation: a group is older than the proven bound.
        """
        needed = self.knobs.groups_per_step
        if self._in[GroupState.FINISHED] < needed or len(picked := self._pick()) < needed:
            return None
        for group_id in picked:
            self._check_age(self._groups[group_id])
        for group_id in picked:
            self._move(group_id, GroupState.TAKEN)
        self._batch = picked
        return self.batch

    def trained(self, version: PolicyVersion) -> Batch:
        """The batch was trained, and the trainer holds `version` now. The slots stay taken until that is published.

        Returns:
            The batch, with the version before the step.
        """
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

    # A run that goes on later.

    def state(self) -> dict[str, Any]:
        """Plain data (JSON) from which `from_state` makes a buffer that goes on in the same way."""
        return {
            "knobs": {name: getattr(self.knobs, name) for name in ("groups_per_step", "max_staleness", "window")},
            "prompts": self.prompts.state(),
            "trainer": list(self._trainer),
            "published": list(self._published),
            "groups": [group.to_plain() for group in self._groups.values()],
            "line": list(self._line),
            "batch": list(self._batch),
            "unpublished": [list(entry) for entry in self._unpublished],
            "admitted": self._admitted,
            "ended": {outcome.value: count for outcome, count in self._ended.items()},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], *, trainer: PolicyVersion | None = None) -> GroupBuffer:
        """The buffer that `state` was taken from.

        Groups that were RUNNING, FINISHED or TAKEN keep that state. The caller calls `lost` for those whose samples did
        not survive.

        Args:
            trainer: the version that the trainer restored, if its incarnation is a new one.

        Raises:
            ValueError: `trainer` is at another step than the state, or older.
        """
        buffer = cls(**state["knobs"], prompts=PromptStream.from_state(state["prompts"]))
        buffer._trainer = PolicyVersion(*state["trainer"])
        buffer._published = PolicyVersion(*state["published"])
        if trainer is not None:
            if trainer.step != buffer._trainer.step or trainer < buffer._trainer:
                raise ValueError(f"a buffer at {buffer._trainer} does not go with a trainer restored to {trainer}")
            buffer._trainer = trainer
        for group in map(Group.from_plain, state["groups"]):
            buffer._groups[group.group_id] = group
            buffer._in[group.state] += 1
            if group.state is GroupState.WAITING:
                buffer._waiting[group.group_id] = None
        buffer._line.update(dict.fromkeys(state["line"]))
        buffer._batch = list(state["batch"])
        buffer._unpublished.extend((step, count) for step, count in state["unpublished"])
        buffer._admitted = state["admitted"]
        buffer._ended = {outcome: state["ended"][outcome.value] for outcome in Outcome}
        return buffer

    # How.

    def _pick(self) -> list[int]:
        """The groups of the next batch that are ready."""
        needed = self.knobs.groups_per_step
        if self._batch:
            return []
        picked: list[int] = []
        place = 0  # in the line; 0 while the front of it is chosen, for then it begins behind that
        for group_id in self._line:
            group = self._groups.get(group_id)
            finished = group is not None and group.state is GroupState.FINISHED
            if finished:
                picked.append(group_id)
            if place or (group is not None and not finished):
                place += 1
            if place == self.knobs.window or len(picked) == needed:
                break
        return picked

    def _check_age(self, group: Group) -> None:
        if group.oldest is None:
            return
        age = self._trainer.step - group.oldest.step
        if not 0 <= age <= self.knobs.bound:
            raise StalenessViolation(
                f"{group} has a token of {group.oldest} and would be trained by {self._trainer}, {age} steps later; "
                f"the bound is {self.knobs.bound} ({self.knobs.describe()})"
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
        self._in[group.state] -= 1
        self._in[to] += 1
        self._groups[group_id] = moved = replace(group, state=to, **changes)
        return moved

    def _leave(self, group_id: int, outcome: Outcome) -> None:
        group = self._groups.pop(group_id)
        self._waiting.pop(group_id, None)
        self._in[group.state] -= 1
        self._ended[outcome] += 1
        self.prompts.settle(group_id, outcome)
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
