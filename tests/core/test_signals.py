"""Signals are heard while the event loop sleeps, and never kill the process before its last instruction."""

import os
import signal
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, atexit, signal, sys
from titan_rl.errors import Stopped
from titan_rl.supervision.process import hold_signals, report_stop_signals
from titan_rl.processes import run_and_exit

async def run():
    heard = asyncio.Queue()
    loop = asyncio.get_running_loop()
    report_stop_signals(lambda stop: loop.is_closed() or loop.call_soon_threadsafe(heard.put_nowait, stop))
    print("armed", flush=True)
    for _ in range(2):
        stop = await heard.get()
        print(stop, flush=True)
    return stop.exit_code

def main():
    hold_signals()
    for early in sys.argv[1:]:
        signal.raise_signal(int(early))
    code = asyncio.run(run())
    print("loop closed", flush=True)
    sys.stdin.readline()
    return code

atexit.register(lambda: print("atexit work done", flush=True))
run_and_exit(main)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_signal_is_heard_and_late_ones_kill_nothing(number):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == "armed\n"
    for _ in range(2):
        os.killpg(process.pid, number)
        assert number.name in process.stdout.readline()
    assert process.stdout.readline() == "loop closed\n"
    for late in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.killpg(process.pid, late)
    rest, _ = process.communicate("\n")
    assert rest == "atexit work done\n"
    assert process.returncode == 128 + number


def test_a_signal_before_there_is_an_event_loop_waits_for_it():
    early = [str(int(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    process = subprocess.run([sys.executable, "-c", PROGRAM, *early], text=True, capture_output=True, input="\n")
    armed, *heard, closed, _ = process.stdout.splitlines()
    assert (armed, closed) == ("armed", "loop closed") and len(heard) == 2
    assert process.stderr == "" and process.returncode in (128 + signal.SIGINT, 128 + signal.SIGTERM)


def test_a_run_under_nohup_does_not_hear_the_hang_up():
    program = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + PROGRAM
    process = subprocess.Popen(
        [sys.executable, "-c", program], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "armed\n"
    for number in (signal.SIGHUP, signal.SIGTERM):
        process.send_signal(number)
    assert process.stdout.readline() == "SIGTERM\n"
    process.kill()
    process.communicate()


def test_what_nobody_reads_any_more_is_dropped():
    program = """
import os, sys
from rich.console import Console
from titan_rl.supervision.process import lasting_output

with lasting_output():
    print("begun", flush=True)
    sys.stdin.readline()
    for stream in (sys.stdout, sys.stderr):
        Console(stderr=stream is sys.stderr).print("nobody hears it")
        print("nobody hears it", file=stream, flush=True)
    os._exit(5)
"""
    controller, terminal = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=terminal, stderr=terminal, start_new_session=True
    )
    os.close(terminal)
    assert os.read(controller, 100).startswith(b"begun")
    os.close(controller)
    process.communicate(b"\n")
    assert process.returncode == 5


@pytest.mark.parametrize(
    ("main", "code"),
    [("lambda: 2", 2), ("lambda: sys.exit(3)", 3), ("lambda: 1 / 0", 1), ("lambda: signal.raise_signal(2)", 130)],
)
def test_a_command_leaves_with_its_exit_code(main, code):
    program = f"import signal, sys; from titan_rl.processes import run_and_exit; run_and_exit({main})"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == code
