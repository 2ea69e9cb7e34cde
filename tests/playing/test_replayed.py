"""What `titan-rl replay` finds different, without playing anything (1 s)."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.recorded import line, run_with

from titan_rl.metrics.rollout_record import read_record
from titan_rl.playing import replay
from titan_rl.playing.replay import difference_of_numbers, facts
from titan_rl.types import StopReason


def difference(recorded: list[dict[str, Any]], replayed: list[dict[str, Any]]) -> str:
    return replay.difference([*map(read_record, recorded)], [*map(read_record, replayed)])


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a leaf stands in a record."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield from places(inner, (*at, name))
    if not isinstance(value, dict | list):
        yield at


COMPARED = [
    place
    for place in places(line())
    if place[0] in ("branches", "reward", "reward_parts", "advantage", "stop_reason", "messages")
    or place[-1] in ("seed", "finish", "tokens")
]


@given(st.sampled_from(COMPARED))
def test_any_single_change_is_found_and_named(place: tuple[Any, ...]) -> None:
    tampered = copy.deepcopy(line())
    *outer, last = place
    inner: Any = tampered
    for name in outer:
        inner = inner[name]
    if place[-1] == "sample":
        return  # of a branch: only its name
    if place == ("stop_reason",):
        inner[last] = StopReason.TIMEOUT
    elif inner[last] is None:
        inner[last] = 0.5
    else:
        inner[last] = "other" if isinstance(inner[last], str) else inner[last] + 1
    found = difference([tampered], [line()])
    assert found.startswith("group 417, sample 1")
    if place[0] == "branches":
        assert f"token {last}" in found or f"'{line()['branches'][0]['texts'][place[3]]}'" in found


def test_what_belongs_to_one_play_is_not_compared() -> None:
    again = copy.deepcopy(line()) | {"attempt": 2, "kept": ["worst"]}
    again["turns"][0] |= {"request": "another", "generator": "generator9"}
    again["branches"][0]["versions"] = ["", "", "v2.3", "v2.3"]
    assert difference([line()], [again]) == ""


def test_which_of_several_branches_was_answered_last_is_not_compared() -> None:
    forked = copy.deepcopy(line()) | {"branches": line()["branches"] * 2}
    assert difference([forked], [forked | {"messages": [{"role": "user", "content": "3="}]}]) == ""


def test_a_rollout_that_was_finished_before_a_resume_is_compared_by_its_tokens() -> None:
    bare = line() | {"messages": [], "turns": []}
    assert difference([bare], [line()]) == ""


def test_missing_tokens_and_rollouts_are_named() -> None:
    short = copy.deepcopy(line())
    for name, values in short["branches"][0].items():
        if name != "sample":
            values.pop()
    assert "recorded token 3, replayed reward" in difference([line()], [short])
    assert difference([line()], []) == "group 417, sample 1: the replay did not train it"


def test_the_first_number_that_differs_is_named() -> None:
    numbers = {"train/loss": 0.5, "train/grad_norm": 1.0, "seconds/step": 3.0}
    assert difference_of_numbers(numbers, numbers | {"seconds/step": 9.0}) == ""
    assert difference_of_numbers(numbers, numbers | {"train/loss": 0.25}) == "train/loss: recorded 0.5, replayed 0.25"


def test_every_token_is_a_fact() -> None:
    assert sum(isinstance(value, float) for _, value in facts(read_record(line()))) == 3 * 2 + 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--group", "5"], "recorded no rollout of group 5; near it are 417"),
        (["--step", "x"], "--step: expected a number from 0 on, got 'x'"),
        (["--group", "417", "--step", "12"], "say what to replay: --group N or --step N"),
        ([], "say what to replay"),
        (["--group", "417", "--seed", "4"], "seed 0 → 4"),
    ],
)
def test_what_cannot_be_replayed_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    run = run_with(tmp_path / "run", line())
    assert replay.VERB.run([str(run), *words], prog="titan-rl replay") == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_directory_that_is_no_run_and_a_run_without_records_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay.VERB.run([str(tmp_path), "--group", "1"], prog="replay") == 2
    run = run_with(tmp_path / "run")
    (run / "rollouts.jsonl").unlink()
    assert replay.VERB.run([str(run), "--group", "1"], prog="replay") == 2
    bare = {"step": 1, "purpose": "train"}
    for damaged in ({"step": 1}, bare, bare | {"group": 1}, bare | {"group": 1, "branches": [{"token_ids": [1]}]}):
        (run / "rollouts.jsonl").write_text(json.dumps(damaged) + "\n")
        assert replay.VERB.run([str(run), "--group", "1"], prog="replay") == 2
    assert capsys.readouterr().err.count("\n") == 6


def test_numbers_are_read_as_far_as_they_were_written(tmp_path: Path) -> None:
    lines = '{"step": 1, "evaluation/reward": 1}\n{"step": 1, "train/loss": 0.5}\n\0\n{"step": 2, "tra'
    (tmp_path / "metrics.jsonl").write_text(lines)
    assert replay._numbers(tmp_path, 1)["train/loss"] == 0.5 and replay._numbers(tmp_path, 2) == {}
