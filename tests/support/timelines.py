"""What holds of the timeline of every run that has trained."""

from __future__ import annotations

import json
from pathlib import Path

from titan_rl.view.timelines import Process, accounts, read_processes

NAMED_SHARE = 0.99
CLOCKS = 0.001
"""Seconds that the times of day of two processes may differ by."""
DIFFERENCE = 0.02
"""Largest difference of an idle share between timeline and metrics."""


def assert_timeline_is_whole(run: Path) -> None:
    """Every process names what it does, and idle shares are those of the metrics."""
    processes = read_processes(run)
    ranks = {(process.mesh, process.rank) for process in processes}
    assert {(mesh, 0) for mesh in ("controller", "trainer", "generator0", "router", "rollout0")} <= ranks
    controller = next(process for process in processes if process.mesh == "controller")
    for process in processes:
        named, seconds = sum(span.seconds for span in process.main), process.ended - process.began
        assert named >= NAMED_SHARE * seconds, process.mesh
        assert process.began >= controller.began - CLOCKS and process.ended <= controller.ended + CLOCKS, process.mesh
    assert {"forward", "backward", "optimizer", "publish"} <= names(processes, "trainer")
    assert {"build", "prefill", "decode", "pull", "verify", "wait"} <= names(processes, "generator0")
    assert {"events", "rollout"} <= names(processes, "rollout0")

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    told = [idle for line in lines if (idle := {key[5:]: line[key] for key in line if key.startswith("idle/")})]
    polls = [span.began + span.seconds / 2 for span in controller.others if span.lane == "poll"]
    assert len(polls) - 2 <= len(told) < len(polls)  # the first poll has none before it, the last may end after the run
    polls = polls[: len(told) + 1]
    seconds = [after - before for before, after in zip(polls, polls[1:], strict=False)]
    for account in accounts(processes, (polls[0], polls[-1])) if told else ():  # a slow poll is the last for a while
        if account.mesh in told[0]:
            shares = (idle[account.mesh] * lasted for idle, lasted in zip(told, seconds, strict=True))
            assert abs(sum(shares) / sum(seconds) - account.idle) <= DIFFERENCE, account


def names(processes: list[Process], mesh: str) -> set[str]:
    return {span.name for process in processes if process.mesh == mesh for span in (*process.main, *process.others)}
