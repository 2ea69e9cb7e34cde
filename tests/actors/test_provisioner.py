"""What a provisioner hears of its processes, and who is told: real processes, Monarch's and the kernel's own words.

A process that dies right after answering a question that nobody asks any more takes nobody with it. The first test of
that pins what Monarch does by itself; when it fails, the setting is not needed any more. It takes that answers are on
their way when their sender dies, which an attempt may miss on a busy machine: then the next one.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import os
import queue
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from monarch.actor import Actor, default_bootstrap_cmd, endpoint

from titan_rl.errors import ActorFailed, HostLost, MeshFailed
from titan_rl.rpc.connection import bounded
from titan_rl.supervision import provisioner
from titan_rl.supervision.fork_server import MONARCH_MAIN
from titan_rl.supervision.placement import Kind, MeshPlan
from titan_rl.supervision.process import SUPERVISION_ENVIRONMENT
from titan_rl.supervision.provisioner import Provisioner

SECONDS = 60.0


class Named(Actor):
    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def leave(self, code: int) -> None:
        os._exit(code)

    @endpoint
    async def fail(self) -> None:
        raise RuntimeError("on purpose")


class Heard:
    """A provisioner with one mesh, and the faults that it passed on."""

    def __init__(self, directory: Path, name: str, ranks: int = 1, **variables: str) -> None:
        self.faults: list[ActorFailed] = []
        self.news: asyncio.Queue[ActorFailed] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def on_fault(fault: ActorFailed) -> None:
            self.faults.append(fault)
            loop.call_soon_threadsafe(self.news.put_nowait, fault)

        self.provisioner = Provisioner(log_directory=str(directory), imports=(), on_fault=on_fault)
        here = Path(__file__).resolve().parent
        paths = os.pathsep.join([str(here), str(here.parents[1])])
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **variables}
        self.place = MeshPlan(
            kind=Kind.ROLLOUT,
            name=name,
            hosts=("host0",) * ranks,
            env=(environment,) * ranks,
            devices=(None,) * ranks,
            positions=("",) * ranks,
        )
        self.mesh = self.provisioner.spawn(self.place)
        self.ranks = self.mesh.spawn(name, Named)

    async def pids(self) -> list[int]:
        return [await bounded(rank.pid.call_one(), what="pid", seconds=SECONDS) for rank in self.ranks]

    async def next(self) -> str:
        return str(await asyncio.wait_for(self.news.get(), SECONDS))


@pytest.mark.asyncio
async def test_every_end_is_told_once_with_its_rank_and_its_cause(tmp_path: Path) -> None:
    ranks = 4
    heard, other = Heard(tmp_path, "one", ranks), Heard(tmp_path, "two")
    try:
        pids, _ = await asyncio.gather(heard.pids(), other.pids())
        for number in (signal.SIGKILL, signal.SIGSEGV):
            rank = ranks - 1 - (number == signal.SIGSEGV)
            os.kill(pids[rank], number)
            how = f"was killed by signal {int(number)} ({number.name})"
            assert await heard.next() == f"one rank {rank} (pid {pids[rank]}) {how}"
        for rank, code in ((0, 70), (1, 0)):
            left = asyncio.ensure_future(leave(heard, rank, code))
            assert await heard.next() == f"one rank {rank} (pid {pids[rank]}) exited with code {code}"
            left.cancel()
        assert [fault.mesh for fault in heard.faults if isinstance(fault, MeshFailed)] == ["one"] * ranks
    finally:
        await asyncio.gather(heard.provisioner.stop_all(), other.provisioner.stop_all())
    assert len(heard.faults) == ranks and not other.faults, "what Monarch says of the same ends is no news"


@pytest.mark.asyncio
async def test_a_mesh_may_be_spawned_again_by_whoever_hears_of_its_fault_from_monarch(tmp_path: Path) -> None:
    """In the context of the event loop: none can be spawned in that of Monarch's thread."""
    from support.meshes import mesh_plan  # here, because the processes import this file

    lost, loop, context = asyncio.Event(), asyncio.get_running_loop(), contextvars.copy_context()
    place = mesh_plan("failing", beside=__file__)
    hosts = Provisioner(
        log_directory=str(tmp_path),
        imports=(),
        on_fault=lambda fault: loop.call_soon_threadsafe(lost.set, context=context),
    )

    async def spawn() -> Any:
        (named,) = hosts.spawn(place).spawn("failing", Named)
        assert await bounded(named.pid.call_one(), what="pid", seconds=SECONDS)
        return named

    try:
        (await spawn()).fail.broadcast()  # an exception that nobody waits for ends the actor, and not its process
        await asyncio.wait_for(lost.wait(), SECONDS)
        await hosts.stop("failing", kill=True)
        await spawn()
    finally:
        await hosts.stop_all()


async def leave(heard: Heard, rank: int, code: int) -> None:
    await heard.ranks[rank].leave.call_one(code)


def test_a_process_runs_what_monarch_would_run() -> None:
    assert MONARCH_MAIN in repr(default_bootstrap_cmd())


@pytest.mark.asyncio
async def test_the_end_of_a_process_that_was_stopped_is_told(tmp_path: Path) -> None:
    """Monarch's question to a process that dies stopped is never answered."""
    heard = Heard(tmp_path, "one")
    try:
        [pid] = await heard.pids()
        os.kill(pid, signal.SIGSTOP)
        os.kill(pid, signal.SIGKILL)
        assert "was killed by signal 9 (SIGKILL)" in await heard.next()
    finally:
        await heard.provisioner.stop_all()


@pytest.mark.asyncio
async def test_after_a_stop_no_process_lives_and_none_is_missed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heard = Heard(tmp_path, "one", ranks=2)
    pids = await heard.pids()
    os.kill(pids[1], signal.SIGSTOP)  # it does not hear that it is to end before it goes on
    descriptors = [os.pidfd_open(pid) for pid in pids]
    await heard.provisioner.stop_all()
    loop = asyncio.get_running_loop()
    for descriptor in descriptors:
        ended = loop.create_future()
        loop.add_reader(descriptor, ended.set_result, None)
        await asyncio.wait_for(ended, SECONDS)
        loop.remove_reader(descriptor)
        os.close(descriptor)
    assert not heard.faults
    assert "stop of mesh" not in caplog.text, "none had to be killed"


@pytest.mark.asyncio
async def test_the_stop_of_a_mesh_whose_processes_never_came_up_raises_nothing(tmp_path: Path) -> None:
    heard = Heard(tmp_path, "one", PYTHONHOME="/nowhere")
    await heard.provisioner.stop_all()


@pytest.mark.asyncio
async def test_the_late_fault_of_a_stopped_mesh_is_no_news_to_anyone(tmp_path: Path) -> None:
    stopped, running = Heard(tmp_path, "same"), Heard(tmp_path, "same")
    try:
        await asyncio.gather(stopped.pids(), running.pids())
        [name] = stopped.mesh.actors
        await stopped.provisioner.stop_all()
        for provisioner in (stopped.provisioner, running.provisioner):
            provisioner.hear(name, "timeout waiting for message from proc mesh agent")
        assert not stopped.faults and not running.faults, "though the running one has a mesh of that name"

        [name] = running.mesh.actors
        running.provisioner.hear(name, "killed")
        assert await running.next() == "mesh same failed: killed"
        running.provisioner.hear("another", "killed")
        assert len(running.faults) == 1, "what nobody spawned here is Monarch's own"
    finally:
        await running.provisioner.stop_all()


PROGRAM = """
import asyncio, gc, os
import monarch.actor
from monarch.actor import Actor, Channel, concurrent_endpoint, this_host

class Dying(Actor):
    @concurrent_endpoint
    async def ready(self):
        return True

    @concurrent_endpoint
    async def answer_and_die(self, port):
        for number in range(50):
            port.send(number)
        asyncio.get_running_loop().call_later(0.02, os._exit, 3)
        await asyncio.sleep(0.01)

async def call(actor, port):
    await actor.answer_and_die.call_one(port)

async def main():
    monarch.actor.unhandled_fault_hook = lambda failure: None
    actor = this_host().spawn_procs(per_host={"ranks": 1}).spawn("dying", Dying).slice(ranks=0)
    await actor.ready.call_one()
    port, receiver = Channel.open()
    asking = asyncio.ensure_future(call(actor, port))
    del receiver
    await asyncio.sleep(0.001)
    asking.cancel()
    gc.collect()
    await asyncio.sleep(float(os.environ["WATCHED_SECONDS"]))
    print("alive", flush=True)

asyncio.run(main())
"""
ATTEMPTS = 10


QUIET = """
from titan_rl.supervision.process import prepare_controller
prepare_controller()
from monarch.actor import this_host
this_host().spawn_procs(per_host={"ranks": 1}).initialized.get()
"""


def test_monarch_s_own_log_which_all_runs_share_has_errors_only() -> None:
    environment = os.environ | {"MONARCH_LOG_SUFFIX": f"_{os.getpid()}", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("MONARCH_FILE_LOG", None)
    done = subprocess.run([sys.executable, "-c", QUIET], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    shared = Path(done.stderr.partition("are being written to ")[2].partition(";")[0])
    log = shared.with_stem(f"{shared.stem}__{os.getpid()}")
    assert "[-]I" not in log.read_text()
    log.unlink()


def outcome(*, watched_seconds: float, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "WATCHED_SECONDS": str(watched_seconds), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout.strip()


def test_monarch_by_itself_ends_the_process_without_a_word() -> None:
    attempts = (outcome(watched_seconds=15, HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT="1s") for _ in range(ATTEMPTS))
    assert (1, "") in attempts


def test_our_processes_live_on() -> None:
    assert outcome(watched_seconds=4, **SUPERVISION_ENVIRONMENT) == (0, "alive")


async def test_a_host_that_is_lost_while_others_are_attached_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    left = []

    class Attached:
        def __init__(self, name: str, worker: str, **callbacks: Any) -> None:
            self.name, self.lost, self._on_lost = name, "", callbacks["on_lost"]

        async def attach(self) -> None:
            await asyncio.sleep(0)
            if self.name == "host1":
                self.lost = "host1 is lost"
                self._on_lost(self)

        async def detach(self) -> None:
            left.append(self.name)

    monkeypatch.setattr(provisioner, "AttachedHost", Attached)
    hosts = Provisioner(log_directory=str(tmp_path), imports=(), on_fault=lambda fault: None)
    with pytest.raises(HostLost, match="host1 is lost"):
        await hosts.attach({"host1": "10.0.0.2:1", "host2": "10.0.0.3:1"}, silent_seconds=1.0)
    assert list(hosts.hosts) == ["host0"] and left == ["host1", "host2"]
    there = MeshPlan(kind=Kind.ROLLOUT, name="rollout0", hosts=("host1",), env=({},), devices=(None,), positions=("-",))
    with pytest.raises(HostLost, match="rollout0 was placed on host1, which is lost"):
        hosts.spawn(there)
    await hosts.stop_all()


async def test_a_host_has_a_mesh_until_its_processes_are_stopped(tmp_path: Path) -> None:
    """Otherwise a host that leaves would be detached while its meshes are still being stopped."""
    hosts = Provisioner(log_directory=str(tmp_path), imports=(), on_fault=lambda fault: None)
    stopped = asyncio.Event()

    async def stop(*, kill: bool = False) -> None:
        await stopped.wait()

    here = hosts.hosts["host0"]
    hosts._meshes["rollout0"] = SimpleNamespace(name="rollout0", hosts=[here], stop=stop)  # type: ignore[assignment]
    stopping = asyncio.create_task(hosts.stop("rollout0", kill=True))
    await asyncio.sleep(0)
    assert [mesh.name for mesh in hosts.on(here)] == ["rollout0"]
    stopped.set()
    await stopping
    assert hosts.on(here) == []
    await hosts.stop_all()


async def test_the_end_of_an_agent_is_no_fault_of_a_mesh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Monarch tells it when a link is mended, long after the host was lost."""
    faults: queue.Queue[ActorFailed] = queue.Queue()
    hosts = Provisioner(log_directory=str(tmp_path), imports=(), on_fault=faults.put)
    mesh = SimpleNamespace(name="rollout0", actors=["rollout0_1"], any_ended=False)
    monkeypatch.setattr(hosts, "_meshes", {"rollout0": mesh})
    for name in ("agent_7", "rollout0_1"):
        provisioner._hear(SimpleNamespace(mesh_name=f"{name}-d4HS", report=lambda: "the process ended"))
    assert (await asyncio.to_thread(faults.get, timeout=SECONDS)).mesh == "rollout0" and faults.empty()
    monkeypatch.undo()
    await hosts.stop_all()


STOPS_AT_BIRTH = """
import os, signal, sys
from pathlib import Path
born = Path(__file__).with_name("born")
if "--proxy" in sys.orig_argv and not born.exists():
    born.write_text(str(os.getpid()))
    {}
"""


def stops_at_birth(directory: Path, does: str = "os.kill(os.getpid(), signal.SIGSTOP)") -> str:
    """A directory for PYTHONPATH: the first process of a mesh with it does this before anything else."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(STOPS_AT_BIRTH.format(does))
    return os.pathsep.join([str(directory), str(Path(__file__).resolve().parent), str(Path(__file__).parents[2])])


async def test_a_process_that_is_stopped_at_birth_delays_no_other_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provisioner, "STOP_SECONDS", 1.0)  # Monarch does not stop what is not born
    slow = Heard(tmp_path, "slow", PYTHONPATH=stops_at_birth(tmp_path / "stops"))
    up, other = slow.provisioner, dataclasses.replace(slow.place, name="other", env=({"OMP_NUM_THREADS": "1"},))
    starting = asyncio.ensure_future(up.started("slow"))
    try:
        for _ in range(2):
            up.spawn(other)
            assert await asyncio.wait_for(up.started("other"), 20) == ""
            await up.stop("other", kill=True)
        assert not starting.done()
    finally:
        await up.stop_all()
        await starting


@pytest.mark.acceptance
async def test_monarch_gives_a_process_up_that_is_born_late_and_it_starts_again(tmp_path: Path) -> None:
    """If this fails because Monarch hears of late births, the processes need not be started again (`TOO_LATE`)."""
    slow = Heard(tmp_path, "slow", PYTHONPATH=stops_at_birth(tmp_path / "stops", "import time; time.sleep(35)"))
    try:
        assert provisioner.TOO_LATE in await slow.provisioner.started("slow")
        await slow.provisioner.stop("slow", kill=True)
        slow.provisioner.spawn(slow.place)
        assert await slow.provisioner.started("slow") == ""
    finally:
        await slow.provisioner.stop_all()
