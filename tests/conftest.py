"""For all tests.

- A test runner in the background ignores Ctrl-C, one under nohup the hang-up, and so would all processes of its tests.
- Monarch reads its supervision settings when it is imported, which a test module may do first.
- hypothesis judges no example by its time, which on a busy machine says nothing.
- Where processes share the tests, the slowest files come first, or one of them would run alone at the end.
"""

import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from titan_rl.supervision.process import prepare_controller

signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

prepare_controller()

settings.register_profile("any load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any load")


SLOW_FILES = [line.split()[0] for line in Path(__file__).with_name("slow_files.txt").read_text().splitlines()]
"""Slowest first; `.ci/tests.py` measures them."""


WHOLE_RUNS = ("tests/hosts/", "tests/packaging/", "tests/system/")
RUN_SECONDS = 600
"""A test there may take so long on busy cores, where it has no bound of its own."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(WHOLE_RUNS) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(RUN_SECONDS))
    if hasattr(config, "workerinput"):
        places = {file: place for place, file in enumerate(SLOW_FILES)}
        items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))
