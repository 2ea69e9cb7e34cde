"""Config of the router."""

from dataclasses import dataclass, field
from typing import Any, Literal

from titan_rl.bounds import CountOrZero, Positive


@dataclass(kw_only=True, slots=True)
class RouterConfig:
    """How requests find a generator and how weights change under them."""

    strategy: str = "least_loaded"
    """"round_robin", "least_loaded", "sticky_session", `pkg.mod:Class` or `file.py:Class`."""
    strategy_kwargs: dict[str, Any] = field(default_factory=dict)
    """Constructor arguments of a class of your own."""
    weight_sync: Literal["drain", "hot_swap"] = "drain"
    """`drain`: a generator finishes what it has, then takes new weights, so a completion is of one version.
    `hot_swap`: it takes them between two engine steps; running completions go on under the new weights."""
    max_syncing: CountOrZero = 0
    """Serving generators that may drain at once; the others serve on meanwhile (a rolling update). 0: all."""
    drain_seconds: Positive = 60.0
    """Longest drain; past it what still runs is interrupted and continued on another generator."""
    pull_retries: CountOrZero = 1
    """Further attempts at once after a failed pull; a generator that still fails waits, STALE, for the next version."""
    pull_seconds: Positive = 120.0
    """Longest pull of one generator, after its drain. A later one is waited for by nobody: the generator is LATE and
    takes no requests until its pull ends. After five times as long it is ended and replaced."""
    request_retries: CountOrZero = 1
    """Further generators that get a request after one has died under it; then it fails, because it may be what they die
    of. Interruptions (drains, failed pulls, sleep) do not count."""
    resume: bool = True
    """Continue an interrupted completion from its own tokens, on the same or another generator. Sampling options that
    depend on past output (penalties, min_new_tokens) are refused then: the engine would take those for prompt."""
