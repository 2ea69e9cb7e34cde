"""Fixtures for tests of rollouts."""

import pytest
from support.processes import heard  # noqa: F401
from support.rollouts import calling_policy
from support.sessions import Renderer

from titan_rl.policy.config import TinyPolicyConfig
from titan_rl.policy.models.tiny import make_tiny_policy


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """Of digits and `=`."""
    return make_tiny_policy(TinyPolicyConfig(), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def calling_path(tmp_path_factory):
    """Of digits, `+`, `=` and the markers of tools."""
    return calling_policy(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def renderer(calling_path):
    return Renderer(calling_path)
