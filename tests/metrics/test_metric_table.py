"""The table of metrics is whole, and what it names exists."""

import re
from operator import attrgetter

from titan_rl.config import RunConfig
from titan_rl.config_registry import load_recipe
from titan_rl.metrics.metric_table import METRICS, metric_of

NAME = re.compile("`([^`]+)`")


def test_every_key_has_one_entry():
    for metric in METRICS:
        key = re.sub("<[^>]+>", "7", metric.name)
        assert metric_of(key) is metric
    assert metric_of("fleet/generator0/load") is metric_of("fleet/generator12/load")
    assert metric_of("train/nonsense") is None and metric_of("fleet/a/b/load") is None


def test_advice_names_settings_and_metrics_that_exist():
    config = load_recipe("copy4")
    sections = set(RunConfig.__dataclass_fields__)
    for metric in METRICS:
        for name in NAME.findall(f"{metric.meaning} {metric.bad} {metric.do} {metric.when}"):
            if name.partition(".")[0] in sections and "." in name:
                attrgetter(name)(config)
            elif re.fullmatch(r"[a-z_]+/[a-z0-9_<>/]+", name):
                assert metric_of(name), f"{metric.name} names {name}"
        for name in metric.change:
            attrgetter(name)(config)


def test_every_bad_value_comes_with_something_to_do_and_says_its_limit():
    for metric in METRICS:
        assert bool(metric.bad) == bool(metric.do), metric.name
        assert (metric.limit is not None) == ("{limit}" in metric.bad), metric.name
        assert metric.above is None or metric.below is None, metric.name
