"""Which trials a search makes, and which of them go on."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest
import tomli
from rich.console import Console

from titan_rl.config_registry import task
from titan_rl.playing.tune import (
    BONUS,
    FEWEST_STEPS,
    SAMPLES,
    Candidate,
    Search,
    better_half,
    candidates,
    plan_of,
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


@pytest.mark.parametrize(
    ("count", "seconds", "plan"),
    [
        (8, 600, [(8, 83), (4, 166), (2, 332)]),
        (8, 2000, [(8, 200), (4, 400), (2, 800)]),  # no more than that
        (8, 120, [(4, 32), (2, 64)]),
        (8, 60, [(2, 86)]),
        (5, 60, [(2, 86)]),
        (3, 1, [(2, FEWEST_STEPS)]),
    ],
)
def test_the_rounds_take_the_time_that_there_is_and_fewer_enter_where_it_is_short(count, seconds, plan):
    assert plan_of(count, seconds, 10, 0.23, 200) == plan
    if seconds in (60, 120, 600):
        assert sum(each * (10 + 0.23 * steps) for each, steps in plan) == pytest.approx(seconds, rel=0.02)


def test_the_better_half_goes_on_and_a_trial_that_failed_does_not():
    scores = [0.2, float("-inf"), 0.9, 0.2]
    entered = [Candidate({"n": number}, [score]) for number, score in enumerate(scores)]
    assert [each.settings["n"] for each in better_half(entered)] == [2, 0]
    assert better_half(entered[:1]) == entered[:1]


def search_of(tmp_path, scored, stop_after=99):
    """A search whose trials get these scores by their number."""
    config = replace(task(), trainer=replace(task().trainer, warmup=replace(task().trainer.warmup, steps=0)))
    search = Search(config, None, tmp_path, Console(quiet=True))
    done = []

    async def trial(candidate, steps):
        if len(done) > stop_after:
            raise KeyboardInterrupt
        done.append(candidate)
        candidate.scores.append(scored(candidate, len(done)))
        return 0.1

    search.trial = trial
    return search


def test_the_best_of_the_rounds_that_have_ended_is_kept_when_a_search_is_stopped(tmp_path):
    def scored(candidate, number):
        return candidate.settings[LR] if number < 11 else -math.inf

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(search_of(tmp_path, scored, stop_after=9).run(600))  # one before the first round, which has eight
    kept = tomli.loads((tmp_path / "best.toml").read_text())
    assert kept["trainer"]["optimizer"]["lr"] == 3e-3
    best = asyncio.run(search_of(tmp_path / "..", scored).run(600))
    assert best is not None and best.settings[LR] == 3e-3, "all trials of later rounds failed"
    assert asyncio.run(search_of(tmp_path, lambda *_: -math.inf).run(600)) is None
