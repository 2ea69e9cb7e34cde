"""What holds of the `metrics.jsonl` of every run that has finished a step."""

import json
from pathlib import Path

from titan_rl.observability.metric_table import METRICS, metric_of
from titan_rl.observability.metrics import GROUPS


def assert_metrics_are_known(run: Path) -> None:
    """Every number is in the table, and every entry that all runs have is among the numbers."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    keys = set().union(*lines) - {"step", GROUPS}
    assert not {key for key in keys if metric_of(key) is None}
    found = {metric.name for key in keys if (metric := metric_of(key)) is not None}
    assert not {metric.name for metric in METRICS if not metric.when} - found
