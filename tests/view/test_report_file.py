"""What is in a report, read without a browser: runs as they were cut off, sizes, and text that nobody may trust."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from synthetic import HOSTILE, make_run

from titan_rl.view import report as module
from titan_rl.view.report import VERB, write_report
from titan_rl.view.timelines import read_timelines

BLOCK = re.compile(r'<script type="text/plain" id="data-([\w-]+)">([A-Za-z0-9+/=]*)</script>')
ALL_ELSE = 10_000_000 - module.MOST_ROLLOUT_BYTES
"""Bytes that a report has for everything but rollouts."""


def blocks(report: Path) -> dict[str, Any]:
    """The data of a report, by block."""
    found = BLOCK.findall(report.read_text(encoding="utf-8"))
    return {name: json.loads(gzip.decompress(base64.b64decode(data))) for name, data in found}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "run")


def test_a_report_has_every_rollout_with_its_tokens(run: Path):
    found = blocks(write_report([run], run / "report.html"))
    table = found["rollouts"]
    records = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    assert len(table["step"]) == len(records) == found["main"]["rollouts"]["shown"]
    wanted = {(each["step"], each["purpose"] == "evaluate", each["group"], each["sample"]): each for each in records}
    for at, step in enumerate(table["step"]):
        record = wanted[step, bool(table["evaluated"][at]), table["group"][at], table["sample"][at]]
        detail = found[f"rollouts-{table['run'][at]}-{table['chunk'][at]}"][table["place"][at]]
        assert detail["conversations"] == [*record.get("side_conversations", ()), record["messages"]]
        for branch, shown in zip(record["branches"], detail["branches"], strict=True):
            assert [shown[name] for name in ("ids", "texts", "trained")] == [
                branch[name] for name in ("token_ids", "texts", "trained")
            ]
            gaps = [gap for gap in shown["gaps"] if gap is not None]
            assert len(gaps) == (0 if branch["trainer_logprobs"] is None else sum(branch["trained"]))


def test_hostile_text_is_nowhere_but_in_packed_data(tmp_path: Path):
    run = make_run(tmp_path / "<script>alert(1)</script>".replace("/", "_"), steps=2, answer=HOSTILE, recipe="</title>")
    text = write_report([run], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "alert" not in text and "onerror" not in text
    assert text.count("<script>") == 1 and "innerHTML" not in text
    assert "default-src 'none'" in text
    answers = blocks(tmp_path / "report.html")["rollouts-0-0"][0]["conversations"][-1][-1]["content"]
    assert answers == HOSTILE.replace("\ud83d", "?")


def test_a_killed_run_is_shown_as_far_as_it_came(tmp_path: Path):
    run = make_run(tmp_path / "run", steps=4, done=False)
    for name in ("metrics.jsonl", "rollouts.jsonl", "spans/trainer.jsonl"):
        whole = (run / name).read_bytes()
        (run / name).write_bytes(whole[:-20])
    with open(run / "rollouts.jsonl", "ab") as file:
        file.write(b'\n{"step": 1}\nnull\n' + b"[" * 100_000 + b"\n")
        file.write(
            b'{"step": 1, "purpose": "train", "group": 1, "sample": 1, "reward": 1, "messages": [], "branches": [{}]}\n'
        )
    found = blocks(write_report([run], run / "report.html"))["main"]
    assert found["runs"][0]["steps"] == 3 and not found["runs"][0]["done"]
    assert found["rollouts"]["shown"] == 31


def test_an_older_run_has_numbers_only(tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    values = ("NaN", "1", "1e999")
    lines = (f'{{"step": {step}, "train/loss": {value}, "groups": [1]}}\n' for step, value in enumerate(values, 1))
    (run / "metrics.jsonl").write_text("".join(lines))
    found = blocks(write_report([run], run / "report.html"))
    assert found["main"]["series"]["train/loss"][0] == {"steps": [1, 2, 3], "values": [None, 1.0, None], "of": 1}
    assert found["main"]["timelines"] == [[]] and found["rollouts"] == {}


def test_two_runs_are_compared_setting_by_setting(run: Path, tmp_path: Path):
    other = make_run(tmp_path / "other", lr=0.002, steps=10)
    settings = blocks(write_report([run, other], tmp_path / "report.html"))["main"]["settings"]
    different = {name for name, *values in settings if values[0] != values[1]}
    assert different == {"trainer.optimizer.lr", "loop.steps"}


def test_a_lane_is_the_mean_of_its_ranks(run: Path):
    steps, whole = read_timelines(run)
    assert [lane.mesh for lane in steps.lanes][:3] == ["trainer", "generator0", "generator1"]
    assert 0 < steps.start < steps.start + steps.seconds <= whole.seconds
    for lane in steps.lanes:
        for at in range(400):
            assert sum(kind.shares[at] for kind in lane.kinds) == pytest.approx(1, abs=5e-3)
        waited = sum(kind.share for kind in lane.kinds if kind.waits_for)
        assert lane.account is not None and 0 < lane.account.idle < 1
        assert waited <= lane.account.idle + 1e-3, "missing processes count as idle"


def test_a_long_run_keeps_some_rollouts_of_every_step_and_says_how_many(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "MOST_ROLLOUT_BYTES", 45_000)
    report = write_report([run], tmp_path / "report.html")
    assert report.stat().st_size < 45_000 + ALL_ELSE
    found = blocks(report)
    assert 40 <= found["main"]["rollouts"]["shown"] < found["main"]["rollouts"]["recorded"] == 328
    assert set(found["rollouts"]["step"]) == set(range(1, 41))


def test_the_command_says_where_the_report_is(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert VERB.run([str(run)], prog="titan-rl report") == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    assert VERB.run([str(run), str(run), "--output", str(tmp_path / "both.html")], prog="titan-rl report") == 0
    assert (tmp_path / "both.html").is_file()
    assert VERB.run([str(tmp_path / "nothing")], prog="titan-rl report") == 2
    assert "is no run directory" in capsys.readouterr().err
    assert VERB.run([], prog="titan-rl report") == 2
    assert VERB.run([str(run), "--output", str(tmp_path / "no" / "where.html")], prog="titan-rl report") == 2
    (tmp_path / "thesis.html").write_text("mine")
    assert VERB.run([str(run), "--output", str(tmp_path / "thesis.html")], prog="titan-rl report") == 2
    assert (tmp_path / "thesis.html").read_text() == "mine", "only an earlier report is replaced"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "thesis.html").rename("report.html")
    assert VERB.run([str(run), str(run)], prog="titan-rl report") == 2, "also where no file was named"
    assert (tmp_path / "report.html").read_text() == "mine"
    assert VERB.run([str(run), "--output", str(tmp_path / "both.html")], prog="titan-rl report") == 0
