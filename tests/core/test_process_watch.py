"""Ends of processes: each is told, with its exit status."""

import errno
import os
import queue
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from titan_rl.supervision import process_watch
from titan_rl.supervision.fork_server import Stage
from titan_rl.supervision.process_watch import ProcessWatch

SECONDS = 30.0
ENDS = [0, 1, 70, 255, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGSEGV] * 10


def test_every_exit_status_is_told(tmp_path: Path) -> None:
    told: queue.Queue[object] = queue.Queue()
    watch = ProcessWatch(tmp_path, Stage(name="none"), on_end=lambda spawn, *end: told.put(end), on_broken=told.put)
    gone = subprocess.Popen(["true"])
    gone.wait()
    for rank, code in enumerate(ENDS):
        end = f"exit {code}" if code >= 0 else f"kill {code} $$"
        process = subprocess.Popen(["sh", "-c", f"read go; {end}"], stdin=subprocess.PIPE)
        watch.births.write_text(f"mesh-1 mesh {rank} {process.pid}\nmesh-1 gone 0 {gone.pid}\n")
        assert told.get(timeout=SECONDS) == (f"gone rank 0 (pid {gone.pid})", None)  # so the first line was read
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()
        assert told.get(timeout=SECONDS) == (f"mesh rank {rank} (pid {process.pid})", code)
        process.wait()  # not before: whoever starts processes lets the watch read how they have ended
    watch.end("mesh-1")
    late = subprocess.Popen(["sh", "-c", f"echo mesh-1 mesh 0 $$ > {watch.births}; sleep 1000"])
    assert late.wait(SECONDS) == -signal.SIGKILL, "its mesh was stopped while it started"
    watch.close()


def test_a_process_dies_with_its_watch_and_one_that_comes_later_does_not_start(tmp_path: Path) -> None:
    watch = ProcessWatch(tmp_path, Stage(name="none"), on_end=lambda *end: None, on_broken=lambda what: None)
    starts = "import sys, time; from titan_rl.processes import die_with_owner"
    command = [
        sys.executable,
        "-c",
        f"{starts}; die_with_owner(sys.argv[1]); print(); time.sleep(1000)",
        str(Path(tmp_path, "life")),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"\n"
    watch.close()
    assert process.wait(SECONDS) == -signal.SIGKILL
    late = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    # The kernel may kill it, too, while it ends.
    assert late.returncode in (1, -signal.SIGKILL) and "died while" in late.stderr and not late.stdout


@pytest.mark.parametrize("unread", [b"", b"12"], ids=["nothing unread", "unread"])
def test_a_process_ends_whose_proxy_died_before(unread: bytes) -> None:
    proxy, connection = socket.socketpair()
    with connection:
        connection.sendall(unread)
        proxy.close()
        program = "import sys; from titan_rl.processes import die_with_peer; die_with_peer(int(sys.argv[1])); print(1)"
        command = [sys.executable, "-c", program, str(connection.fileno())]
        process = subprocess.run(command, pass_fds=[connection.fileno()], capture_output=True, text=True)
    assert process.returncode == 1 and not process.stdout and "died while it started" in process.stderr


def test_ends_are_heard_after_a_torn_line_and_where_no_descriptor_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: queue.Queue[object] = queue.Queue()
    watch = ProcessWatch(tmp_path, Stage(name="none"), on_end=lambda *end: told.put(end), on_broken=told.put)
    first, second = (subprocess.Popen(["sleep", "1000"]) for _ in range(2))
    real = os.pidfd_open

    def none_is_left(pid: int) -> int:
        if pid == first.pid:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(pid)

    monkeypatch.setattr(os, "pidfd_open", none_is_left)
    watch.births.write_text(f"mesh-1 me\nmesh-1 mesh 0 0\nmesh-1 mesh 0 {first.pid}\n")
    assert told.get(timeout=SECONDS) == ("mesh-1", f"mesh rank 0 (pid {first.pid})", -signal.SIGKILL)
    assert first.wait(SECONDS) == -signal.SIGKILL, "it runs no further, because its end would not be heard"
    watch.births.write_text(f"mesh-1 mesh 1 {second.pid}\n")
    second.kill()
    assert told.get(timeout=SECONDS) == ("mesh-1", f"mesh rank 1 (pid {second.pid})", -signal.SIGKILL)
    watch.close()


def test_the_death_of_a_thread_of_the_watch_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: queue.Queue[str] = queue.Queue()
    watch = ProcessWatch(tmp_path, Stage(name="none"), on_end=lambda *end: None, on_broken=told.put)
    monkeypatch.setattr(process_watch, "answering", None)
    watch.births.write_text(f"mesh-1 mesh 0 {os.getpid()}\n")
    assert told.get(timeout=SECONDS).startswith("thread births ended: AttributeError")
    watch.close()


def test_a_fork_server_that_cannot_live_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(process_watch.sys, "executable", "/bin/false")
    log = tmp_path / "of a run" / "logs" / "fork-server.log"
    watch = ProcessWatch(tmp_path, Stage(name="none"), str(log), on_end=lambda *end: None, on_broken=told.put)
    assert "the fork server exited with code 1 3 times in a row" in told.get(timeout=SECONDS)
    watch.close()
