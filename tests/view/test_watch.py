"""`titan-rl watch` on run directories that a test writes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.recorded import line, run_with

from titan_rl.directories import lock_run
from titan_rl.view import watch


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert watch.VERB.run(words, prog="titan-rl watch") == 0
    return capsys.readouterr().out


def test_the_newest_step_and_the_newest_evaluation_are_shown_plainly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older, evaluated = line(step=11, group=400), line(step=10, group=2, purpose="evaluate", kept=["wrong"])
    run_with(tmp_path / "run", older, evaluated, line(), torn='{"step": 13, "purp')
    out = shown(capsys, str(tmp_path), "--once")
    assert "── best ── train, step 12, group 417, sample 1 ── 2 tokens\nuser       12=\nassistant  12\n" in out
    assert "reward     1.000  (right 1)  stopped: stop\n" in out
    assert "evaluate, step 10, group 2" in out and "group 400" not in out
    assert "\x1b" not in out


def test_what_a_policy_wrote_cannot_control_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_with(tmp_path / "run", line(messages=[{"role": "assistant", "content": "[red]\x1b[2J\nsecond [/]"}]))
    out = shown(capsys, str(run), "--once")
    assert "assistant  [red]\\x1b[2J\n           second [/]" in out


def test_tool_calls_failures_and_rollouts_without_messages_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = [{"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}]
    run = run_with(tmp_path / "run", line(messages=calls), line(messages=[], turns=[], error="it raised"))
    out = shown(capsys, str(run), "--once")
    assert "assistant  → add(a=1)" in out and "error      it raised\n" in out and "  12=12<eos>\n" in out


def test_it_follows_a_run_until_that_is_over_also_when_its_file_is_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with(tmp_path / "run", line(step=1), line(step=2))
    lock = lock_run(run)

    def cut() -> None:  # it goes on from its checkpoint after step 1
        (run / "rollouts.jsonl").write_text(json.dumps(line(step=1)) + "\n")

    def end() -> None:
        with open(run / "rollouts.jsonl", "a") as file:
            file.write(json.dumps(line(step=3)) + "\n")
        os.close(lock)

    events = iter([cut, end])
    monkeypatch.setattr(watch.time, "sleep", lambda seconds: next(events)())
    steps = [words.split(",")[0] for words in shown(capsys, str(run)).split("train, step ")[1:]]
    assert steps == ["2", "1", "3"]


@pytest.mark.parametrize("damaged", ["null", "{}", "\0"])
def test_a_line_that_is_no_rollout_is_told_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damaged: str
) -> None:
    run = run_with(tmp_path / "run", line(), torn=damaged + "\n")
    assert watch.VERB.run([str(run), "--once"], prog="titan-rl watch") == 2
    error = capsys.readouterr().err
    assert "rollouts.jsonl cannot be read: " in error and error.count("\n") == 1


@pytest.mark.parametrize("words", [["nowhere"], [".", "--once", "--seed", "1"]])
def test_refusals_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert watch.VERB.run(words, prog="titan-rl watch") == 2
    assert capsys.readouterr().err.count("\n") == 1
