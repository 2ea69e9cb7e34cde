"""What holds of the timeline of every run that has trained."""

from __future__ import annotations

import json
from pathlib import Path

from titan_rl.view.timelines import Process, accounts, read_processes

NAMED_SHARE = 0.99
CLOCKS = 0.001
"""Seconds that the times of day of two processes may differ by."""
LOOK = 1.5
"""Seconds from the look at a mesh that its idle share is from to the end of a step, at most."""
FEWEST = 3
"""Looks within a run below which its idle shares say nothing."""


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
    trained = {span.ids["step"]: span.ended for span in controller.others if span.name == "train"}
    for mesh in {mesh for mesh, _ in ranks}:
        # Meshes are looked at one by one: a line tells of those that were since the line before.
        told = [(trained[line["step"]], line[f"idle/{mesh}"]) for line in lines if f"idle/{mesh}" in line]
        if not told or (whole := told[-1][0] - told[0][0]) < FEWEST * LOOK:
            continue
        waited = sum(share * (end - before) for (before, _), (end, share) in zip(told, told[1:], strict=False))
        (account,) = (each for each in accounts(processes, (told[0][0], told[-1][0])) if each.mesh == mesh)
        assert abs(waited / whole - account.idle) <= LOOK / whole, account


def names(processes: list[Process], mesh: str) -> set[str]:
    return {span.name for process in processes if process.mesh == mesh for span in (*process.main, *process.others)}
