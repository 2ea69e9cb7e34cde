"""Clients and agent frameworks that others wrote, unmodified, against `titan-rl serve` (15 s).

`requirements.toml` says which, at which versions. The acceptance test gives each an environment of its own, kept below
`$TITAN_RL_CLIENT_ENVIRONMENTS` if that is set. CI plays those that are locked. The policy has learned nothing: what is
forced must be right to the last byte, and what the policy may choose must be answered.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

FLOWS = Path(__file__).with_name("flows")
CLIENTS: dict[str, list[str]] = tomllib.loads(Path(__file__).with_name("requirements.toml").read_text())
SECONDS = 300
"""A client that takes longer hangs."""


def play(client: str, python: str | Path, environment: dict[str, str]) -> dict[str, str]:
    """Flow → `ok`, or what went wrong."""
    script = [python, str(FLOWS / f"use_{client}.py")]
    ended = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=SECONDS)
    told = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"flow"')]
    assert ended.returncode == 0 and told, ended.stdout + ended.stderr
    return {each["flow"]: each["result"] for each in told}


def failures(results: dict[str, str]) -> list[str]:
    return [f"{flow}: {result}" for flow, result in results.items() if result != "ok"]


@pytest.mark.parametrize("client", ["openai", "anthropic"])
def test_a_locked_client_works(client: str, gateway: dict[str, str]) -> None:
    pytest.importorskip(client)
    assert not failures(play(client, sys.executable, gateway))


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(os.environ.get("TITAN_RL_CLIENT_ENVIRONMENTS") or tmp_path_factory.mktemp("environments"))


def installed(client: str, directory: Path) -> Path:
    """The interpreter of the client's environment."""
    packages = CLIENTS[client]
    place = directory / f"{client}-{hashlib.blake2b(' '.join(packages).encode(), digest_size=4).hexdigest()}"
    python, done = place / "bin" / "python", place / "installed"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
        pip = subprocess.run([python, "-m", "pip", "install", "-q", *packages], capture_output=True, text=True)
        if "No matching distribution found" in pip.stderr:
            pytest.skip(f"the index lacks {' '.join(packages)}")
        assert pip.returncode == 0, pip.stderr
        done.touch()
    return python


@pytest.mark.acceptance
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_works(
    client: str, gateway: dict[str, str], environments: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = play(client, installed(client, environments), gateway)
    with capsys.disabled():
        print(f"\n\n| {' '.join(CLIENTS[client])} | |\n|---|---|")
        for flow, result in results.items():
            print(f"| {flow} | {' '.join(result.split())} |")
    assert not failures(results)
