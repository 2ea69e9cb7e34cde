"""`titan-rl fleet RUN …`: the hosts of a run or service that is going on.

The command talks to the controller through `RUN/control`, on the controller's host.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from titan_rl.errors import ConfigError
from titan_rl.overrides import Command, Verb, did_you_mean, print_error
from titan_rl.run_directory import CONTROL

EXIT_FAILED = 1
VERBS = ("show", "add", "remove")


def _act(command: Command, prog: str) -> int:
    """Carry out one command; returns the exit code: 1 if the run refuses it."""
    names = command.words
    if not names:
        raise ConfigError("say which run: its directory")
    run, verb, *rest = *names, *(["show"] if len(names) == 1 else [])
    if verb not in VERBS:
        raise ConfigError(f"there is no command {verb!r}{did_you_mean(verb, VERBS)}; there are {', '.join(VERBS)}")
    if verb == "show" and rest:
        raise ConfigError(f"show takes no {rest[0]}")
    if verb != "show" and not rest:
        what = "each host's worker as ADDRESS:PORT" if verb == "add" else f"hosts; `{prog} {run}` names them"
        raise ConfigError(f"say what to {verb}: {what}")
    answer = ask(Path(run), {"verb": verb, "names": rest})
    print("\n".join(answer.get("lines", [])), end="\n" if answer.get("lines") else "")
    if "error" in answer:
        print_error(prog, answer["error"])
        return EXIT_FAILED
    return 0


def ask(run: Path, command: dict[str, object]) -> dict[str, list[str]]:
    """The controller's answer. Raises ConfigError if nobody answers there."""
    if not run.is_dir():
        raise ConfigError(f"{run} is no run directory")
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(os.readlink(run / CONTROL))
        except OSError as error:
            raise ConfigError(
                f"{run} is the directory of no run that is up on this host, or of another user's "
                f"({error.strerror or error})"
            ) from error
        try:
            connection.sendall(json.dumps(command).encode() + b"\n")
            with connection.makefile() as answer:
                return json.loads(answer.readline())
        except (OSError, ValueError) as error:
            raise ConfigError(f"the run in {run} ended before it answered") from error


VERB = Verb(
    act=_act,
    about="""
usage: {prog} RUN                         show its hosts and meshes
       {prog} RUN add ADDRESS:PORT ...    take hosts in, and start generators on them
       {prog} RUN remove HOST ...         take hosts away

RUN is the directory of a run or service that is going on, on this host.

add: each ADDRESS:PORT is a `titan-rl worker`. First starts what had no room. Then a new host brings one generator, on
CUDA as many as it has devices for.
Whoever reaches a worker's port can run any code there: trusted networks only.
remove: requests go on elsewhere from the tokens that they have. A host's generators leave the fleet with it, down to
placement.least_generators; everything else on it moves. A host that is lost is not awaited any more.
A command goes on if this program is ended.""",
    takes_words=True,
    takes_settings=False,
)
