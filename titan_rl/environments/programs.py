"""Programs as they are, for `Environment.play`: a Python script in this very process, or any other command.

    class Review(Environment):
        def play(self, example, endpoint):
            return run_script("agent.py", example.prompt[0].content, endpoint=endpoint)

- The program finds the policy where clients look: `OPENAI_BASE_URL` and `OPENAI_API_KEY`, or `ANTHROPIC_BASE_URL` and
  `ANTHROPIC_API_KEY`; and `OPENAI_MODEL` or `ANTHROPIC_MODEL`, which are the same.
- What it prints is returned; what it prints on standard error is in the worker's log. A program that fails is a
  `TaskError` that ends with the last of what it said. `environment.memory_mib` bounds what is kept of endless output.
"""

import io
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import thread as thread_pools
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from titan_rl.errors import TaskError
from titan_rl.importing import describe
from titan_rl.processes import ending_in_words
from titan_rl.types import Endpoint

LONGEST_TAIL = 400
"""Characters of a failed program's output that its error quotes."""


def run_script(path: str | os.PathLike[str], *arguments: str, endpoint: Endpoint, stdin: str = "") -> str:
    """Run a Python script as `python PATH ARGUMENTS…` would, in this process.

    What the environment imported is imported already: import there what the script needs, and no rollout waits for it.
    To be called in `play` only, whose process ends with the rollout: whatever the script changes in it stays changed.
    Threads are waited for, but for daemons and those of pools, where idle ones stay; functions registered with `atexit`
    are not called. `stdin`: what the script can read on its standard input. Returns what it printed on standard output,
    without what its subprocesses print. Raises TaskError: it raised, or exited with another status than 0.
    """
    program, problem = os.fspath(path), ""
    os.environ.update(_variables(endpoint))
    sys.argv = [program, *arguments]
    sys.path.insert(0, str(Path(program).resolve().parent))
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8")
    printed, before = io.BytesIO(), set(threading.enumerate())
    with redirect_stdout(io.TextIOWrapper(printed, encoding="utf-8", errors="replace", write_through=True)):
        try:
            runpy.run_path(program, run_name="__main__")
            for thread in set(threading.enumerate()) - before:
                if not thread.daemon and thread not in thread_pools._threads_queues:
                    thread.join()
        except SystemExit as end:
            problem = "" if end.code in (None, 0) else f"exited with {end.code}"
        except MemoryError:  # what it printed may be lost with it
            raise
        except Exception as error:  # whatever the script does not catch
            problem = f"raised {describe(error)}"
        output = printed.getvalue().decode(errors="replace")
    if problem:
        raise TaskError(f"{program} {problem}{_tail(output, 'it printed')}") from None
    return output


def run_command(
    command: Sequence[str | os.PathLike[str]],
    *,
    endpoint: Endpoint,
    stdin: str = "",
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> str:
    """Run a program of any kind in a process of its own, without a shell. Returns what it printed on standard output.
    Raises TaskError: it cannot be started, or ended with another status than 0.

    Args:
        stdin: what it can read on its standard input.
        env: variables to set in addition to this process's and the endpoint's.
        cwd: its working directory; None: this process's.
    """
    name = os.fspath(command[0])
    try:
        variables = {**os.environ, **_variables(endpoint), **(env or {})}
        done = subprocess.run(list(command), input=stdin.encode(), capture_output=True, env=variables, cwd=cwd)
    except OSError as error:
        raise TaskError(f"{name} cannot be started: {error}") from error
    complaint = done.stderr.decode(errors="replace")
    sys.stderr.write(complaint)
    if done.returncode != 0:
        raise TaskError(f"{name} {ending_in_words(done.returncode)}{_tail(complaint, 'it said')}")
    return done.stdout.decode(errors="replace")


def _variables(endpoint: Endpoint) -> dict[str, str]:
    """What a program's environment is told, past any proxy: no proxy reaches a server on this host.

    Reading the system's bundle of certificates takes a client 30 ms when it starts, half of what a short rollout costs.
    The directory beside it has the same ones by their hashes, of which only what is needed is read.
    """
    spared = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    no_proxy = ",".join(filter(None, (spared, urlsplit(endpoint.base_url).hostname)))
    variables = {**endpoint.environ(), "NO_PROXY": no_proxy, "no_proxy": no_proxy}
    bundle = Path(os.environ.get("SSL_CERT_FILE", ""))
    if bundle.name == "ca-certificates.crt" and next(bundle.parent.glob("*.0"), None):
        variables |= {"SSL_CERT_FILE": "", "SSL_CERT_DIR": str(bundle.parent)}
    return variables


class _Nowhere:
    def handle_request(self, _: Any) -> Any:
        raise OSError


def prepare_clients() -> None:
    """Do what OpenAI's client does when it is first used (imports, types, looking at the platform), 0.1 s of work,
    if it has been imported: the processes that are forked later need not."""
    if "openai" not in sys.modules:
        return
    import openai
    from openai.types.chat import ChatCompletion

    openai.OpenAI(api_key="none", base_url="http://localhost").close()  # with its own transport
    nowhere: Any = _Nowhere()
    http = openai.DefaultHttpxClient(transport=nowhere, trust_env=False)
    client = openai.OpenAI(api_key="none", base_url="http://localhost", max_retries=0, http_client=http)
    with suppress(openai.APIConnectionError, OSError):
        client.chat.completions.create(model="", messages=[{"role": "user", "content": ""}])
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": ""}}
    ChatCompletion.construct(choices=[choice], usage={"total_tokens": 0})
    ChatCompletion.model_rebuild()
    if "openai.resources.responses.responses" in sys.modules:
        from openai.types.responses import Response

        Response.model_rebuild()


def _tail(output: str, introduction: str) -> str:
    last = output.strip()[-LONGEST_TAIL:]
    return f"; {introduction}: {last}" if last else ""
