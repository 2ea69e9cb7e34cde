"""The gateway's config refuses what would expose the policy, and the command says so in one sentence."""

from __future__ import annotations

import pytest

from titan_rl import cli
from titan_rl.errors import ConfigError
from titan_rl.gateway.config import GatewayConfig


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com", ""])
def test_an_address_that_others_reach_needs_a_key(host):
    with pytest.raises(ConfigError, match="--api-key"):
        GatewayConfig(host=host)
    assert GatewayConfig(host=host, api_key="secret").host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
def test_loopback_needs_none(host):
    assert GatewayConfig(host=host).api_key == ""


@pytest.mark.parametrize(("setting", "named"), [({"model": ""}, "--model-name"), ({"api_key": "ä"}, "--api-key")])
def test_a_setting_that_cannot_be_is_refused_by_its_option(setting, named):
    with pytest.raises(ConfigError, match=named):
        GatewayConfig(**setting)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--port", "0"], "name what to serve: --policy.path DIR"),
        (["--recipe", "copy4", "--host", "0.0.0.0"], "--api-key"),
        (["--policy.path", "/nowhere/at/all"], "there is no directory /nowhere/at/all"),
    ],
)
def test_a_wrong_command_is_told_in_one_sentence(arguments, told, capsys, monkeypatch):
    monkeypatch.delenv("TITAN_RL_API_KEY", raising=False)
    assert cli.main(["serve", *arguments]) == 2
    printed = capsys.readouterr()
    assert told in printed.err
    assert printed.err.count("\n") == 1 and not printed.out


def test_help_names_every_option(capsys):
    assert cli.main(["serve", "--help"]) == 0
    printed = capsys.readouterr().out
    assert all(option in printed for option in ("--policy.path", "--host", "--port", "--api-key", "--model-name"))
