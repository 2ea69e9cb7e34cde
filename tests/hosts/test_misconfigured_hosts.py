"""Each mistake with hosts is one sentence that names the host, the cause and what to do, within seconds."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.namespaces import Hosts, skip_reason
from tests.hosts.workers import PORT, lend
from titan_rl import train

pytestmark = [pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "-"), pytest.mark.timeout(300)]

REPOSITORY = Path(__file__).resolve().parents[2]
TASK = "from titan_rl.environments.copy import Copy\n\n\nclass Mine(Copy):\n    pass\n"


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(2, shared_memory=64 << 20) as up:
        yield up


def refused(hosts: Hosts, runs: Path, *arguments: str, address: str = "") -> str:
    """What a run over both hosts says last before it ends, without having started anything."""
    run = [sys.executable, "-m", "titan_rl.train", "--recipe", "cpu_smoke", "--generator.tensor-parallel", "1"]
    run += ["--generator.engine", "simulated"]
    where = ["--hosts", address or f"{hosts[1].address}:{PORT}", "--trusted-network", "--logging.directory", str(runs)]
    process = hosts[0].start([*run, *where, *arguments])
    output, _ = process.communicate(timeout=90)
    assert process.returncode in (1, 2), output[-3000:]
    assert "optimizer step" not in output
    return output


def refused_with_worker(hosts: Hosts, runs: Path, port: int, before: list[str], *arguments: str) -> str:
    """The same with a worker on the second host that is started behind this command."""
    lent = lend(hosts[1], port, behind=before)
    try:
        return refused(hosts, runs, *arguments, address=f"{hosts[1].address}:{port}")
    finally:
        lent.terminate()
        lent.wait()


def test_nobody_listens(hosts: Hosts, tmp_path: Path) -> None:
    assert "nobody listens at host1 (10.77.0.2:17000): start `titan-rl worker" in refused(hosts, tmp_path)


def test_the_address_is_wrong_or_a_firewall_is_between(hosts: Hosts, tmp_path: Path) -> None:
    hosts[1].cut()
    try:
        said = refused(hosts, tmp_path)
    finally:
        hosts[1].mend()
    assert "host1 (10.77.0.2:17000) did not answer within 3 s" in said or "cannot be reached" in said


def test_a_name_that_nobody_knows(hosts: Hosts, tmp_path: Path) -> None:
    assert "no-such-host:17000 cannot be reached" in refused(hosts, tmp_path, address="no-such-host:17000")


def test_what_listens_is_no_worker(hosts: Hosts, tmp_path: Path) -> None:
    program = f"import socket; s = socket.create_server(('{hosts[1].address}', {PORT + 1})); print('up', flush=True)"
    other = hosts[1].run([sys.executable, "-c", f"{program}; input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout.readline()
    try:
        said = refused(hosts, tmp_path, address=f"{hosts[1].address}:{PORT + 1}")
    finally:
        other.kill()
        other.wait()
    assert "takes connections and starts nothing" in said and "no `titan-rl worker`" in said


def test_a_port_that_is_in_use_and_an_address_that_is_not_here(hosts: Hosts) -> None:
    used = lend(hosts[1], PORT + 3)
    try:
        for address, why in ((f"{hosts[1].address}:{PORT + 3}", "in use"), ("10.77.0.9:17000", "assign")):
            listen = [sys.executable, "-m", "titan_rl.cli", "worker", "--listen", address, "--trusted-network"]
            done = hosts[1].start(listen)
            output, _ = done.communicate(timeout=60)
            assert done.returncode == 2 and why in output, output
    finally:
        used.terminate()
        used.wait()


def hide(tmp_path: Path, path: Path, *, behind: Path | None = None) -> list[str]:
    """A command in front of a worker: in its own mount namespace, something else is at this path."""
    cover = behind or tmp_path / "empty"
    if behind is None:
        cover.mkdir(exist_ok=True)
    return ["unshare", "-m", "sh", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"', str(cover), str(path)]


@pytest.mark.parametrize("what", ["no task", "another task", "no run directory", "another checkpoint"])
def test_what_a_host_lacks_is_named(what: str, hosts: Hosts, tmp_path: Path) -> None:
    ours, theirs, runs = (tmp_path / name for name in ("ours", "theirs", "runs"))
    for directory in (ours, theirs, runs):
        directory.mkdir()
    (ours / "task.py").write_text(TASK)
    cover, arguments = ours, ["--environment.name", f"{ours / 'task.py'}:Mine"]
    if what == "another task":
        (theirs / "task.py").write_text(TASK + "# newer\n")
        cover = ours
    elif what == "no run directory":
        cover, arguments = runs, ["--placement.trainer", "host0", "host1"]
    elif what == "another checkpoint":
        from titan_rl.policy.config import TinyPolicyConfig
        from titan_rl.policy.models.tiny import make_tiny_policy

        made = make_tiny_policy(TinyPolicyConfig(symbols="0123456789="), tmp_path / "policies")
        cover, arguments = made, ["--policy.path", str(made)]
        shutil.copytree(made, theirs, dirs_exist_ok=True)
        (theirs / "generation_config.json").write_text("{}")
    expected = {
        "no task": "has no ",
        "another task": "has another ",
        "no run directory": "does not see ",
        "another checkpoint": "has another ",
    }[what]
    said = refused_with_worker(hosts, runs, PORT + 4, hide(tmp_path, cover, behind=theirs), *arguments)
    assert f"host1 (10.77.0.2:{PORT + 4}) {expected}" in said, said[-2000:]


def test_few_open_files_on_one_host(hosts: Hosts, tmp_path: Path) -> None:
    said = refused_with_worker(hosts, tmp_path, PORT + 6, ["sh", "-c", 'ulimit -n 150; exec "$0" "$@"'])
    assert "host1 (10.77.0.2:17006): a process may have 150 open files" in said


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--hosts", "10.0.0.2"], "is not ADDRESS:PORT"),
        (["--hosts", "10.0.0.2:1,10.0.0.2:1", "--trusted-network"], "twice"),
        (["--hosts", "10.0.0.2:1,127.0.0.1:2", "--trusted-network"], "leads every host to itself"),
        (["--hosts", "10.0.0.2:1"], "without --trusted-network"),
        (["--placement.generators", "host7"], "there is no host7; there are host0"),
        (["--hosts", "127.0.0.1:1", "--placement.trainer", "host0", "host1"], "cannot be shared evenly"),
    ],
)
def test_what_the_command_line_alone_shows(
    arguments: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(["--recipe", "copy4", "--logging.directory", str(tmp_path), *arguments]) == 2
    assert why in capsys.readouterr().err


def test_ctrl_c_while_a_host_does_not_answer_ends_the_run_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = ["--hosts", f"127.0.0.1:{server.getsockname()[1]}", "--logging.directory", str(tmp_path)]
        command = [sys.executable, "-m", "titan_rl.train", "--recipe", "cpu_smoke", *where]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        run = subprocess.Popen(command, cwd=REPOSITORY, text=True, **pipes)
        first, second = server.accept(), server.accept()  # the run's own, and Monarch's
        run.send_signal(signal.SIGINT)
        output, _ = run.communicate(timeout=60)
        first[0].close(), second[0].close()
    assert run.returncode == 130 and "was stopped by Ctrl-C" in output, output
    assert "starts nothing" not in output
