"""Processes of meshes are forked from one that has imported for all of them, and need it no more after that."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from monarch.actor import Actor, endpoint, this_host

from titan_rl.errors import ActorFailed
from titan_rl.hosts.facts import HostFacts
from titan_rl.rpc.connection import bounded
from titan_rl.supervision.fork_server import READ_AT_START, Stage
from titan_rl.supervision.placement import Kind, MeshPlan
from titan_rl.supervision.provisioner import Provisioner
from titan_rl.supervision.proxy import CORES

SECONDS = 60.0
ONCE, THREAD = "imported_once", "imported_with_a_thread"

pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of modules, for the fork server and what it forks."""
    here = Path(__file__).resolve().parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(here), str(here.parents[1])]))


class Forked(Actor):
    @endpoint
    async def facts(self, module: str) -> dict[str, Any]:
        """Who has imported this module, and what this process was made with."""
        return {
            "pid": os.getpid(),
            "imported in": importlib.import_module(module).PID,
            "variables": dict(os.environ),
            "cores": os.sched_getaffinity(0),
            "scheduling": os.sched_getscheduler(0),
            "directory": os.readlink("/proc/self/cwd"),
            "group": os.getpgid(0),
        }


def proxy_of(mesh: str) -> int:
    """The process that Monarch takes for this mesh's."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (entry / "cmdline").read_text().split("\0")
            if mesh in words and words[3].endswith("/proxy.py") and parent(int(entry.name)) == os.getpid():
                return int(entry.name)
    raise AssertionError(mesh)


class Meshes:
    """Meshes whose processes come from one fork server."""

    def __init__(self, directory: Path, stage: Callable[[HostFacts], Stage]) -> None:
        self.news: asyncio.Queue[ActorFailed] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self.provisioner = Provisioner(
            log_directory=str(directory),
            imports=(),
            stage=stage,
            on_fault=lambda fault: loop.call_soon_threadsafe(self.news.put_nowait, fault),
        )
        self.actors: dict[str, Any] = {}

    def spawn(self, name: str, kind: Kind, **variables: str) -> None:
        read_at_start = {key: value for key, value in os.environ.items() if key.startswith(READ_AT_START)}
        place = MeshPlan(
            kind=kind, name=name, hosts=("host0",), env=(read_at_start | variables,), devices=(None,), positions=("",)
        )
        (self.actors[name],) = self.provisioner.spawn(place).spawn(name, Forked)

    async def facts(self, name: str, module: str = ONCE) -> dict[str, Any]:
        facts: dict[str, Any] = await bounded(self.actors[name].facts.call_one(module), what=name, seconds=SECONDS)
        return facts

    async def born(self, name: str, kind: Kind, module: str = ONCE, **variables: str) -> dict[str, Any]:
        self.spawn(name, kind, **variables)
        return await self.facts(name, module)


@asynccontextmanager
async def meshes(directory: Path, *imports: str) -> AsyncIterator[Meshes]:
    """Generators have these imports, rollout workers have none."""
    above = Stage(name="more", kinds=(Kind.GENERATOR,), imports=imports)
    there = Meshes(directory, lambda host: Stage(name="light", kinds=(Kind.ROLLOUT,), above=(above,)))
    try:
        yield there
    finally:
        await there.provisioner.stop_all()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def test_processes_are_forked_from_one_that_has_imported_and_live_on_without_it(tmp_path: Path) -> None:
    async with meshes(tmp_path, ONCE) as there:
        lowest = min(os.sched_getaffinity(0))
        one = await there.born("one", Kind.GENERATOR, MARK="1", **{CORES: str(lowest)})
        two = await there.born("two", Kind.GENERATOR)
        plain = await there.born("plain", Kind.ROLLOUT)
        stage = one["imported in"]
        assert two["imported in"] == stage not in (one["pid"], two["pid"]) and plain["imported in"] == plain["pid"]
        assert one["variables"]["MARK"] == "1" and "MARK" not in two["variables"]
        for each in (one, two, plain):
            assert each["group"] == each["pid"] and each["directory"] == os.getcwd()
            assert each["cores"] == ({lowest} if each is one else os.sched_getaffinity(0))
            assert each["scheduling"] == os.sched_getscheduler(0)
        server = parent(stage)
        for killed, kind in ((stage, Kind.GENERATOR), (server, Kind.ROLLOUT), (0, Kind.GENERATOR)):
            if killed:
                os.kill(killed, signal.SIGKILL)
            again = await there.born(f"after {kind} {killed}".replace(" ", "-"), kind)
            assert again["imported in"] != stage
        assert await there.facts("one") == one
        assert there.news.empty(), "nobody else noticed"
        os.kill(proxy_of("one"), signal.SIGKILL)
        said = str(await asyncio.wait_for(there.news.get(), SECONDS))
        assert said.startswith(f"one rank 0 (pid {one['pid']})"), "whom Monarch takes for dead is dead"


async def test_processes_start_anew_where_a_fork_would_lose_something(tmp_path: Path) -> None:
    async with meshes(tmp_path, THREAD) as there:
        one = await there.born("one", Kind.GENERATOR, THREAD)
        assert one["imported in"] == one["pid"]
        assert "start Python anew, because there are 2 threads" in (tmp_path / "fork-server.log").read_text()
        other = await there.born("other", Kind.ROLLOUT, PYTHONHASHSEED="3")
        assert other["variables"]["PYTHONHASHSEED"] == "3"
        os.kill(proxy_of("other"), signal.SIGKILL)
        said = str(await asyncio.wait_for(there.news.get(), SECONDS))
        assert said == f"other rank 0 (pid {other['pid']}) was killed by signal 9 (SIGKILL)"


async def test_a_process_is_forked_in_a_directory_that_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = tmp_path / "removed"
    removed.mkdir()
    monkeypatch.chdir(removed)
    removed.rmdir()
    async with meshes(tmp_path) as there:
        assert (await there.born("one", Kind.ROLLOUT))["directory"] == f"{removed} (deleted)"


async def test_threads_that_openblas_has_started_do_not_hinder_a_fork() -> None:
    program = "import numpy; from titan_rl.supervision.fork_server import why_not_fork; print(why_not_fork())"
    run = [sys.executable, "-c", program]
    said = subprocess.run(run, env=os.environ | {"OMP_NUM_THREADS": "2"}, capture_output=True, text=True, check=True)
    assert said.stdout == "\n"


def size(pid: int) -> Counter[str]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    return Counter(threads=int(status["Threads"]), kib=int(status["VmRSS"].split()[0]), descriptors=descriptors)


async def kept_by_monarch(meshes: int) -> float:
    """KiB of this process that stay for each mesh that was spawned and stopped, without any code of ours."""
    before = size(os.getpid())["kib"]
    for _ in range(meshes):
        processes = this_host().spawn_procs(per_host={"process": 1}, name="bare")
        await processes.spawn("bare", Forked).facts.call_one(ONCE)
        await processes.stop()
    return (size(os.getpid())["kib"] - before) / meshes


@pytest.mark.acceptance
@pytest.mark.timeout(900)
async def test_a_fork_server_does_not_grow(tmp_path: Path) -> None:
    """Nor does the process that asks it for 200 replacements, beyond what Monarch keeps of every mesh (0.4 MB)."""
    async with meshes(tmp_path, ONCE) as there:
        stage = 0
        for replacement in range(211):
            one = await there.born("one", Kind.GENERATOR)
            await there.provisioner.stop("one", kill=replacement % 2 == 0)
            stage = stage or one["imported in"]
            assert one["imported in"] == stage
            if replacement == 10:
                before = size(stage), size(parent(stage)), size(os.getpid())
        after = size(stage), size(parent(stage)), size(os.getpid())
    for then, now in zip(before, after, strict=True):
        assert now["descriptors"] <= then["descriptors"] + 2 and now["threads"] <= then["threads"] + 2
    for then, now in zip(before[:2], after[:2], strict=True):
        assert now["kib"] < then["kib"] + 8_192
    assert (after[2]["kib"] - before[2]["kib"]) / 200 < 1.5 * await kept_by_monarch(50)
