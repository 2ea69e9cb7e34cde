"""Config of weight publication."""

from dataclasses import dataclass

from titan_rl.bounds import TwoOrMore


@dataclass(kw_only=True, slots=True)
class WeightsConfig:
    """How new weights travel from the trainer mesh to the generators. Generators need none of these settings: a
    publication says where it is."""

    max_live: TwoOrMore = 2
    """Publications that may exist at once: the one that is served, the one that is being pulled, and those that an
    evaluation keeps. A trainer that wants one more waits, and the watchdog says for whom."""
