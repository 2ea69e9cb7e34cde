"""Fixtures for tests of rollouts."""

import pytest
from support.processes import heard  # noqa: F401
from support.rollouts import calling_policy
from support.sessions import Renderer


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return Renderer(calling_policy(tmp_path_factory.mktemp("tiny")))
