"""Programs as they are, for `Environment.play`: a Python script in this very process, or any other command.

    class Review(Environment):
        def play(self, example, endpoint):
            return run_script("agent.py", example.prompt[0].content, endpoint=endpoint)

- The program finds the policy where OpenAI's clients look: `OPENAI_BASE_URL`, `OPENAI_API_KEY`; and `OPENAI_MODEL`.
- What it prints is returned; what it prints on standard error is in the worker's log. A program that fails is a
  `TaskError` that ends with the last of what it said.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import subprocess
import sys
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from titan_rl.errors import ConfigError, TaskError
from titan_rl.importing import describe
from titan_rl.processes import ending_in_words
from titan_rl.types import Endpoint

LONGEST_TAIL = 400
"""Characters of a failed program's output that its error quotes."""
LONGEST_OUTPUT = 64 << 20
"""Bytes that a program may print on one stream. Without a limit, endless output would fill the host's memory."""


def run_script(path: str | os.PathLike[str], *arguments: str, endpoint: Endpoint, stdin: str = "") -> str:
    """Run a Python script as `python PATH ARGUMENTS…` would, in this process.

    What the environment imported is imported already: import there what the script needs, and no rollout waits for it.
    To be called in `play` only, whose process ends with the rollout: whatever the script changes in it stays changed,
    but its arguments, environment variables and standard streams. Threads that are no daemons are waited for; functions
    registered with `atexit` are not called.

    Args:
        stdin: what the script can read on its standard input.

    Returns:
        What it printed on standard output, subprocesses included.

    Raises:
        TaskError: it raised, or exited with another status than 0.
    """
    program = os.fspath(path)
    with _memory_file() as printed:
        os.ftruncate(printed, LONGEST_OUTPUT)
        fcntl.fcntl(printed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)  # a write past the end fails
        with _as_main_program([program, *arguments], endpoint, stdin, printed):
            problem = _run(program)
        length = os.lseek(printed, 0, os.SEEK_CUR)
        output = os.pread(printed, length, 0).decode(errors="replace")
    if length == LONGEST_OUTPUT:
        raise TaskError(f"{program} printed more than {LONGEST_OUTPUT:,} bytes")
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
    """Run a program of any kind in a process of its own, without a shell.

    Args:
        stdin: what it can read on its standard input.
        env: variables to set in addition to this process's and the endpoint's.
        cwd: its working directory; None: this process's.

    Returns:
        What it printed on standard output.

    Raises:
        TaskError: it cannot be started, or ended with another status than 0.
    """
    name = os.fspath(command[0])
    try:
        with _memory_file(stdin) as given:
            process = subprocess.Popen(
                list(command),
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, **_variables(endpoint), **(env or {})},
                cwd=cwd,
            )
    except OSError as error:
        raise TaskError(f"{name} cannot be started: {error}") from error
    with process, ThreadPoolExecutor(max_workers=2) as readers:
        output, said = readers.map(_read, (process.stdout, process.stderr))
    complaint = said.decode(errors="replace")
    sys.stderr.write(complaint)
    if max(len(output), len(said)) > LONGEST_OUTPUT:
        raise TaskError(f"{name} printed more than {LONGEST_OUTPUT:,} bytes")
    if process.returncode != 0:
        raise TaskError(f"{name} {ending_in_words(process.returncode)}{_tail(complaint, 'it said')}")
    return output.decode(errors="replace")


def import_openai() -> None:
    """Import OpenAI's client and ask with it once, for the constructor of an environment whose programs use it.

    The package imports its parts and builds its schemas when they are first used, which takes five times as long as a
    whole rollout of a short script. One answer is made up in this process, one connection is refused.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import openai
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"this environment's programs need the package openai ({error}): install it with `pip install "
            "'titan-rl[agents]'`"
        ) from error
    library = openai.DefaultHttpxClient.__bases__[0].__module__.partition(".")[0]  # httpx or its successor
    httpx: Any = importlib.import_module(library)
    choice = {"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}
    answer = {"id": "none", "object": "chat.completion", "created": 0, "model": "none", "choices": [choice]}
    tools: Any = [{"type": "function", "function": {"name": "none", "parameters": {"type": "object"}}}]
    answering = httpx.Client(transport=httpx.MockTransport(lambda request: httpx.Response(200, json=answer)))
    refused = httpx.Client(trust_env=False)  # whatever proxy there is: nobody listens at port 0
    for http_client in (answering, refused):
        with (
            openai.OpenAI(
                base_url="http://127.0.0.1:0", api_key="none", max_retries=0, http_client=http_client
            ) as client,
            suppress(openai.APIConnectionError),
        ):
            client.chat.completions.create(model="none", messages=[{"role": "user", "content": "Hello"}], tools=tools)


def _run(program: str) -> str:
    """What went wrong; empty if nothing did."""
    before = set(threading.enumerate())
    try:
        code = compile(Path(program).read_bytes(), program, "exec")
        exec(code, sys.modules["__main__"].__dict__)
        for thread in set(threading.enumerate()) - before:
            if not thread.daemon:
                thread.join()
    except SystemExit as end:
        return "" if end.code in (None, 0) else f"exited with {end.code}"
    except Exception as error:  # whatever the script does not catch
        return f"raised {describe(error)}"
    return ""


def _read(stream: IO[bytes] | None) -> bytes:
    """All output, up to one byte more than `LONGEST_OUTPUT`. After that the program can write no more."""
    assert stream is not None
    with stream:
        return stream.read(LONGEST_OUTPUT + 1)


def _variables(endpoint: Endpoint) -> dict[str, str]:
    """What a program's environment is told, past any proxy: no proxy reaches a server on this host."""
    spared = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    no_proxy = ",".join(filter(None, (spared, urlsplit(endpoint.base_url).hostname)))
    return {**endpoint.environ(), "NO_PROXY": no_proxy, "no_proxy": no_proxy}


@contextmanager
def _as_main_program(arguments: list[str], endpoint: Endpoint, stdin: str, printed: int) -> Iterator[None]:
    before = sys.argv, sys.path[:], dict(os.environ), sys.modules["__main__"]
    main = types.ModuleType("__main__")
    main.__file__ = arguments[0]
    sys.argv, sys.modules["__main__"] = arguments, main
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    os.environ.update(_variables(endpoint))
    try:
        with (
            _memory_file(stdin) as given,
            _standard_stream("stdin", 0, given, "r"),
            _standard_stream("stdout", 1, printed, "w"),
        ):
            yield
    finally:
        sys.argv, sys.path[:], environment, sys.modules["__main__"] = before
        os.environ.clear()
        os.environ.update(environment)


@contextmanager
def _standard_stream(name: str, descriptor: int, file: int, mode: str) -> Iterator[None]:
    """The file in the place of a standard stream, for this process and those that it starts."""
    stream, saved = getattr(sys, name), os.dup(descriptor)
    if mode == "w":
        stream.flush()
    os.dup2(file, descriptor)
    replacement = open(descriptor, mode, encoding="utf-8", errors="replace", closefd=False)
    setattr(sys, name, replacement)
    try:
        yield
    finally:
        with suppress(PermissionError):  # more than `LONGEST_OUTPUT` was printed
            replacement.close()
        setattr(sys, name, stream)
        os.dup2(saved, descriptor)
        os.close(saved)


@contextmanager
def _memory_file(content: str = "") -> Iterator[int]:
    """The descriptor of a file in memory, at its beginning."""
    file = os.memfd_create("standard stream", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(file, "wb", closefd=False) as stream:
            stream.write(content.encode())
        os.lseek(file, 0, os.SEEK_SET)
        yield file
    finally:
        os.close(file)


def _tail(output: str, introduction: str) -> str:
    last = output.strip()[-LONGEST_TAIL:]
    return f"; {introduction}: {last}" if last else ""
