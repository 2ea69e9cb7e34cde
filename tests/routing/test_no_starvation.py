"""Who serves is chosen within a stated number of choices, however the other candidates come and go."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_examples import V0, V1, request, serving

from titan_rl.errors import ConfigError
from titan_rl.routing.config import RouterConfig
from titan_rl.routing.strategies import LeastLoaded, RoundRobin, RoutingStrategy, build_strategy
from titan_rl.types import PolicyVersion

NAMES = ["a", "b", "c", "d", "e"]

# What happens between choices: a candidate serves (at a version), or pauses.
CHANGES = st.tuples(st.sampled_from(NAMES), st.sampled_from([V0, V1, "pauses"]))
CHOICES = st.sampled_from([V0, V0, V0, V1])  # the oldest version that the request may have
SCHEDULES = st.lists(CHANGES | CHOICES, max_size=80)
BOTH = pytest.mark.parametrize("strategy_class", [RoundRobin, LeastLoaded])


def choose(strategy: RoutingStrategy, at_least: PolicyVersion = V0) -> str | None:
    chosen = strategy.choose(request("r", at_least=at_least))
    return chosen


def change(
    strategy: RoutingStrategy, candidates: dict[str, PolicyVersion], name: str, what: PolicyVersion | str
) -> None:
    if isinstance(what, str):
        candidates.pop(name, None)
        getattr(strategy, what)(name)
    else:
        candidates[name] = what
        strategy.serves(name, what)


@BOTH
@given(schedule=SCHEDULES)
def test_who_serves_all_the_time_is_passed_over_at_most_once_by_each_other(
    strategy_class: type[RoutingStrategy], schedule: list
) -> None:
    """With n generators in all that is within n choices. (Nobody has any load here: all are equals.)"""
    strategy = strategy_class()
    candidates: dict[str, PolicyVersion] = {}
    passed_by: dict[str, Counter[str]] = {}
    for event in schedule:
        if not isinstance(event, PolicyVersion):
            change(strategy, candidates, *event)
            if isinstance(event[1], str):
                passed_by.pop(event[0], None)
            else:
                passed_by.setdefault(event[0], Counter())
            continue
        able = [name for name, version in candidates.items() if version >= event]
        chosen = choose(strategy, event)
        if chosen is None:
            assert not able
            continue
        assert chosen in able
        passed_by[chosen] = Counter()
        for name in able:
            if name != chosen:
                passed_by[name][chosen] += 1
                assert passed_by[name][chosen] == 1


def test_a_strategy_of_ones_own_is_a_class_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "alphabet.py"
    file.write_text(
        "from titan_rl.routing.strategies import RoundRobin\n\n\n"
        "class Last(RoundRobin):\n"
        "    def __init__(self, *, suffix):\n"
        "        super().__init__()\n"
        "        self.suffix = suffix\n\n"
        "    def choose(self, request):\n"
        "        return max(self.serving, default=None)\n"
    )
    strategy = build_strategy(RouterConfig(strategy=f"{file}:Last", strategy_kwargs={"suffix": "x"}))
    _, dispatcher = serving(strategy, 3)
    assert [a.generator for a in dispatcher.submit([request("r0"), request("r1")])] == ["g2", "g2"]


def test_a_strategy_that_lacks_a_method_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "half.py"
    file.write_text("class Half:\n    def choose(self, request):\n        return None\n")
    with pytest.raises(ConfigError, match="lacks assigned, pauses, released, serves"):
        build_strategy(RouterConfig(strategy=f"{file}:Half"))


class Scanned(LeastLoaded):
    """Looks at every generator for each choice."""

    def _first(self, version):  # type: ignore[no-untyped-def]
        expected = min(self._key(name) for name, serves in self.serving.items() if serves == version)
        assert super()._first(version) == expected
        assert len(self._heaps[version]) <= 4 * len(self.serving) + 16
        return expected


MOVES = st.one_of(
    st.tuples(st.just("serves"), st.integers(0, 4), st.integers(0, 2)),
    st.tuples(st.just("pauses"), st.integers(0, 4), st.just(0)),
    st.tuples(st.just("load"), st.integers(0, 4), st.integers(0, 3)),
    st.tuples(st.just("choose"), st.integers(0, 2), st.just(0)),
)


@given(st.lists(MOVES, max_size=300))
def test_a_choice_has_the_least_load_of_all_generators_of_an_allowed_version(changes) -> None:
    """And among equals it is the one that was chosen longest ago."""
    strategy, serving = Scanned(), {}
    load, chosen_at = [0] * 5, [-1] * 5
    for time, (what, which, value) in enumerate(changes):
        match what:
            case "serves":
                serving[f"g{which}"] = value
                strategy.serves(f"g{which}", PolicyVersion(0, value))
            case "load":
                load[which] = value
                strategy.assigned(request("r"), f"g{which}", value)
            case "choose":
                chosen = strategy.choose(request("r", at_least=PolicyVersion(0, which)))
                able = [(load[int(name[1])], chosen_at[int(name[1])]) for name, v in serving.items() if v >= which]
                assert (chosen is not None) == bool(able)
                if chosen is not None:
                    number = int(chosen[1])
                    assert serving[chosen] >= which and (load[number], chosen_at[number]) == min(able)
                    chosen_at[number] = time
            case _:
                serving.pop(f"g{which}", None)
                getattr(strategy, what)(f"g{which}")
