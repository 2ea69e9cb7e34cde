"""What tests of the gateway share."""

import pytest
from support.gateway import SYMBOLS, TOOL_SYMBOLS

from titan_rl.chat.renderer import SymbolRenderer
from titan_rl.policy.config import TinyPolicyConfig
from titan_rl.policy.models.tiny import make_tiny_policy


@pytest.fixture(scope="package")
def renderer(tmp_path_factory):
    policy = TinyPolicyConfig(symbols=SYMBOLS, special_tokens=TOOL_SYMBOLS)
    return SymbolRenderer(make_tiny_policy(policy, tmp_path_factory.mktemp("tiny")))
