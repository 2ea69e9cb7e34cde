"""Whether RDMA is used between hosts is settled before anything depends on it. Two hosts on this machine, which has no
RDMA: Monarch reads by TCP, or the test makes its reads fail (30 s)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.test_locked_worker import lend, program, until
from titan_rl.config import RunConfig
from titan_rl.config_registry import copy4
from titan_rl.hosts.facts import HostFacts
from titan_rl.supervision.placement import plan
from titan_rl.supervision.process import TCP_ONLY


@pytest.fixture(scope="module")
def worker() -> Iterator[str]:
    lent, address = lend()
    yield address
    lent.terminate()
    lent.wait()


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        ("", "[False, False]"),
        (
            "fails",
            "[False, True] RDMA from host1 ({worker}) does not work (IBV_WC_REM_ACCESS_ERR): its weights go by TCP",
        ),
    ],
)
def test_a_host_from_which_no_rdma_read_succeeds_uses_tcp(worker: str, fails: str, said: str) -> None:
    controller = program(str(Path(__file__).with_name("trying_rdma.py")), worker, *filter(None, [fails]))
    assert until(controller, "said")[-1].removeprefix("said ").strip() == said.format(worker=worker)
    assert controller.wait(60) == 0


@pytest.mark.parametrize("setting", ["auto", "off"])
def test_rdma_can_be_turned_off_everywhere(setting: str) -> None:
    config: RunConfig = copy4()
    config.placement.rdma = setting  # type: ignore[assignment]
    meshes = plan(config, HostFacts(cpus=2), HostFacts(name="host1", cpus=2)).meshes
    assert {TCP_ONLY.items() <= env.items() for mesh in meshes.values() for env in mesh.env} == {setting == "off"}
