"""Ends of processes that another thread reaps at once, as Monarch does: each is told, with its exit status."""

import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from titan_rl.launch.child import ProcessWatch

KERNEL = tuple(map(int, os.uname().release.split(".")[:2]))
SECONDS = 30.0
ENDS = [0, 1, 70, 255, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGSEGV] * 10


@pytest.mark.skipif(KERNEL < (6, 15), reason="before Linux 6.15 the exit status of a reaped process is lost")
def test_every_exit_status_is_told(tmp_path: Path) -> None:
    told: queue.Queue[tuple[str, int | None] | str] = queue.Queue()
    watch = ProcessWatch(tmp_path, on_end=lambda spawn, *end: told.put(end), on_stop=told.put)
    for rank, code in enumerate(ENDS):
        end = f"exit {code}" if code >= 0 else f"kill {code} $$"
        process = subprocess.Popen(["sh", "-c", f"echo mesh-1 mesh {rank} $$ > {watch.births}; kill -STOP $$; {end}"])
        name = f"mesh rank {rank} (pid {process.pid})"
        assert told.get(timeout=SECONDS) == f"{name} was stopped by SIGSTOP; waiting until it goes on"
        threading.Thread(target=process.wait).start()
        process.send_signal(signal.SIGCONT)
        news = told.get(timeout=SECONDS)
        if news == f"{name} goes on":  # not where the end came so soon that nobody saw it go on
            news = told.get(timeout=SECONDS)
        assert news == (name, code)
    assert watch.any_ended("mesh-1")
    watch.end("mesh-1")
    late = subprocess.Popen(["sh", "-c", f"echo mesh-1 mesh 0 $$ > {watch.births}; sleep 1000"])
    assert late.wait(SECONDS) == -signal.SIGKILL, "its mesh was stopped while it started"
    watch.close()


def test_a_process_dies_with_its_watch_and_one_that_comes_later_does_not_start(tmp_path: Path) -> None:
    watch = ProcessWatch(tmp_path, on_end=lambda *end: None, on_stop=lambda what: None)
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
    assert late.returncode == 1 and "the owner died" in late.stderr
