"""The sandbox of one program of the policy. `policy_code` starts it as a script; of the project it imports nothing.

    caller ── this process ── the program: process 1 of its pid namespace

- The program shares with the host a read-only standard library and nothing else.
- It is this interpreter, forked, because another start would cost as much as all the rest.
- It is one process and one thread: bounds of a process bound all that it does, and it leaves nothing behind.
- The death of the caller kills this process, and its death the program, which cannot undo that.
"""

import ctypes
import marshal
import os
import resource
import select
import site
import struct
import sys

DIRECTORY = "/tmp"  # where the program is and may write; on the host, where its root is made
DISK, LARGEST_FILE = 64 << 20, 4 << 20  # bytes that it may write in all, and to one file or stream
SIGKILL = 9  # to import `signal` or `contextlib` would take a sixth of the time
OUT_OF_MEMORY = 137  # its exit code after a MemoryError, as shells have it after a kill for want of memory

_MACHINES = {
    "x86_64": (0xC000003E, 155, "29 41 56 57 58 59 64 68 101 103 157 206 248 249 250 272 298 308 319 321 322 323"),
    "aarch64": (0xC00000B7, 41, "0 97 116 117 167 186 190 194 198 217 218 219 220 221 241 268 279 280 281 282"),
}
"""Its number in seccomp, that of `pivot_root`, and those of system calls that are refused: processes and threads
(clone, fork, vfork, execve, execveat, unshare, setns, ptrace, prctl), sockets (vsock has no namespace), keys (add_key,
request_key, keyctl), what no limit bounds (shmget, msgget, semget, memfd_create, io_setup), and the kernel's insides
(bpf, perf_event_open, userfaultfd, syslog). From 424 on, which all machines number alike, there are no system calls for
it: clone3, io_uring, and what is to come."""

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: int | bytes | None) -> None:
    if getattr(_libc, name)(*arguments) < 0:
        raise OSError(f"{name}: {os.strerror(ctypes.get_errno())}")


def _enter(pivot_root: int) -> None:
    """Move this process into a file system of its own, and its next child into all namespaces."""
    ids = {"setgroups": "deny", "uid_map": f"65534 {os.geteuid()} 1", "gid_map": f"65534 {os.getegid()} 1"}
    _call("unshare", 0x7C020000)  # user, mount, pid, network, ipc, uts
    for name, text in ids.items():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    _call("sethostname", b"sandbox", 7)
    _call("mount", None, b"/", None, 0x44000, None)  # recursively private
    library = os.path.dirname(os.__file__)
    source = b"/proc/self/fd/%d" % os.open(library, os.O_PATH)  # because the new root may hide it
    _call("mount", b"tmpfs", DIRECTORY.encode(), b"tmpfs", 6, b"mode=755,nr_inodes=4096,size=%d" % DISK)
    os.makedirs(place := DIRECTORY + library)
    _call("mount", source, place.encode(), None, 0x1000, None)  # bind
    _call("mount", None, place.encode(), None, 0x1027, None)  # bind, remount, read-only, nosuid, nodev
    for packages in ("site-packages", "dist-packages"):  # the environment may be installed there
        if os.path.isdir(hidden := f"{place}/{packages}"):
            _call("mount", b"tmpfs", hidden.encode(), b"tmpfs", 0xF, b"size=4k")
    os.chdir(DIRECTORY)
    _call("syscall", pivot_root, b".", b".")
    _call("umount2", b".", 2)  # detach
    os.makedirs(DIRECTORY, exist_ok=True)  # the library may be in it
    os.chdir(DIRECTORY)


def _confine(memory: int, seconds: int, machine: int, refused: str) -> None:
    """Take from this process, the program's, what the program is not to have."""
    os.setsid()  # a signal to its process group would reach its parent
    _call("prctl", 1, SIGKILL, 0, 0, 0)  # at the parent's death
    # a core of 0 bytes would still be piped to the host's handler of core dumps
    for name, most in (("AS", memory), ("CPU", seconds), ("FSIZE", LARGEST_FILE), ("NOFILE", 64), ("CORE", 1)):
        kind = getattr(resource, f"RLIMIT_{name}")
        resource.setrlimit(kind, (min(most, resource.getrlimit(kind)[1] % (1 << 64)),) * 2)  # infinity is -1
    _call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
    load, equal, not_less, answer, refuse, kill, allow = 0x20, 0x15, 0x35, 6, 0x50000, 0x80000000, 0x7FFF0000
    rules = [(load, 0, 0, 4), (equal, 1, 0, machine), (answer, 0, 0, kill)]
    rules += [(load, 0, 0, 0), (not_less, 0, 1, 424), (answer, 0, 0, refuse + 38)]  # ENOSYS
    for number in refused.split():
        rules += [(equal, 0, 1, int(number)), (answer, 0, 0, refuse + 1)]  # EPERM
    rules.append((answer, 0, 0, allow))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    _call("prctl", 38, 1, 0, 0, 0)  # no new privileges
    _call("prctl", 22, 2, struct.pack("HP", len(rules), ctypes.addressof(code)), 0, 0)  # seccomp


def _run(source: str, files: dict[str, str]) -> None:
    """As `python program.py` would."""
    site.setquit()
    sys.argv = [f"{DIRECTORY}/program.py"]
    sys.path.insert(0, DIRECTORY)
    sys.modules["__main__"] = program = type(sys)("__main__")
    try:
        for name, content in {**files, sys.argv[0]: source}.items():
            os.makedirs(os.path.dirname(os.path.join(DIRECTORY, name)), exist_ok=True)
            with open(name, "w", errors="replace") as file:
                file.write(content)
        exec(compile(source, sys.argv[0], "exec", dont_inherit=True), vars(program))
    except Exception as error:
        own = error.__traceback__.tb_next if error.__traceback__ else None
        sys.excepthook(type(error), error.with_traceback(own), own)
        sys.exit(OUT_OF_MEMORY if isinstance(error, MemoryError) else 1)


def main() -> None:
    _call("prctl", 1, SIGKILL, 0, 0, 0)  # at the caller's death
    source, stdin, files, memory, seconds = marshal.load(sys.stdin.buffer)
    report = os.dup(1)
    for stream in range(3):
        os.dup2(os.memfd_create("stream"), stream)
    os.write(0, stdin.encode(errors="replace"))
    os.lseek(0, 0, os.SEEK_SET)
    for name in ("binascii", "zlib", "_bz2", "_lzma", "_hashlib", "_sqlite3", "_uuid"):
        try:  # later their libraries, which are not Python's, could not be found
            __import__(name)
        except ImportError:
            pass
    try:
        machine, pivot_root, refused = _MACHINES[os.uname().machine]
        with open("/proc/self/statm") as file:
            memory += int(file.read().split()[0]) * resource.getpagesize()
        _enter(pivot_root)
        os.closerange(report + 1, os.sysconf("SC_OPEN_MAX"))
        alive, held = os.pipe()
        if (child := os.fork()) == 0:
            os.close(held)
            _confine(memory, int(seconds) + 2, machine, refused)
            if select.select([alive], [], [], 0)[0]:  # nobody holds it: the parent died before it could be died with
                os._exit(1)
            os.close(alive)
    except Exception as error:
        os.write(report, marshal.dumps(f"{type(error).__name__}: {error}"))
        os._exit(1)
    if child == 0:
        os.close(report)
        return _run(source, files)
    late = not select.select([os.pidfd_open(child)], [], [], seconds)[0]
    os.kill(child, SIGKILL)  # it is not reaped yet, so the id cannot be reused
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said = [os.pread(stream, LARGEST_FILE, 0).decode(errors="replace") for stream in (1, 2)]
    full = max(os.fstat(stream).st_size for stream in (1, 2)) >= LARGEST_FILE
    starved = code in (OUT_OF_MEMORY, -SIGKILL)  # the latter by the kernel
    ended = "timeout" if late else "output" if full else "memory" if starved else "error" if code else "ok"
    with open(report, "wb") as answer:
        marshal.dump((*said, code, ended), answer)
    os._exit(0)


if __name__ == "__main__":
    main()
