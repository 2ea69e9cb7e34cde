"""Ranks that meet without torchrun, as those of a job do: rank 0 has the store (15 s, most of it imports of torch)."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from titan_rl.errors import ConfigError
from titan_rl.launch.hosts import torchrun
from titan_rl.launch.hosts.worker import free_port

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def rank_0(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[dict[str, str], list[Callable[[], None]]]]:
    """The environment of rank 0 of three, and what it does at its end."""
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    names = {torchrun.NODES: "n1 n2 n3"}
    yield (
        {
            "RANK": "0",
            "WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port("127.0.0.1")),
            **names,
        },
        at_exit,
    )


def rank(environ: dict[str, str], number: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "titan_rl.train", "--recipe", "cpu_smoke"],
        cwd=REPOSITORY,
        env={**os.environ, **environ, "RANK": str(number)},
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_nodes_that_do_not_come_are_named(rank_0, monkeypatch: pytest.MonkeyPatch) -> None:
    environ, _ = rank_0
    monkeypatch.setattr(torchrun, "JOB_SECONDS", 0.1)
    with pytest.raises(ConfigError, match=r"^rank 1 \(n2\), rank 2 \(n3\) of 3 did not come within 0.1 s"):
        torchrun.workers(environ, 3, trusted=True)


def test_a_host_whose_name_is_not_known_is_named_with_the_remedy(rank_0) -> None:
    environ, _ = rank_0
    with pytest.raises(ConfigError, match=r"the host h1.invalid, and this host does not know .*`--local-addr A"):
        torchrun.workers({**environ, "MASTER_ADDR": "h1.invalid"}, 3, trusted=True)


@pytest.mark.parametrize(("says_so", "code"), [(True, 0), (False, 1)])
def test_a_worker_ends_when_rank_0_says_so_and_fails_when_it_is_gone(rank_0, says_so: bool, code: int) -> None:
    environ, at_exit = rank_0
    worker = rank({**environ, "WORLD_SIZE": "2"}, 1)
    (address,) = torchrun.workers({**environ, "WORLD_SIZE": "2"}, 2, trusted=True)
    assert address.startswith("127.0.0.1:")
    if says_so:
        at_exit[0]()
    at_exit.clear()  # and with it the store
    output = worker.communicate(timeout=60)[1]
    assert worker.returncode == code, output
    assert ("rank 1 ends: rank 0 is gone" in output) is not says_so
