"""Rewards: functions of (example, transcript), or of a whole group's transcripts, weighted and added up.

A function returns a number, or a `dict[str, float]` of named scores, of which one is trained and the others are
metrics: `Reward.key` says which. All of them are reported, unweighted, by name. A function of weight 0 is a metric: it
is computed and reported, and moves no gradient. Every score, and the total, is a number up to `LARGEST_REWARD`, or
scoring fails.

Whether a conversation is an exact match is the score `exact_match`. If no function returns one, the function of the
greatest weight decides, the first of equals: its score, without its weight, is at least 1. So a small bonus or penalty
changes nothing about it, wherever it stands.
"""

import inspect
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from titan_rl.errors import ConfigError, TaskError
from titan_rl.types import EXACT_MATCH, Example, FinishReason, Message

T = TypeVar("T")


class Transcript(NamedTuple):
    """A conversation as user code sees it, so far or finished. Stop tokens are no part of the texts."""

    messages: tuple[Message, ...] = ()
    """The example's prompt first; the policy's turns have the role "assistant"."""
    finish_reasons: tuple[FinishReason, ...] = ()
    """One per turn of the policy, in order: whether it ended its turn or was cut off."""
    state: Any = None
    """What `Environment.initial_state` made, as tools have left it; or what `respond` or `play` last returned as its
    state. To change it here changes nothing."""
    tokens: tuple[int, ...] = ()
    """Sampled in each of these turns, stop tokens included."""

    @property
    def answer(self) -> str:
        """The text of the policy's last turn; empty when it has said nothing."""
        return next((message.content for message in reversed(self.messages) if message.role == "assistant"), "")

    @property
    def stopped(self) -> bool:
        """Whether the policy ended its last turn itself, by a stop token."""
        return bool(self.finish_reasons) and self.finish_reasons[-1] is FinishReason.STOP


Scores = float | Mapping[str, float]

RewardFunction = Callable[[Example, Transcript], Scores | Awaitable[Scores]]


LARGEST_REWARD = 1e30
"""Limit on the absolute value. A larger reward is a mistake in arithmetic: the squares that an advantage needs would
soon overflow, and loggers store float32."""


class Score(NamedTuple):
    reward: float
    """Weighted sum of the trained scores."""
    parts: dict[str, float]


@dataclass(frozen=True, slots=True)
class _Weighted:
    function: Callable[..., Any]
    weight: float = 1.0
    """0: a metric only."""
    name: str = ""

    @property
    def label(self) -> str:
        return self.name or getattr(self.function, "__name__", type(self.function).__name__)


@dataclass(frozen=True, slots=True)
class Reward(_Weighted):
    """One `RewardFunction`, plain or `async def`, and how much it counts."""

    key: str = ""
    """Name of the trained score if the function returns several. Default: the score with the function's name, or else
    "reward"."""

    def scores(self, returned: object) -> tuple[float, dict[str, float]]:
        """The score that is trained, and all scores by name."""
        if not isinstance(returned, Mapping):
            number = number_of(self, returned)
            return number, {self.label: number}
        parts = {str(name): number_of(self, each, f" {name} =") for name, each in returned.items()}
        key = self.key or (self.label if self.label in parts else "reward")
        if key not in parts:
            raise TaskError(
                f"{_described(self)} returned the scores {', '.join(parts) or 'none'}, and none of them is {key!r}: "
                'Reward(function, key="…") names the one that is trained'
            )
        return parts[key], parts


@dataclass(frozen=True, slots=True)
class GroupReward(_Weighted):
    """One function of (example, transcripts), plain or `async def`, that compares the rollouts of a group: it is given
    those that were played to their end (evaluation plays groups of one), and gives one value per transcript, in their
    order, which is added to its reward."""


def is_asynchronous(function: Callable[..., object]) -> bool:
    """Whether calling `function` gives a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  an object whose __call__ is `async def`
    )


async def awaited(returned: Any) -> Any:
    """What a plain or an `async def` function gives."""
    return await returned if inspect.isawaitable(returned) else returned


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
        single = [reward for reward in rewards if not isinstance(reward, GroupReward)]
        self.rewards = tuple(reward if isinstance(reward, Reward) else Reward(reward) for reward in single)
        every: tuple[_Weighted, ...] = (*self.rewards, *self.group_rewards)
        if wrong := [reward.function for reward in every if not callable(reward.function)]:
            raise ConfigError(f"a rubric takes reward functions, and {wrong[0]!r} cannot be called")
        names = [reward.label for reward in every]
        if not names:
            raise ConfigError("a rubric needs at least one reward function")
        if len(set(names)) != len(names):
            raise ConfigError(f"two reward functions of a rubric have one name: {', '.join(names)}")
        trained = [number for number, reward in enumerate(self.rewards) if reward.weight]
        alone = len(trained) == 1 and self.rewards[trained[0]].weight == 1 and not self.group_rewards
        # about exact matches; else the total does
        self._decides = None if alone else max(trained, key=lambda each: self.rewards[each].weight, default=None)
        self.asynchronous = any(is_asynchronous(reward.function) for reward in self.rewards)
        self.group_asynchronous = any(is_asynchronous(reward.function) for reward in self.group_rewards)

    def score(self, example: Example, transcript: Transcript) -> Score:
        """`score_async` for rewards that wait for nothing."""
        return run_plain(self.score_async(example, transcript))

    async def score_async(self, example: Example, transcript: Transcript) -> Score:
        """The score: one function after the other, those that are `async def` awaited. Raises TaskError where one
        returned something else than numbers up to `LARGEST_REWARD`, or a name twice."""
        trained: list[float] = []
        parts: dict[str, float] = {}
        for reward in self.rewards:
            number, scores = reward.scores(await awaited(reward.function(example, transcript)))
            if twice := parts.keys() & scores.keys():
                raise TaskError(f"{_described(reward)} returned a score of a name that is taken: {', '.join(twice)}")
            trained.append(number)
            parts |= scores
        if self._decides is not None:
            parts.setdefault(EXACT_MATCH, float(trained[self._decides] >= 1.0))
        return Score(_weighted_sum(self.rewards, trained), parts)

    async def score_group_async(self, example: Example, transcripts: Sequence[Transcript]) -> list[Score]:
        """What the group rewards add to each transcript's score. Raises TaskError where one returned something else
        than one number up to `LARGEST_REWARD` per transcript."""
        columns: list[list[float]] = []
        for reward in self.group_rewards:
            values = await awaited(reward.function(example, transcripts))
            try:
                column = [number_of(reward, number) for number in values]
            except TypeError:
                raise TaskError(f"{_described(reward)} returned {values!r}, which is no sequence of numbers") from None
            if len(column) != len(transcripts):
                raise TaskError(f"{_described(reward)} returned {len(column)} values for {len(transcripts)} rollouts")
            columns.append(column)
        labels = [reward.label for reward in self.group_rewards]
        return [
            Score(_weighted_sum(self.group_rewards, row), dict(zip(labels, row, strict=True)))
            for row in zip(*columns, strict=True)
        ]


def _weighted_sum(rewards: Sequence[_Weighted], numbers: Sequence[float]) -> float:
    total = sum([reward.weight * number for reward, number in zip(rewards, numbers, strict=True)])
    return _checked(total, f"the weighted sum of {', '.join(reward.label for reward in rewards)} is")


def number_of(reward: _Weighted | str, value: object, where: str = "") -> float:
    """A returned value as a score. `where`: in what `reward` returned, for messages. Raises TaskError: it is none."""
    what = f"{reward if isinstance(reward, str) else _described(reward)} returned{where}"
    if isinstance(value, (str, bytes)):
        raise TaskError(f"{what} {value!r}, which is text and not a number: return float(…) of it")
    try:
        return _checked(float(value), what)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TaskError(f"{what} {value!r}, which is not a number") from None
    except OverflowError:  # an integer of more than 308 digits
        raise TaskError(f"{what} inf, which is not finite") from None


def _checked(number: float, what: str) -> float:
    if not math.isfinite(number):
        raise TaskError(f"{what} {number}, which is not finite")
    if abs(number) > LARGEST_REWARD:
        raise TaskError(f"{what} {number:g}, which is beyond {LARGEST_REWARD:g}; scale it")
    return number


def _described(reward: _Weighted) -> str:
    function = inspect.unwrap(getattr(reward.function, "__func__", reward.function))
    code = getattr(function, "__code__", None)
    group = "group " if isinstance(reward, GroupReward) else ""
    return f"{group}reward {reward.label}" + (f" ({code.co_filename}:{code.co_firstlineno})" if code else "")
