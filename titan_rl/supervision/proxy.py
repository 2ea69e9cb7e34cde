"""What Monarch starts, watches and kills in the place of a process of a mesh, which the fork server forks.

    python -I -S proxy.py SOCKET DIRECTORY SPAWN MESH RANK [LOG]

It passes on its standard streams, variables, directory, cores and scheduling class, and ends as the process does. The
process dies with it. It imports only what takes no time; the fork server may not be there yet, or be busy importing.
"""

import marshal
import os
import select
import signal
import socket
import sys
import time

START_SECONDS = 120.0
"""How long there may be no fork server."""
CORES = "TITAN_RL_CORES"
"""Variable with the cores of a process, as the kernel lists them: `0-31,64-95`."""


def main() -> int:
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the process decides
        signal.signal(stop, signal.SIG_IGN)
    place, *words = sys.argv[1:]
    directory = words[0]
    listed, threads = os.environ.get(CORES, ""), int(os.environ.get("OMP_NUM_THREADS", "1"))
    mine = cores(listed, os.sched_getaffinity(0), threads)
    state = {"environment": dict(os.environ), "cores": mine, "scheduling": os.sched_getscheduler(0)}
    with _connect(place, directory) as server:
        socket.send_fds(server, [b"\0"], [0, 1, 2, os.open(".", os.O_PATH)])
        server.sendall(marshal.dumps({"words": words, **state}))
        if not (pid := server.recv(32)):
            print("the fork server ended while it was to fork a process", file=sys.stderr)
            return 1
        process = os.pidfd_open(int(pid))
        select.select([process], [], [])
        code = os.waitstatus_to_exitcode(exit_status(int(pid), process) or 0)
    return code if code >= 0 else 128 - code


def cores(listed: str, allowed: set[int], threads: int) -> set[int]:
    """Those listed that are allowed; if they are fewer than the threads, all that are allowed."""
    ends = [part.partition("-") for part in listed.split(",") if part]
    near = {core for first, _, last in ends for core in range(int(first), int(last or first) + 1)}
    return near & allowed if len(near & allowed) >= threads else allowed


def _connect(place: str, directory: str) -> socket.socket:
    deadline = time.monotonic() + START_SECONDS
    while True:
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(place)
            return server
        except OSError:  # not yet, or not any more: another one is being started
            server.close()
        if not owner_lives(directory) or time.monotonic() > deadline:
            sys.exit(f"no fork server answers at {place}")
        time.sleep(0.02)


def owner_lives(directory: str) -> bool:
    """Whether the owner of this directory of a watch lives."""
    try:
        pipe = os.open(f"{directory}/life", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:  # the directory is gone with it
        return False
    with open(pipe, "rb", buffering=0) as life:
        return life.read(1) is None  # there is nothing yet; without an owner, an end of file


def exit_status(pid: int, descriptor: int) -> int | None:
    """Of a process that has ended, as `wait` gives it; None if it was reaped. Whoever reaps must wait a little.
    `descriptor`: its pidfd."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            status = int(stat.read().rpartition(")")[2].split()[49])
        signal.pidfd_send_signal(descriptor, 0)  # it is not reaped yet, so the number was its own
        return status
    except OSError:
        return None


if __name__ == "__main__":
    sys.exit(main())
