"""What a simulated run consists of: lengths of completions, speeds, and a generator's engine in simulated time. All
times are in seconds.

A group's lengths depend only on the seed and the group's id, so compared scenarios generate the same completions in any
order, and nothing is stored per group.

Always true of a `PlannedEngine`:

- requests join, finished ones leave and weights change only at a step boundary. What arrives during a step waits for
  its end, as in the engine loop;
- the batch is the first `max_num_seqs` requests in order of arrival, and every step samples one token for each;
- time goes from one boundary that matters to the next: however many tokens lie between, it is one event.

The caller has the clock. It calls `boundary` at `due`, and nothing else moves time:

    add(a, 0.0)   due 30   a joins an idle engine at once and has 3 tokens to go, 10 s each
    add(b, 12.0)  due 20   b joins at the next boundary
    boundary()    due 31   a and b decode together, 11 s a step; a is the first to finish
"""

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.random import PCG64, Generator

from titan_rl.bounds import Count, CountOrZero, NotNegative, Positive
from titan_rl.errors import ConfigError
from titan_rl.scheduling.config import StalenessLimits
from titan_rl.types import PolicyVersion

Lengths = Callable[[int, int], list[int]]
"""Tokens of the completions of a group, by its id and their number: each at least 1."""


def read_lengths(text: str, seed: int = 0) -> Lengths:
    """Of a distribution by its name, or drawn with replacement from a file of one number per line. The mean of a
    log-normal one is before sampling stops at MOST. Raises ConfigError."""
    kind, _, rest = text.partition(":")
    most = math.inf
    draw: partial[np.ndarray]
    try:
        match kind, rest.split(":"):
            case "uniform", [low, high]:
                least = int(low)
                draw = partial(Generator.integers, low=least, high=int(high), endpoint=True)
            case "lognormal", [mean, spread, cut]:
                least = most = int(cut)
                location = math.log(float(mean)) - float(spread) ** 2 / 2
                draw = partial(Generator.lognormal, mean=location, sigma=float(spread))
            case "file", _:
                known = [int(line) for line in Path(rest).read_text().split()]
                least = min(known)
                draw = partial(Generator.choice, a=np.array(known, np.int64))
            case _:
                raise ValueError("that is no distribution of lengths")
        draw(Generator(PCG64(seed)), size=1)  # raises where the numbers make no sense
        if least < 1:
            raise ValueError(f"a length of {least} tokens")
    except (OSError, ValueError) as error:
        forms = "uniform:LEAST:MOST, lognormal:MEAN:SPREAD:MOST or file:PATH, of at least 1 token"
        raise ConfigError(f"--lengths {text}: {error}; expected {forms}") from error

    def lengths(group: int, samples: int) -> list[int]:
        drawn = draw(Generator(PCG64([seed, group])), size=samples)
        return np.clip(np.rint(drawn), 1, most).astype(int).tolist()

    return lengths


@dataclass(slots=True, kw_only=True)
class EngineSpeed:
    """One generator. A step samples one token for each of the first `max_num_seqs` requests, the others wait in order;
    it takes `seconds_per_step + seconds_per_sequence * batch`."""

    seconds_per_step: Positive
    """For any batch: reading the weights, launching kernels."""
    seconds_per_sequence: NotNegative = 0.0
    """Added by every request in the batch."""
    seconds_per_prompt_token: NotNegative = 0.0
    """Prefill: added to the step that a request joins in, and after a hot swap once for all tokens so far of what is
    running, whose KV is recomputed."""
    keep_prefix_cache: bool = False
    """After a hot swap nothing is recomputed (`generator.keep_prefix_cache`)."""
    seconds_per_load: NotNegative = 0.0
    """Loading new weights, between two steps."""
    max_num_seqs: Count = 256
    """Requests that decode together."""

    def step_seconds(self, batch: float) -> float:
        """A step without prefill."""
        return self.seconds_per_step + self.seconds_per_sequence * batch

    def tokens_per_second(self, in_flight: float) -> float:
        """Decoding with so many requests all the time: concave and growing in their number."""
        batch = min(in_flight, self.max_num_seqs)
        return batch / self.step_seconds(batch)


@dataclass(slots=True, kw_only=True)
class TrainerSpeed:
    """The trainer mesh as a whole."""

    seconds_per_step: NotNegative = 0.0
    """Of every optimizer step, whatever the batch."""
    seconds_per_token: NotNegative = 0.0
    """Of every token of the batch, prompts included."""
    seconds_per_publication: NotNegative = 0.0
    """Making a version available to generators."""
    overlap_publication: bool = True
    """Whether the next step may begin meanwhile."""

    def step_seconds(self, tokens: int) -> float:
        return self.seconds_per_step + self.seconds_per_token * tokens


@dataclass(slots=True, kw_only=True)
class Workload:
    """What is sampled and trained, and how fast. By default a 7B policy with long answers."""

    groups_per_step: Count = 128
    samples_per_group: Count = 16
    steps: Count = 20
    """Optimizer steps to simulate."""
    prompt_tokens: CountOrZero = 512
    """Of every prompt."""
    group_seconds: NotNegative = 0.0
    """From a group's last token to its samples: environment, rewards."""
    strategy: str = "least_loaded"
    """As `router.strategy`."""
    max_syncing: CountOrZero = 0
    """Generators that drain at once; 0: all."""
    engine: EngineSpeed = field(
        default_factory=lambda: EngineSpeed(
            seconds_per_step=0.010, seconds_per_sequence=7e-5, seconds_per_prompt_token=5e-5, seconds_per_load=2.0
        )
    )
    trainer: TrainerSpeed = field(
        default_factory=lambda: TrainerSpeed(
            seconds_per_step=2.0, seconds_per_token=1.4e-4, seconds_per_publication=2.0
        )
    )


@dataclass(slots=True, kw_only=True)
class Scenario(Workload):
    lengths: Lengths
    generators: int = 1
    max_staleness: int = 0
    window: int = 1
    weight_sync: Literal["drain", "hot_swap"] = "hot_swap"

    @property
    def limits(self) -> StalenessLimits:
        return StalenessLimits(
            groups_per_step=self.groups_per_step, max_staleness=self.max_staleness, window=self.window
        )


_ROUNDING = 1e-9
"""Steps: an arrival that is so little late by rounding is still in time for a boundary."""


@dataclass(slots=True)
class Sequence:
    request_id: str
    group_id: int
    prompt_tokens: int
    length: int
    version: PolicyVersion | None = None
    """The version that sampled its first token."""


class PlannedEngine:
    def __init__(self, speed: EngineSpeed, version: PolicyVersion) -> None:
        self._speed = speed
        self.version = version
        self.due = math.inf
        """When `boundary` is to be called."""
        self.busy_seconds = 0.0
        self._queue: deque[Sequence] = deque()
        self._batch: list[tuple[int, int, Sequence]] = []  # heap of (step that it finishes with, order, sequence)
        self._step = 0  # steps so far
        self._order = 0
        self._origin = 0.0  # when the steps after `_step` began
        self._ahead = 0  # steps from there to `due`
        self._pull: PolicyVersion | None = None  # to begin at the next boundary
        self._loading: PolicyVersion | None = None

    @property
    def idle(self) -> bool:
        return not self._batch and not self._queue

    def add(self, sequence: Sequence, now: float) -> None:
        self._queue.append(sequence)
        if self._loading is None and len(self._batch) < self._speed.max_num_seqs:
            self._next_boundary(now)

    def pull(self, version: PolicyVersion, now: float) -> None:
        """The next boundary begins to load `version`. There is one pull at a time."""
        self._pull = version
        self._next_boundary(now)

    def boundary(self) -> tuple[list[Sequence], PolicyVersion | None]:
        """Time is `due`. Returns the requests that finished, and the version if one has just been loaded."""
        now, loaded = self.due, self._loading
        finished: list[Sequence] = []
        if loaded is not None:
            self.version, self._loading = loaded, None
        elif self._batch:
            self.busy_seconds += self._ahead * self._speed.step_seconds(len(self._batch))
            self._step += self._ahead
            while self._batch and self._batch[0][0] <= self._step:
                finished.append(heapq.heappop(self._batch)[2])
        if self._pull is not None:
            self._loading, self._pull = self._pull, None
            self.due = now + self._speed.seconds_per_load
        else:
            self._run(now, recompute=loaded is not None)
        return finished, loaded

    def _run(self, now: float, *, recompute: bool) -> None:
        """Let requests join, and go on until one finishes."""
        tokens = 0
        if recompute and not self._speed.keep_prefix_cache:
            tokens += sum(s.prompt_tokens + s.length - (finish - self._step) for finish, _, s in self._batch)
        while self._queue and len(self._batch) < self._speed.max_num_seqs:
            sequence = self._queue.popleft()
            sequence.version = self.version
            tokens += sequence.prompt_tokens
            self._order += 1
            heapq.heappush(self._batch, (self._step + sequence.length, self._order, sequence))
        prefill = tokens * self._speed.seconds_per_prompt_token
        self.busy_seconds += prefill
        self._origin = now + prefill
        self._ahead = self._batch[0][0] - self._step if self._batch else 0
        self._set_due()

    def _next_boundary(self, now: float) -> None:
        """Stop at the end of the step that is under way."""
        if not self._batch:
            self.due = now
            return
        seconds = self._speed.step_seconds(len(self._batch))
        self._ahead = min(self._ahead, max(1, math.ceil((now - self._origin) / seconds - _ROUNDING)))
        self._set_due()

    def _set_due(self) -> None:
        ahead = self._ahead * self._speed.step_seconds(len(self._batch))
        self.due = self._origin + ahead if self._batch else math.inf
