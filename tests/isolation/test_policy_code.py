"""Programs that attack get nothing, whatever they try, and cost nobody else anything (15 s: each is run)."""

import json
import marshal
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.processes import descendants, ends
from support.rollouts import TASKS

import titan_rl
from titan_rl.environments.rubric import Transcript
from titan_rl.isolation.policy_code import run_policy_code
from titan_rl.isolation.pool import UserCodePool
from titan_rl.isolation.wire import CallKind, EnvironmentSetup, UserCall
from titan_rl.types import FinishReason, Message, Purpose

FORBIDDEN = subprocess.run(["unshare", "-Urmpnf", "true"], capture_output=True).returncode != 0
pytestmark = pytest.mark.skipif(FORBIDDEN, reason="this host forbids user namespaces")

TASK = TASKS / "runs_code.py"
LIBC = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"


def c(call: str) -> str:
    """A program that makes a call of the C library and raises what came of it."""
    return f"{LIBC}if libc.{call} < 0: raise OSError(ctypes.get_errno(), 'refused')"


REFUSED = {
    "accounts": ("open('/etc/passwd')", "FileNotFoundError"),
    "answers": (f"open({str(TASK)!r})", "FileNotFoundError"),
    "packages": ("import pytest", "ModuleNotFoundError"),
    "the project": ("import titan_rl", "ModuleNotFoundError"),
    "up and out": ("open('../../../../../etc/passwd')", "FileNotFoundError"),
    "a link out": ("import os; os.symlink('/etc/passwd', 'link'); open('link')", "FileNotFoundError"),
    "other processes": ("import os; os.listdir('/proc')", "FileNotFoundError"),
    "devices": ("open('/dev/mem')", "FileNotFoundError"),
    "a device of its own": (
        "import os; os.mknod('disk', 0o60600, os.makedev(254, 0)); open('disk')",
        "PermissionError",
    ),
    "the library": ("import os; open(os.__file__, 'a')", "OSError: .Errno 30. Read-only"),
    "the library again": (
        c("mount(None, os.path.dirname(os.__file__).encode(), None, 0x1020, None)"),
        "PermissionError",
    ),
    "another root": ("import os; os.chroot('.')", "PermissionError"),
    "a server here": ("import socket; socket.create_connection(('127.0.0.1', PORT), 1)", "PermissionError"),
    "names": ("import socket; socket.getaddrinfo('example.org', 80)", "gaierror"),
    "the hypervisor": ("import socket; socket.socket(40, socket.SOCK_STREAM)", "PermissionError"),
    "fork bomb": ("import os\nwhile True: os.fork()", "PermissionError"),
    "clone": (c("syscall(CLONE, 17, 0, 0, 0, 0)"), "PermissionError"),
    "new clone": (c("syscall(435, bytes(88), 88)"), "OSError: .Errno 38"),
    "thread": ("import threading; threading.Thread(target=print).start()", "RuntimeError: can't start new thread"),
    "daemon": ("import subprocess; subprocess.Popen(['sleep', '9'], start_new_session=True)", "PermissionError"),
    "setuid program": ("import os; os.execv('/usr/bin/su', ['su'])", "PermissionError"),
    "root": ("import os; os.setuid(0)", "OSError"),
    "namespaces of its own": (c("unshare(0x10000000)"), "PermissionError"),
    "trace": (c("ptrace(16, 1, 0, 0)"), "PermissionError"),
    "keys": (c("syscall(KEYCTL, 0, -3, 0)"), "PermissionError"),
    "kernel log": (c("klogctl(3, bytes(99), 99)"), "PermissionError"),
    "life after its parent": (c("prctl(1, 0, 0, 0, 0)"), "PermissionError"),
    "memory beside its own": (c("shmget(0, 1 << 30, 0o1600)"), "PermissionError"),
    "disk bomb": ("for n in range(99): open(f'{n}', 'wb').write(bytes(1 << 20))", "OSError: .Errno 28. No space"),
    "many files": ("for n in range(9999): open(f'{n}', 'w').close()", "OSError: .Errno 28. No space"),
    "large file": ("open('a', 'wb').write(bytes(5 << 20))", "OSError: .Errno 27. File too large"),
    "higher bounds": ("import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "ValueError"),
    "deep source": ("x = " + "(" * 9999, "SyntaxError|MemoryError"),
    "no text": ("print('\udc80')", "UnicodeEncodeError"),
    "zeros": ("print(1)\0", "SyntaxError|ValueError"),
}
NUMBERS = {"x86_64": (56, 250), "aarch64": (220, 219)}


@pytest.mark.parametrize("attack", REFUSED)
def test_what_an_attack_wants_is_not_there_or_refused(attack):
    program, error = REFUSED[attack]
    clone, keyctl = NUMBERS[os.uname().machine]
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = program.replace("PORT", str(server.getsockname()[1]))
        result = run_policy_code(program.replace("CLONE", str(clone)).replace("KEYCTL", str(keyctl)))
    assert result.ended in ("error", "memory"), result
    assert re.search(rf"^(\w+\.)?({error})", result.stderr, re.MULTILINE), result.stderr


ENDS = {
    "endless loop": ("while True: pass", "timeout", -signal.SIGKILL),
    "endless sleep": (
        "import signal, time\nfor n in range(1, 32):\n try: signal.signal(n, signal.SIG_IGN)\n except OSError: pass\n"
        "while True: time.sleep(99)",
        "timeout",
        -signal.SIGKILL,
    ),
    "memory bomb": ("hoard = []\nwhile True: hoard.append(bytes(1 << 20))", "memory", 137),
    "small pieces": ("hoard = []\nwhile True: hoard.append([hoard])", "memory", 137),
    "shared memory": ("import mmap\nhoard = [mmap.mmap(-1, 1 << 24) for _ in range(99)]", "error", 1),
    "endless output": ("while True: print('x' * 9999)", "output", 1),
    "endless complaint": ("import os\nwhile True: os.write(2, bytes(1 << 20))", "output", 120),
    "crash": ("import ctypes; ctypes.string_at(0)", "error", -signal.SIGSEGV),
    "exit": ("exit(7)", "error", 7),
    "quick exit": ("import os; print(1, flush=True); os._exit(0)", "ok", 0),
}


@pytest.mark.parametrize("attack", ENDS)
def test_what_has_no_end_meets_a_bound(attack):
    program, ended, code = ENDS[attack]
    began = time.monotonic()
    result = run_policy_code(program, seconds=0.5 if ended == "timeout" else 30, memory_mib=64)
    assert (result.ended, result.exit_code) == (ended, code), result
    assert time.monotonic() - began < 20 and max(map(len, result[:2])) <= 4 << 20


HARMLESS = {
    "signals": (
        "import os, signal\nfor pid in (0, -1, 1, os.getppid(), *range(2, 99)):\n for number in (9, 15, 17, 19, 10):\n"
        "  try: os.kill(pid, number)\n  except ProcessLookupError: pass\nos.killpg(0, 9)\nprint('alive')",
        "alive",
    ),
    "descriptors": (
        "import os\nfor n in range(3, 2000):\n try: os.write(n, b'forged'); print(n)\n except OSError: pass\n"
        "os.dup2(0, 60); os.lseek(0, 0, 0); os.write(0, b'forged'); os.ftruncate(1, 0)\nprint('none')",
        "none",
    ),
    "no streams": ("import os\nfor n in range(3): os.close(n)\nos._exit(0)", ""),
    "files of packages": (
        "import os\nplace = os.path.dirname(os.__file__) + '/site-packages'\n"
        "print(os.path.isdir(place) and os.listdir(place) or [])",
        "[]",
    ),
    "variables": ("import os; print('SECRET_KEY' in os.environ, os.environ['PYTHONHASHSEED'])", "False 0"),
    "identity": ("import os; print(os.getuid(), os.getpid(), os.getppid(), os.uname().nodename)", "65534 1 0 sandbox"),
    "libraries": (
        "import asyncio, bz2, ctypes, dataclasses, decimal, hashlib, json, lzma, random, re, sqlite3, uuid, "
        "zlib\nasync def main(): print(hashlib.new('sha256', input().encode()).hexdigest()[:6])\nasyncio.run(main())",
        "31b9ee",
    ),
    "its own module": (
        "from package.part import x\nimport pickle\nclass A: pass\nprint(x, len(pickle.dumps(A())) > 9)",
        "5 True",
    ),
}


@pytest.mark.parametrize("attack", HARMLESS)
def test_what_is_allowed_harms_nobody(attack, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "secret")
    program, printed = HARMLESS[attack]
    result = run_policy_code(program, stdin="a line\n", files={"package/part.py": "x = 5"})
    assert result == (printed + "\n" * bool(printed), "", 0, "ok")


def test_what_a_program_prints_is_data():
    forged = marshal.dumps((b"right", b"", 0, "ok"))
    result = run_policy_code(f"import os\nfor n in (1, 2): os.write(n, {forged!r})\nos._exit(3)")
    text = forged.decode(errors="replace")
    assert result == (text, text, 3, "error")


def test_names_of_files_lead_nowhere_else(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("before")
    names = (str(victim), f"../../../../../..{victim}", "/etc/passwd", "a/../../b")
    result = run_policy_code("print(open('/etc/passwd').read())", files=dict.fromkeys(names, "after"))
    assert result.stdout == "after\n" and victim.read_text() == "before"
    assert "accounts" not in Path("/etc/passwd").read_text()
    for files in ({"a" * 300: ""}, {"a": "", "a/b": ""}, {"": ""}, {"\0": ""}):
        assert run_policy_code("print(1)", files=files)[2:] == (1, "error")


def test_the_same_program_prints_the_same():
    program = "print({str(n) for n in range(50)})"
    assert run_policy_code(program) == run_policy_code(program)


def test_threads_may_run_programs_side_by_side():
    with ThreadPoolExecutor(6) as threads:
        results = threads.map(lambda n: run_policy_code(f"print({n} * 2)").stdout, range(24))
        assert list(results) == [f"{2 * n}\n" for n in range(24)]


def caller(program: str, before: str = "") -> subprocess.Popen:
    """A process that runs a program, and prints what came of it."""
    code = f"{before}\nfrom titan_rl.isolation.policy_code import run_policy_code\n"
    code += f"import json; print(json.dumps(run_policy_code({program!r}, seconds=60)))"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_program_shares_no_namespace_and_ends_with_its_caller():
    with caller("import time; time.sleep(60)") as process:
        while len(started := descendants(process.pid)) < 2:
            assert process.poll() is None
            time.sleep(0.01)
        for name in ("user", "mnt", "pid", "net", "ipc", "uts"):
            ours, its = (os.readlink(f"/proc/{pid}/ns/{name}") for pid in (process.pid, started[-1]))
            assert ours != its, name
        process.kill()
        assert all(map(ends, started))


PR_SET_NO_NEW_PRIVS = "import ctypes; ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)"


def test_a_process_without_rights_can_run_programs():
    """The right to give the user a number in a namespace is the only one that root needs, and others need none."""
    with caller("print(5)", PR_SET_NO_NEW_PRIVS) as process:
        assert json.loads(process.stdout.read())[0] == "5\n", process.stderr.read()
    if os.getuid() == 0 and shutil.which("setpriv"):
        code = "from titan_rl.isolation.policy_code import run_policy_code; print(run_policy_code('print(5)').ended)"
        rights = ["setpriv", "--bounding-set=-all,+setfcap", "--inh-caps=-all"]
        assert subprocess.run([*rights, sys.executable, "-c", code], capture_output=True, text=True).stdout == "ok\n"


def test_where_namespaces_are_forbidden_nothing_runs(tmp_path):
    code = (
        "from titan_rl.isolation.policy_code import run_policy_code\nfrom titan_rl.errors import AbsentError\n"
        "try: run_policy_code('print(\"I ran\")')\nexcept AbsentError as error: print(error)"
    )
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "-Ur", "sh", "-c", forbid, sys.executable, code], capture_output=True, text=True, check=True
    )
    assert "cannot be isolated here: OSError: unshare: " in done.stdout and "sysctl user.max_user_n" in done.stdout
    assert "I ran" not in done.stdout


async def test_a_reward_runs_what_the_policy_wrote():
    """In the process of user code, with its bounds, through the real pool."""
    pool = UserCodePool(EnvironmentSetup(name=f"{TASK}:RunsCode", run_seed=5, imports=(str(TASK),), memory_mib=200))
    answers = {
        "print(sum(map(int, input().split())))": (1.0, "ok"),
        "print(8)": (0.0, "ok"),
        "1 / 0": (0.0, "error"),
        "while True: pass": (0.0, "timeout"),
        f"print(open({str(TASK)!r}).read())": (0.0, "error"),
        "x = bytearray(1 << 30)": (0.0, "memory"),
    }
    try:
        await pool.start()
        for answer, (reward, ended) in answers.items():
            conversation = Transcript((Message("user", "add"), Message("assistant", answer)), (FinishReason.STOP,))
            got, parts = await pool.call(UserCall(CallKind.SCORE, Purpose.TRAIN, 0, conversation))
            assert got == reward and parts[ended] == 1.0, (answer, got, parts)
        assert pool.restarts == 0
    finally:
        await pool.close()


def test_the_manuals_task_pays_for_formulas_and_not_for_tricks():
    manual = (Path(titan_rl.__file__).parent / "environments" / "README.md").read_text()
    code = re.search(r"Save this as `formulas.py`:\n\n```python\n(.*?)```", manual, re.DOTALL)[1]
    exec(code, module := {})
    example = module["Formulas"]().example(0)
    wrong = {"open('/etc/passwd').read()", "HIDDEN_TEST", "a-a", "(" * 999, "__import__('os')._exit(0)", ""}
    for answer in {example.answer, f"({example.answer})"} | wrong:
        scores = module["right"](example, SimpleNamespace(answer=answer))
        assert scores["right"] == (answer not in wrong), answer
