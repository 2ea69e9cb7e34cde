"""A warm-up goes on until its loss is low, or has come down and stays."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from titan_rl.scheduling.schedule import warm_up_is_over

STEPS = 2_000


def ended_after(loss: Callable[[int], float], *, flat: int = 200, noise: float = 0.1) -> tuple[int, str]:
    """Step and reason; the loss of a batch is now above, now below what is given."""
    losses: list[float] = []
    for step in range(STEPS):
        losses.append(loss(step) * (1 + noise * math.sin(step * 1.7)))
        if over := warm_up_is_over(losses, enough=0.002, flat=flat):
            return step + 1, over
    return STEPS, ""


def wrong_demonstrations(step: int) -> float:
    return 0.16 + 1.9 * math.exp(-step / 40)


def test_it_ends_as_soon_as_the_loss_is_low():
    step, why = ended_after(lambda step: 2.0 if step < 300 else 0.001)
    assert (step, why) == (310, "enough")


def test_it_ends_where_wrong_demonstrations_keep_the_loss_up():
    step, why = ended_after(wrong_demonstrations)
    assert 400 < step < 1000 and why == "it falls no more"
    assert ended_after(wrong_demonstrations, flat=0) == (STEPS, ""), "unless that was not asked for"


@pytest.mark.parametrize(
    "loss",
    [
        lambda step: 2.3 if step < 1500 else 0.1,  # nothing is learned for long
        lambda step: 0.9 + 1.4 * math.exp(-step / 40),  # at first only what answers look like
        lambda step: 2.7 * math.exp(-step / 300) + 0.02,  # slowly and steadily
        lambda step: 2.0 / (1 + step / 20),  # ever more slowly, but it falls
    ],
)
def test_it_goes_on_while_nothing_is_learned_yet_or_more_is(loss):
    assert ended_after(loss) == (STEPS, "")


def test_one_bad_batch_is_no_end_of_a_fall():
    def falling(step: int) -> float:
        return 100.0 if step == 1200 else 2.5 * math.exp(-step / 300) + 0.02 * (1 - step / STEPS)

    assert ended_after(falling, noise=0.02) == (STEPS, "")


def test_a_late_plateau_has_to_last_as_long_as_a_quarter_of_the_way():
    step, _ = ended_after(lambda step: 0.15 if step > 1200 else 2.0 - 1.5 * step / 1200)
    assert step > 1200 + 1.25 * 1200 / 4
