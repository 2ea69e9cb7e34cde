"""For all tests: Monarch reads its supervision settings when it is imported, which a test module may do first; and
hypothesis judges no example by its time, which on a busy machine says nothing."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from titan_rl.launch.process import prepare_controller

prepare_controller()

settings.register_profile("any load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any load")

SHARED_BY_FOLDER = ("generation",)
"""Folders whose modules share generators that take long to start."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `-n 2 --dist loadgroup` (CI) a process gets whole modules or folders, for the sake of their fixtures."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            path = Path(item.path)
            group = path.parent.name if path.parent.name in SHARED_BY_FOLDER else str(path)
            item.add_marker(pytest.mark.xdist_group(group))
