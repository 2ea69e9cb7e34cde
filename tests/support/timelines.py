"""What holds of the timeline of every run that has trained for some seconds."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from titan_rl.observability.bubbles import accounts
from titan_rl.observability.spans import read_spans
from titan_rl.observability.trace import TRACE

NAMED_SHARE = 0.99
DIFFERENCE = 0.02
"""Largest difference of an idle share between timeline and metrics."""


def assert_timeline_is_whole(run: Path) -> None:
    """Every process names what it does, the trace holds all of it, and idle shares are those of the metrics."""
    lives = read_spans(run)
    assert {"controller.0", "trainer.0", "generator0.0", "router.0", "rollout0.0"} <= {life.process for life in lives}
    controller = next(life for life in lives if life.mesh == "controller")
    for life in lives:
        assert life.named_share >= NAMED_SHARE, life.process
        assert life.began >= controller.began and life.ended <= controller.ended, life.process
    assert {"forward", "backward", "optimizer", "publish"} <= names(lives, "trainer")
    assert {"build", "prefill", "decode", "pull", "verify", "wait"} <= names(lives, "generator0")
    assert {"environment", "grader", "rollout"} <= names(lives, "rollout0")

    trace = json.loads(gzip.decompress((run / TRACE).read_bytes()))["traceEvents"]
    spans = sum(len(life.main) + len(life.others) for life in lives)
    assert sum(event["ph"] == "X" for event in trace) == spans

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    told = [idle for line in lines if (idle := {key[5:]: line[key] for key in line if key.startswith("idle/")})]
    assert told
    looks = [span.began + span.seconds / 2 for span in controller.others if span.lane == "look"][: len(told) + 1]
    seconds = [after - before for before, after in zip(looks, looks[1:], strict=False)]
    for account in accounts(lives, (looks[0], looks[-1])):
        if account.mesh in told[0]:
            shares = (idle[account.mesh] * lasted for idle, lasted in zip(told, seconds, strict=True))
            assert abs(sum(shares) / sum(seconds) - account.idle) <= DIFFERENCE, account


def names(lives: list, mesh: str) -> set[str]:
    return {span.name for life in lives if life.mesh == mesh for span in (*life.main, *life.others)}
