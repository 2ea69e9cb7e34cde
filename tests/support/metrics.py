"""What holds of the `metrics.jsonl` of every run that has finished a step."""

import json
from pathlib import Path

import tomli

from titan_rl.metrics.metric_table import METRICS, metric_of
from titan_rl.metrics.writer import GROUPS


def assert_metrics_are_known(run: Path) -> None:
    """Every number is in the table, and every entry that all runs have is among the numbers. A simulated engine tells
    nothing of itself."""
    simulated = tomli.loads((run / "config.toml").read_text())["generator"]["engine"] == "simulated"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    keys = set().union(*lines) - {"step", GROUPS}
    assert not {key for key in keys if metric_of(key) is None}
    found = {metric.name for key in keys if (metric := metric_of(key)) is not None}
    always = {metric.name for metric in METRICS if not metric.when}
    assert not {name for name in always - found if not (simulated and name.startswith("generation/"))}
