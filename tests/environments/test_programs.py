"""Programs as they are: scripts and commands that find the policy, print an answer, or fail (1 s)."""

import subprocess
import sys

import pytest

from titan_rl.environments.programs import run_command, run_script
from titan_rl.errors import TaskError
from titan_rl.types import Endpoint

ENDPOINT = Endpoint(base_url="http://127.0.0.1:9/v1", api_key="secret", model="policy")


@pytest.fixture
def script(tmp_path):
    def write(text, name="agent.py"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_a_script_runs_as_it_does_on_the_command_line(script):
    script("WORD = 'sibling'", "neighbour_of_agent.py")
    path = script(
        "import os, sys, neighbour_of_agent\n"
        "print(__name__, sys.argv[1:], neighbour_of_agent.WORD, sys.stdin.read())\n"
        "print(*(os.environ[name] for name in ('OPENAI_BASE_URL', 'OPENAI_API_KEY', 'OPENAI_MODEL')), flush=True)\n"
        "print('ü', end='')\n"
    )
    assert run_script(path, "1+2=", endpoint=ENDPOINT, stdin="some input") == (
        "__main__ ['1+2='] sibling some input\nhttp://127.0.0.1:9/v1 secret policy\nü"
    )


@pytest.mark.parametrize("end", ["exit()", "exit(0)", "raise SystemExit"])
def test_a_script_may_exit_with_success(script, end):
    assert run_script(script(f"print('done'); {end}; print('never')"), endpoint=ENDPOINT) == "done\n"


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("exit(3)", r"agent.py exited with 3; it printed: so far$"),
        ("exit('no luck')", r"agent.py exited with no luck; it printed: so far$"),
        (
            "raise KeyError('gone')",
            r"agent.py raised KeyError: 'gone' \(.*agent.py:2 in <module>\); it printed: so far$",
        ),
        ("import no_such_module", r"agent.py raised ModuleNotFoundError: .*no_such_module"),
    ],
)
def test_a_script_that_fails_is_an_error_that_ends_with_what_it_printed(script, end, reason):
    with pytest.raises(TaskError, match=reason):
        run_script(script(f"print('so far')\n{end}"), endpoint=ENDPOINT)


def test_a_script_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(TaskError, match="raised FileNotFoundError"):
        run_script(tmp_path / "missing.py", endpoint=ENDPOINT)


def test_threads_of_a_script_are_waited_for(script):
    path = script(
        "import sys, threading\n"
        "main = threading.current_thread()\n"
        "ready = threading.Event()\n"
        "threading.Thread(target=lambda: (ready.wait(), print('late'))).start()\n"
        "print('first')\n"
        "ready.set()\n"
    )
    assert run_script(path, endpoint=ENDPOINT) == "first\nlate\n"


def test_idle_threads_of_a_pool_are_not_waited_for(script):
    path = script(
        "from concurrent.futures import ThreadPoolExecutor\n"
        "pool = ThreadPoolExecutor(2)\n"
        "pool.submit(print, 'done').result()\n"
    )
    assert run_script(path, endpoint=ENDPOINT) == "done\n"


def test_a_command_finds_the_policy_and_its_output_is_returned(tmp_path):
    shell = 'read line; echo "$line $OPENAI_BASE_URL $OPENAI_API_KEY $OPENAI_MODEL $EXTRA $(pwd)"'
    said = run_command(["sh", "-c", shell], endpoint=ENDPOINT, stdin="hello\n", env={"EXTRA": "more"}, cwd=tmp_path)
    assert said == f"hello http://127.0.0.1:9/v1 secret policy more {tmp_path}\n"


@pytest.mark.parametrize(
    ("shell", "reason"),
    [
        ("echo answer; echo whatever else; echo reason >&2; exit 4", "sh exited with code 4; it said: reason$"),
        ("kill -9 $$", r"sh was killed by signal 9 \(SIGKILL\)$"),
    ],
)
def test_a_command_that_fails_is_an_error_that_ends_with_what_it_said(shell, reason):
    with pytest.raises(TaskError, match=reason):
        run_command(["sh", "-c", shell], endpoint=ENDPOINT)


def test_a_command_that_is_not_there_is_an_error():
    with pytest.raises(TaskError, match="no-such-command cannot be started"):
        run_command(["no-such-command"], endpoint=ENDPOINT)


def test_what_a_command_says_on_standard_error_is_passed_on(capsys):
    assert run_command(["sh", "-c", "echo warning >&2; echo answer"], endpoint=ENDPOINT) == "answer\n"
    assert capsys.readouterr().err == "warning\n"


CALL = """
import http.server, json, os, sys
import openai
from titan_rl.environments.programs import prepare_clients
if len(sys.argv) > 1:
    prepare_clients()
class Answer(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hi"}}
        body = json.dumps({"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]})
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(body.encode())
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Answer)
if not os.fork():
    server.handle_request()
    os._exit(0)
before = set(sys.modules)
client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="x")
asked = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
print(asked.choices[0].message.content, len(set(sys.modules) - before))
"""


def test_a_prepared_client_imports_nothing_more_at_its_first_call(tmp_path):
    """Else every rollout that a program plays would import it again."""
    file = tmp_path / "call.py"
    file.write_text(CALL)
    said = [
        subprocess.run([sys.executable, file, *more], capture_output=True, text=True).stdout for more in ([], ["+"])
    ]
    (_, unprepared), (answer, prepared) = (line.split() for line in said)
    assert answer == "hi" and int(prepared) == 0 < int(unprepared)
