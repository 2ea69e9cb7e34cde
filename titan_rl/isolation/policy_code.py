"""Runs programs that the policy wrote, for a reward or a tool. Such a program may do whatever its language can, so it
is given nothing. What it prints is data, and only the caller decides what that is worth."""

import marshal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from titan_rl.errors import AbsentError
from titan_rl.processes import ending_in_words

_COMMAND = (sys.executable, "-S", "-s", "-P", "-B", "-X", "utf8", Path(__file__).with_name("policy_sandbox.py"))
_REMEDY = (
    "it takes Linux on x86_64 or aarch64, seccomp, and user namespaces: see `sysctl user.max_user_namespaces "
    "kernel.unprivileged_userns_clone kernel.apparmor_restrict_unprivileged_userns`, and give a container "
    "`--security-opt seccomp=unconfined --security-opt apparmor=unconfined` and, for its root, the capability SETFCAP"
)


class PolicyCodeResult(NamedTuple):
    stdout: str
    stderr: str
    exit_code: int
    """Negative: the signal that killed it."""
    ended: Literal["ok", "error", "timeout", "memory", "output"]
    """ok: with exit code 0. error: with another one, or by a signal. The others: at that bound, or as if."""


def run_policy_code(
    source: str, *, stdin: str = "", seconds: float = 5.0, memory_mib: int = 256, files: Mapping[str, str] | None = None
) -> PolicyCodeResult:
    """Run a Python program that nobody trusts and wait for its end, in any thread of any process.

    It has the version and the standard library of this interpreter, one process, one thread, a fixed `PYTHONHASHSEED`,
    and the working directory `/tmp`, where it may write 64 MiB; a file, and what it prints on a stream, has at most 4.
    When the call returns, nothing of it is left. Not kept from it: defects of the kernel, whose calls it can make; what
    processors leak through caches and timing; clock, processor and kernel version; a core for `seconds`; memory.

    Args:
        seconds: of wall-clock time, without the start.
        memory_mib: address space beyond what the interpreter takes.
        files: to put into its directory. A name that cannot be written is the program's error.

    Raises:
        AbsentError: this host cannot isolate it, so it was not run; says what is missing.
    """
    order = marshal.dumps((source, stdin, dict(files or {}), memory_mib << 20, seconds))
    variables = {"PYTHONHASHSEED": "0"}  # the same program prints the same, of sets too
    done = subprocess.run(_COMMAND, input=order, capture_output=True, env=variables, start_new_session=True)
    answer = marshal.loads(done.stdout) if done.stdout else done.stderr.decode() or ending_in_words(done.returncode)
    if isinstance(answer, str):
        raise AbsentError(f"policy code cannot be isolated here: {answer}; {_REMEDY}")
    return PolicyCodeResult(*answer)
