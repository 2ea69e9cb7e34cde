"""The table of metrics is whole: the manual shows it, and what it names exists."""

import re
from pathlib import Path

from titan_rl.config import RunConfig
from titan_rl.observability import metric_table
from titan_rl.observability.metric_table import METRICS, markdown, metric_of
from titan_rl.overrides import get_setting

README = Path(metric_table.__file__).with_name("README.md")
MARK = "<!-- The tables are made of metric_table.py: tests/core/test_metric_table.py writes them anew. -->\n"
NAME = re.compile("`([^`]+)`")


def test_the_manual_has_the_table():
    prose, mark, tables = README.read_text().partition(MARK)
    assert mark
    if tables != f"\n{markdown()}":
        README.write_text(f"{prose}{mark}\n{markdown()}")
        raise AssertionError(f"{README} was not that of metric_table.py; it is now: look at it")


def test_every_key_has_one_entry():
    for metric in METRICS:
        key = re.sub("<[^>]+>", "7", metric.name)
        assert metric_of(key) is metric
    assert metric_of("fleet/generator0/load") is metric_of("fleet/generator12/load")
    assert metric_of("train/nonsense") is None and metric_of("fleet/a/b/load") is None


def test_advice_names_settings_and_metrics_that_exist():
    config = RunConfig()
    sections = set(RunConfig.__dataclass_fields__)
    for metric in METRICS:
        for name in NAME.findall(f"{metric.meaning} {metric.bad} {metric.do} {metric.when}"):
            if name.partition(".")[0] in sections and "." in name:
                get_setting(config, name)
            elif re.fullmatch(r"[a-z_]+/[a-z0-9_<>/]+", name):
                assert metric_of(name), f"{metric.name} names {name}"


def test_every_bad_value_comes_with_something_to_do_and_fits_into_a_table():
    for metric in METRICS:
        assert bool(metric.bad) == bool(metric.do), metric.name
        assert not set("|\n") & {*metric.unit, *metric.meaning, *metric.bad, *metric.do, *metric.when}, metric.name
