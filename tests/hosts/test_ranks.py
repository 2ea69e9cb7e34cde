"""Ranks that meet without torchrun, as those of a job do: rank 0 has the store (15 s, most of it imports of torch)."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from titan_rl.errors import ConfigError
from titan_rl.hosts import worker
from titan_rl.hosts.worker import free_port

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def rank_0(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[dict[str, str], list[Callable[[], None]]]]:
    """The environment of rank 0 of three, and what it does at its end."""
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    names = {worker.NODES: "n1 n2 n3"}
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
    monkeypatch.setattr(worker, "MEET_SECONDS", 0.1)
    with pytest.raises(ConfigError, match=r"^rank 1 \(n2\), rank 2 \(n3\) of 3 did not come within 0.1 s"):
        worker.workers(environ, 3, trusted=True)


def test_a_host_whose_name_is_not_known_is_named_with_the_remedy(rank_0) -> None:
    environ, _ = rank_0
    with pytest.raises(ConfigError, match=r"the host h1.invalid, and this host does not know .*`--local-addr A"):
        worker.workers({**environ, "MASTER_ADDR": "h1.invalid"}, 3, trusted=True)


@pytest.mark.parametrize(("says_so", "code"), [(True, 0), (False, 1)])
def test_a_worker_ends_when_rank_0_says_so_and_fails_when_it_is_gone(rank_0, says_so: bool, code: int) -> None:
    environ, at_exit = rank_0
    other = rank({**environ, "WORLD_SIZE": "2"}, 1)
    (address,) = worker.workers({**environ, "WORLD_SIZE": "2"}, 2, trusted=True)
    assert address.startswith("127.0.0.1:")
    if says_so:
        at_exit[0]()
    at_exit.clear()  # and with it the store
    output = other.communicate(timeout=60)[1]
    assert other.returncode == code, output
    assert ("rank 1 ends: rank 0 is gone" in output) is not says_so


def test_a_torchrun_whose_other_host_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import PrefixStore, TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "RANK": "0"}
    environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    monkeypatch.setattr(worker, "MEET_SECONDS", 0.5)
    with pytest.raises(ConfigError, match="rank 1 of 2 did not come"):
        worker.workers(environ, 2, trusted=True)
    assert PrefixStore("titan_rl/0", store).get(worker.TRUSTED) == b"1"
    with socket.create_server(("127.0.0.1", 0)) as server:
        environ["MASTER_PORT"] = str(server.getsockname()[1])
    with pytest.raises(ConfigError, match="rendezvous of the ranks at 127.0.0.1:"):
        worker.workers(environ, 2, trusted=True)


def test_all_ranks_of_torchrun_go_by_what_rank_0_says_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environ = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "1", "RANK": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    monkeypatch.setattr(worker, "_store", lambda environ: store)
    monkeypatch.setattr(worker, "address_towards", lambda peer: "10.77.0.2")
    monkeypatch.setattr(worker, "free_port", lambda address: 17000)
    with pytest.raises(ConfigError, match=r"cannot use 10\.77\.0\.1 without --trusted-network"):
        worker.workers(environ, 2, trusted=False)
    with pytest.raises(ConfigError, match=r"cannot use 10\.77\.0\.2 without --trusted-network"):
        worker.serve_rank(environ)
