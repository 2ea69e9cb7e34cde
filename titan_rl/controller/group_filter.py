"""Which finished groups are not trained: `loop.filter` as a function."""

from __future__ import annotations

from collections.abc import Callable

from titan_rl.errors import ConfigError, TaskError
from titan_rl.importing import import_name
from titan_rl.rollout.report import GroupReport

FILTERS = {"no_variance": "titan_rl.controller.group_filter:no_variance"}
"""Short names of `loop.filter`."""

GroupFilter = Callable[[GroupReport], str]
"""Returns why a group is refused; empty: it is trained."""


def make_filter(name: str) -> GroupFilter:
    """The filter that a config names.

    Raises:
        ConfigError: no filter has that name.
    """
    if not name:
        return lambda report: ""
    found = import_name(name, FILTERS)
    if not callable(found):
        raise ConfigError(f"loop.filter {name!r} is not a function")
    return _of_the_user(name, found)


def _of_the_user(name: str, function: GroupFilter) -> GroupFilter:
    def guarded(report: GroupReport) -> str:
        try:
            return function(report)
        except Exception as error:
            raise TaskError(f"loop.filter {name} raised {type(error).__name__}: {error}") from error

    return guarded


def no_variance(report: GroupReport) -> str:
    """Refuses groups whose graded rollouts all got the same reward: their advantages are 0."""
    rewards = {rollout.reward for rollout in report.rollouts if not rollout.error}
    return "" if len(rewards) > 1 else f"all rewards are {next(iter(rewards), 0.0):g}"
