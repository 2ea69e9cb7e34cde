"""A run in simulated time: the real scheduling and routing classes over planned engines and a planned trainer.

    admit ─▶ submit ─▶ dispatcher ─▶ engines ─▶ finish ─▶ take ─▶ train ─▶ publish ─▶ gate ─▶ engines pull ─▶ admit …

`GroupBuffer`, `Dispatcher`, the routing strategies, `Fleet` and `VersionPlan` are those of a real run. Only what
computes is replaced. Messages, routing and bookkeeping take no time here. Two orders differ from the controller's: the
run is taken from a longer one, so groups are admitted beyond its last step, and the next version is published while
generators still change to the previous one.

Memory holds what is in flight, not what has passed, and there is no event per token. No schedule is faster than its
busiest resource. A run that trains given groups in T seconds needs three of them:

- **trainer**: the sum of its steps;
- **generators**: the trained tokens, at the rate of all generators together. With `b` requests in flight a generator
  makes r(b) tokens per second, a concave function of b, so all of them make at most generators · r(mean b), and mean b
  is at most (slots · samples per group) ÷ generators; prefill comes on top;
- **slots**: a group holds its slot from admission until it was trained at the earliest, so for its longest completion
  at the pace of a batch of one, and its batch's step. All slots together offer slots · T.

The figures are those of the trained groups, so T is never below the bound.
"""

import heapq
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import NamedTuple

import numpy as np

from titan_rl.planner.scenario import PlannedEngine, Scenario, Sequence
from titan_rl.routing.config import RouterConfig
from titan_rl.routing.dispatcher import Assignment, Dispatcher
from titan_rl.routing.health import Fleet, Phase
from titan_rl.routing.strategies import build_strategy
from titan_rl.routing.version_plan import VersionPlan
from titan_rl.scheduling.group_buffer import INITIAL_VERSION, GroupBuffer
from titan_rl.types import GenerationRequest, PolicyVersion, SamplingParams


class Resource(StrEnum):
    TRAINER = "trainer"
    GENERATORS = "generators"
    SLOTS = "slots"
    """More staleness helps: too few groups are in flight for their length."""


class Work(NamedTuple):
    train_seconds: float = 0.0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    slot_seconds: float = 0.0
    """Least time that the trained groups held slots."""


def seconds_needed(scenario: Scenario, work: Work) -> dict[Resource, float]:
    """Least seconds by resource for this work; the largest is the bound."""
    slots = scenario.limits.slots
    in_flight = slots * scenario.samples_per_group / scenario.generators
    engine = scenario.engine
    decode = work.sampled_tokens / engine.tokens_per_second(in_flight)
    prefill = work.prompt_tokens * engine.seconds_per_prompt_token
    return {
        Resource.TRAINER: work.train_seconds,
        Resource.GENERATORS: (decode + prefill) / scenario.generators,
        Resource.SLOTS: work.slot_seconds / slots,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    scenario: Scenario
    seconds: float
    """Until the last step was trained."""
    trained_tokens: int
    """Sampled tokens in trained groups."""
    needed: dict[Resource, float]
    ages: dict[int, int]
    """Staleness in steps → groups trained at that age."""
    trainer_busy: float
    """Share of the time."""
    generators_busy: float
    """Share of the time that a generator decodes or prefills, on average."""

    @property
    def tokens_per_second(self) -> float:
        return self.trained_tokens / self.seconds

    @property
    def busiest(self) -> Resource:
        return max(self.needed, key=self.needed.__getitem__)

    @property
    def share_of_bound(self) -> float:
        """Throughput ÷ that of the busiest resource: at most 1."""
        return self.needed[self.busiest] / self.seconds

    @property
    def mean_age(self) -> float:
        groups = sum(self.ages.values())
        return sum(age * count for age, count in self.ages.items()) / groups if groups else 0.0


def simulate(scenario: Scenario) -> Result:
    return _Simulation(scenario).run()


@dataclass(slots=True)
class _Playing:
    """A group between its start and its training."""

    left: int
    tokens: int = 0
    longest: int = 0
    oldest: PolicyVersion | None = None


class _Simulation:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._buffer = GroupBuffer(scenario.limits)
        router = RouterConfig(
            strategy=scenario.strategy, weight_sync=scenario.weight_sync, max_syncing=scenario.max_syncing
        )
        strategy = build_strategy(router)
        self._fleet = Fleet(strategy)
        self._dispatcher = Dispatcher(strategy, self._fleet, router)
        self._plan = VersionPlan(self._fleet, router)
        self._engines = {
            f"generator{index}": PlannedEngine(scenario.engine, INITIAL_VERSION) for index in range(scenario.generators)
        }
        self._draining: set[str] = set()
        self._behind = 0  # generators that do not serve the newest publication yet
        prompt = np.broadcast_to(np.int32(0), scenario.prompt_tokens)
        # The router does not know how long an answer will be: every request asks for the same, as in a run.
        sampling = SamplingParams(max_new_tokens=1)
        self._request = partial(GenerationRequest, prompt_token_ids=prompt, sampling=sampling, seed=0)
        self._playing: dict[int, _Playing] = {}
        self._waiting: dict[str, Sequence] = {}  # by request id, until it is sent
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._now = 0.0
        self._training = False
        self._publishing = False
        self._work = Work()
        self._ages: Counter[int] = Counter()

    def run(self) -> Result:
        for name in self._engines:
            self._fleet.join(name)
        self._plan.want([INITIAL_VERSION])
        for name in self._plan.begin(self._dispatcher):
            self._plan.verified(name, INITIAL_VERSION)
        self._admit()
        while self._buffer.trainer_version.step < self._scenario.steps:
            self._now, _, action = heapq.heappop(self._events)
            action()
        return self._result()

    def _at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), action))

    # Generation.

    def _admit(self) -> None:
        requests: list[GenerationRequest] = []
        for group in self._buffer.admit():
            self._buffer.start(group.group_id)
            lengths = self._scenario.lengths(group.group_id, self._scenario.samples_per_group)
            self._playing[group.group_id] = _Playing(len(lengths), sum(lengths), max(lengths))
            for sample, length in enumerate(lengths):
                sequence = Sequence(f"{group.group_id}.{sample}", group.group_id, self._scenario.prompt_tokens, length)
                self._waiting[sequence.request_id] = sequence
                requests.append(self._request(request_id=sequence.request_id, min_version=group.min_version))
        self._send(self._dispatcher.submit(requests))

    def _send(self, assignments: list[Assignment]) -> None:
        for assignment in assignments:
            sequence = self._waiting.pop(assignment.request.request_id)
            self._engines[assignment.generator].add(sequence, self._now)
        for name in dict.fromkeys(assignment.generator for assignment in assignments):
            self._schedule(name)

    def _schedule(self, name: str) -> None:
        """An event at the engine's next boundary; those for boundaries that moved since are ignored when they come."""
        if (due := self._engines[name].due) != math.inf:
            self._at(due, partial(self._boundary, name))

    def _boundary(self, name: str) -> None:
        engine = self._engines[name]
        if engine.due != self._now:
            return
        finished, loaded = engine.boundary()
        self._schedule(name)
        for sequence in finished:
            self._dispatcher.ended(sequence.request_id)
            self._finished(sequence)
        if loaded is not None:
            self._verified(name, loaded)
        if name in self._draining and engine.idle:
            self._draining.discard(name)
            self._pull(name)

    def _finished(self, sequence: Sequence) -> None:
        group_id, version = sequence.group_id, sequence.version
        playing = self._playing[group_id]
        playing.left -= 1
        if playing.oldest is None or (version is not None and version < playing.oldest):
            playing.oldest = version
        if playing.left:
            return
        if self._scenario.group_seconds:
            self._at(self._now + self._scenario.group_seconds, lambda: self._ready(group_id))
        else:
            self._ready(group_id)

    def _ready(self, group_id: int) -> None:
        self._buffer.finish(group_id, self._playing[group_id].oldest)
        self._buffer.decide()
        self._train()

    # Training.

    def _train(self) -> None:
        if self._training or (self._publishing and not self._scenario.trainer.overlap_publication):
            return
        batch = self._buffer.take()
        if batch is None:
            return
        self._training = True
        groups = [self._playing.pop(group_id) for group_id in batch.group_ids]
        sampled = sum(group.tokens for group in groups)
        prompts = len(groups) * self._scenario.samples_per_group * self._scenario.prompt_tokens
        seconds = self._scenario.trainer.step_seconds(sampled + prompts)
        pace = self._scenario.engine.step_seconds(1)
        held = sum(group.longest * pace + self._scenario.group_seconds + seconds for group in groups)
        work = Work(train_seconds=seconds, prompt_tokens=prompts, sampled_tokens=sampled, slot_seconds=held)
        self._at(self._now + seconds, lambda: self._trained(work))

    def _trained(self, work: Work) -> None:
        self._training = False
        version = PolicyVersion(0, self._buffer.trainer_version.step + 1)
        self._ages.update(self._buffer.trained(version).ages)
        self._work = Work(*map(operator.add, self._work, work))
        if not self._publishing:
            self._publish(version)
        self._train()

    def _publish(self, version: PolicyVersion) -> None:
        self._publishing = True
        self._at(self._now + self._scenario.trainer.seconds_per_publication, lambda: self._published(version))

    def _published(self, version: PolicyVersion) -> None:
        self._publishing = False
        self._plan.want([version])
        self._behind = len(self._engines)
        self._sync()
        if self._buffer.trainer_version > version:
            self._publish(self._buffer.trainer_version)
        self._train()

    # Weights.

    def _sync(self) -> None:
        for name in self._plan.begin(self._dispatcher):
            if self._fleet[name].phase is Phase.DRAINING and self._dispatcher.in_flight(name):
                self._draining.add(name)
            else:
                self._pull(name)

    def _pull(self, name: str) -> None:
        self._engines[name].pull(self._plan.pulling(name), self._now)
        self._schedule(name)

    def _verified(self, name: str, version: PolicyVersion) -> None:
        self._plan.verified(name, version)
        newest = self._plan.wanted[-1]
        if self._dispatcher.waiting:
            self._send(self._dispatcher.reconsider())
        if version != newest or self._scenario.max_syncing:
            self._sync()  # this one again, or the next in line
        if version == newest:
            self._behind -= 1
            if not self._behind:  # not before: the first that has the version would get all requests that wait for it
                self._buffer.published(version)
                self._admit()

    def _result(self) -> Result:
        scenario, work = self._scenario, self._work
        return Result(
            scenario=scenario,
            seconds=self._now,
            trained_tokens=work.sampled_tokens,
            needed=seconds_needed(scenario, work),
            ages=dict(sorted(self._ages.items())),
            trainer_busy=work.train_seconds / self._now,
            generators_busy=sum(e.busy_seconds for e in self._engines.values()) / self._now / len(self._engines),
        )
