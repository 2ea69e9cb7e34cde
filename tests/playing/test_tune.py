"""Which trials a search makes, and which of them go on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from titan_rl.config_registry import task
from titan_rl.playing.tune import (
    BONUS,
    FEWEST_STEPS,
    SAMPLES,
    Candidate,
    better_half,
    candidates,
    first_steps,
    result_table,
    rounds,
)
from titan_rl.view.learning import LR


def test_the_settings_of_the_task_itself_are_tried_first_and_every_step_stays_as_long():
    found = candidates(task())
    exact = replace(task().trainer, optimizer=replace(task().trainer.optimizer, lr=1.25e-4))
    assert candidates(replace(task(), trainer=exact))[0].settings[LR] == 1.25e-4
    assert found[0].settings[LR] == task().trainer.optimizer.lr and len(found) == 8
    assert {each.settings[SAMPLES] * each.settings["loop.groups_per_step"] for each in found} == {512}
    assert len({str(each.settings) for each in found}) == len(found)


def test_a_loss_without_an_entropy_bonus_is_tried_without_one():
    config = task()
    loss = replace(config.trainer.loss, kwargs={"clip_low": 0.2})
    found = candidates(replace(config, trainer=replace(config.trainer, loss=loss)))
    assert len(found) == 5 and not any(BONUS.rpartition(".")[2] in str(each.settings) for each in found)
    for each in found:
        each.scores.append(0.5)
    assert [column.header for column in result_table(found, found[0]).columns] == ["lr", "samples_per_group", "reward"]


def test_every_round_is_half_as_many_and_twice_as_long():
    assert list(rounds(8, 10)) == [(8, 10), (4, 20), (2, 40)]
    assert list(rounds(5, 10)) == [(5, 10), (2, 20)] and list(rounds(1, 10)) == []


@pytest.mark.parametrize(("seconds", "steps"), [(600, 83), (60, FEWEST_STEPS)])
def test_the_first_round_is_as_long_as_the_time_allows(seconds, steps):
    assert first_steps(8, seconds, 10, 0.23) == steps
    if seconds == 600:
        assert sum(count * (10 + 0.23 * length) for count, length in rounds(8, steps)) == pytest.approx(600, rel=0.02)


def test_the_better_half_goes_on_and_a_trial_that_failed_does_not():
    scores = [0.2, float("-inf"), 0.9, 0.2]
    entered = [Candidate({"n": number}, [score]) for number, score in enumerate(scores)]
    assert [each.settings["n"] for each in better_half(entered)] == [2, 0]
    assert better_half(entered[:1]) == entered[:1]
