"""Rewards: named functions of (example, transcript), or of a whole group's transcripts, weighted and added up.

The total is the weighted sum; the parts are reported unweighted. A function of weight 0 is a metric: it is computed
and reported, and moves no gradient. Every part, and the total, is a number up to `LARGEST_REWARD`, or scoring fails.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from titan_rl.environments.transcript import Transcript
from titan_rl.errors import ConfigError, TaskError
from titan_rl.types import Example

T = TypeVar("T")

RewardFunction = Callable[[Example, Transcript], float | Awaitable[float]]

GroupRewardFunction = Callable[[Example, Sequence[Transcript]], Sequence[float] | Awaitable[Sequence[float]]]
"""One value per transcript, in their order."""


LARGEST_REWARD = 1e30
"""To both sides. What is larger is an accident of arithmetic: the squares that an advantage needs would soon overflow,
and loggers store float32."""


class Score(NamedTuple):
    """What a rubric says about one conversation."""

    reward: float
    """Weighted sum of the parts."""
    parts: dict[str, float]
    """Unweighted value of each reward function by name."""


@dataclass(frozen=True, slots=True)
class Reward:
    """One reward function, plain or `async def`, and how much it counts."""

    function: RewardFunction
    weight: float = 1.0
    """0: a metric only."""
    name: str = ""
    """Defaults to the function's own name."""

    @property
    def label(self) -> str:
        return self.name or getattr(self.function, "__name__", type(self.function).__name__)


@dataclass(frozen=True, slots=True)
class GroupReward:
    """One function, plain or `async def`, that compares the rollouts of a group: it is given those that were played to
    their end (evaluation plays groups of one), and its values are added to their rewards."""

    function: GroupRewardFunction
    weight: float = 1.0
    """0: a metric only."""
    name: str = ""
    """Defaults to the function's own name."""

    @property
    def label(self) -> str:
        return self.name or getattr(self.function, "__name__", type(self.function).__name__)


def is_asynchronous(function: Callable[..., object]) -> bool:
    """Whether calling `function` gives a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  an object whose __call__ is `async def`
    )


def run_plain(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing, without an event loop. Raises TaskError where it waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise TaskError("a plain function gave an awaitable: make it `async def`")


class Rubric:
    """Scores conversations.

        Rubric(positions_right, Reward(exact_match, weight=0.0))

    Args:
        rewards: reward functions (weight 1), `Reward`s or `GroupReward`s; their names must differ.
    """

    def __init__(self, *rewards: Reward | GroupReward | RewardFunction):
        self.group_rewards = tuple(reward for reward in rewards if isinstance(reward, GroupReward))
        self.rewards = tuple(
            reward if isinstance(reward, Reward) else Reward(reward)
            for reward in rewards
            if not isinstance(reward, GroupReward)
        )
        functions: list[object] = [*(r.function for r in self.rewards), *(r.function for r in self.group_rewards)]
        if wrong := [function for function in functions if not callable(function)]:
            raise ConfigError(f"a rubric takes reward functions, and {wrong[0]!r} cannot be called")
        names = [reward.label for reward in self.rewards] + [reward.label for reward in self.group_rewards]
        if not names:
            raise ConfigError("a rubric needs at least one reward function")
        if len(set(names)) != len(names):
            raise ConfigError(f"two reward functions of a rubric have one name: {', '.join(names)}")
        self.asynchronous = any(is_asynchronous(reward.function) for reward in self.rewards)
        self.group_asynchronous = any(is_asynchronous(reward.function) for reward in self.group_rewards)

    def score(self, example: Example, transcript: Transcript) -> Score:
        """`score_async` for rewards that wait for nothing."""
        return run_plain(self.score_async(example, transcript))

    async def score_async(self, example: Example, transcript: Transcript) -> Score:
        """The score: one function after the other, those that are `async def` awaited.

        Raises:
            TaskError: a function returned something else than a number up to `LARGEST_REWARD`.
            Exception: whatever a reward function raises.
        """
        parts: dict[str, object] = {}
        for reward in self.rewards:
            value = reward.function(example, transcript)
            parts[reward.label] = await value if inspect.isawaitable(value) else value
        return self._add_up(parts)

    async def score_group_async(self, example: Example, transcripts: Sequence[Transcript]) -> list[Score]:
        """What the group rewards add to each transcript's score.

        Raises:
            TaskError: a function returned something else than one number up to `LARGEST_REWARD` per transcript.
            Exception: whatever a reward function raises.
        """
        values: dict[str, object] = {}
        for reward in self.group_rewards:
            value = reward.function(example, transcripts)
            values[reward.label] = await value if inspect.isawaitable(value) else value
        return self._add_up_group(values, len(transcripts))

    def _add_up(self, parts: dict[str, object]) -> Score:
        numbers = {each.label: _number(f"{_named(each)} returned", parts[each.label]) for each in self.rewards}
        return _weighted(self.rewards, numbers)

    def _add_up_group(self, values: Mapping[str, object], transcripts: int) -> list[Score]:
        numbers: dict[str, list[float]] = {}
        for reward in self.group_rewards:
            value = values[reward.label]
            try:
                each = list(value)  # type: ignore[call-overload]
            except TypeError:
                raise TaskError(f"group {_named(reward)} returned {value!r}, which is no sequence of numbers") from None
            if len(each) != transcripts:
                raise TaskError(f"group {_named(reward)} returned {len(each)} values for {transcripts} rollouts")
            numbers[reward.label] = [_number(f"group {_named(reward)} returned", number) for number in each]
        return [
            _weighted(self.group_rewards, {name: column[row] for name, column in numbers.items()})
            for row in range(transcripts)
        ]


def _weighted(rewards: Sequence[Reward | GroupReward], parts: dict[str, float]) -> Score:
    total = sum(reward.weight * parts[reward.label] for reward in rewards)
    return Score(_number(f"the weighted sum of {', '.join(parts)} is", total), parts)


def _number(whose: str, value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TaskError(f"{whose} {value!r}, which is not a number") from None
    except OverflowError:  # an integer of more than 308 digits
        number = math.inf
    if not math.isfinite(number):
        raise TaskError(f"{whose} {number}, which is not finite")
    if abs(number) > LARGEST_REWARD:
        raise TaskError(f"{whose} {number:g}, which is beyond {LARGEST_REWARD:g}; scale it")
    return number


def _named(reward: Reward | GroupReward) -> str:
    """The reward's name, and where its function begins."""
    function = inspect.unwrap(getattr(reward.function, "__func__", reward.function))
    code = getattr(function, "__code__", None)
    return f"reward {reward.label}" + (f" ({code.co_filename}:{code.co_firstlineno})" if code else "")
