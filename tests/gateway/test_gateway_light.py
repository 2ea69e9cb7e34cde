"""The gateway's process stays light, and its config refuses what would expose the policy (fresh interpreters: 3 s)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from titan_rl import cli
from titan_rl.errors import ConfigError
from titan_rl.gateway.config import GatewayConfig

ROOT = Path(__file__).resolve().parents[2]


def loaded_after(program: str) -> set[str]:
    script = f"{program}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return {name.split(".")[0] for name in json.loads(run.stdout.splitlines()[-1])}


def test_the_gateways_process_loads_no_engine():
    loaded = loaded_after("import titan_rl.actors.gateway, titan_rl.gateway.app")
    assert not loaded & {"torch", "vllm", "torchtitan", "transformers"}


def test_the_server_runs_without_actors_and_the_actors_client_without_a_server():
    assert "monarch" not in loaded_after("import titan_rl.gateway.app")
    assert not loaded_after("import titan_rl.actors.gateway") & {"fastapi", "uvicorn"}


def test_the_command_is_refused_before_anything_heavy_is_loaded():
    program = "from titan_rl.cli import main; assert main(['serve', '--host', '0.0.0.0', '--recipe', 'copy4']) == 2"
    assert not loaded_after(program) & {"torch", "vllm", "monarch", "fastapi"}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com", ""])
def test_an_address_that_others_reach_needs_a_key(host):
    with pytest.raises(ConfigError, match="--api-key"):
        GatewayConfig(host=host)
    assert GatewayConfig(host=host, api_key="secret").host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
def test_loopback_needs_none(host):
    assert GatewayConfig(host=host).api_key == ""


@pytest.mark.parametrize(
    ("setting", "named"),
    [({"port": 70000}, "--port"), ({"model": ""}, "--model-name"), ({"api_key": "ä"}, "--api-key")],
)
def test_a_setting_that_cannot_be_is_refused_by_its_option(setting, named):
    with pytest.raises(ConfigError, match=named):
        GatewayConfig(**setting)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--port", "0"], "name what to serve: --policy.path DIR"),
        (["--recipe", "copy4", "--port", "many"], "--port: expected an integer"),
        (["--recipe", "copy4", "--port"], "--port: expected one value"),
        (["--recipe", "copy4", "--host", "0.0.0.0"], "--api-key"),
        (["--policy.path", "/nowhere/at/all"], "there is no directory /nowhere/at/all"),
        (["--policy.path", "/nowhere", "--generator.cuont", "2"], "generator.cuont"),
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
