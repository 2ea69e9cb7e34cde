"""What tests of rollouts share."""

import logging

import pytest
from asking_programs import Renderer
from processes import Heard

from titan_rl.policy.config import TinyPolicyConfig
from titan_rl.policy.models.tiny import make_tiny_policy


@pytest.fixture
def heard():
    """What child processes print."""
    logger = logging.getLogger("titan_rl.sandbox.spawned_process")
    level, handler = logger.level, Heard()
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    symbols = ("<tool>", "</tool>", "<result>", "</result>")
    policy = TinyPolicyConfig(symbols="0123456789+=", special_tokens=symbols, max_length=64)
    return Renderer(make_tiny_policy(policy, tmp_path_factory.mktemp("tiny")))
