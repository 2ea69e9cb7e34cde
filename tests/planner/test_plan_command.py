"""`titan-rl plan` as its users see it."""

from __future__ import annotations

import json

import pytest

from titan_rl import cli
from titan_rl.overrides import apply
from titan_rl.planner.command import VERB, PlanConfig

QUICK = [
    "plan",
    *("--devices", "4", "--trainer-devices", "1"),
    *("--groups-per-step", "8", "--samples-per-group", "4", "--steps", "6", "--lengths", "uniform:100:900"),
]


def test_every_combination_is_a_row_and_the_last_line_is_json(capsys):
    arguments = ["--max-staleness", "0", "2", "--weight-sync", "drain", "hot_swap", "--window", "1", "8", "--json"]
    assert cli.main([*QUICK, *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    plans = json.loads(lines[-1])["plans"]
    assert len(plans) == 8
    assert lines[0].split()[:2] == ["trainer:generators", "S"] and lines[2].split()[0] == "1:3"
    for plan in plans:
        assert 0 < plan["share_of_bound"] <= 1
        assert sum(plan["ages"].values()) == 48
        assert max(map(int, plan["ages"])) <= plan["bound"]
        assert (plan["speedup_vs_sync"] == 1) == (plan["max_staleness"] == 0)


def test_without_json_it_ends_with_what_the_fastest_plan_implies(capsys):
    assert cli.main(QUICK) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("fastest: 1:3, hot_swap, 8 groups per step, max staleness ")


def test_several_splits_are_compared_on_the_same_completions(capsys):
    assert cli.main([*QUICK, "--trainer-devices", "1", "2", "--max-staleness", "0", "--json"]) == 0
    one, two = json.loads(capsys.readouterr().out.splitlines()[-1])["plans"]
    assert (one["generators"], two["generators"]) == (3, 2)
    assert one["speedup_vs_colocated"] != two["speedup_vs_colocated"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--trainer-devices", "4"], "leave 0 for generators"),
        (["--devices-per-generator", "8"], "which take 8 each"),
        (["--devices-per-generator", "0"], "--devices-per-generator: expected an integer of at least 1, got '0'"),
        (["--lengths", "normal:3"], "expected uniform:LEAST"),
        (["--lengths", "uniform:many"], "--lengths uniform:many"),
        (["--lengths", "file:/nowhere"], "/nowhere"),
        (["--max-staleness", "-1"], "--max-staleness"),
        (["--strategy", "by_colour"], "by_colour"),
        (["--engine.seconds-per-step", "0"], "--engine.seconds-per-step: expected a finite number of more than 0"),
        (["--weight-sync", "magic"], "magic"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(capsys, wrong, message):
    assert cli.main([*QUICK, *wrong]) == 2
    told = capsys.readouterr()
    assert message in told.err and told.out == ""


def test_the_help_shows_examples_that_parse(capsys):
    assert cli.main(["plan", "--help"]) == 0
    examples = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  titan-rl plan")]
    assert examples
    for _, _, *arguments in examples:
        apply(PlanConfig(), VERB.read(arguments).layers)
