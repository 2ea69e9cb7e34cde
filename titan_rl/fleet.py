"""`titan-rl fleet RUN …`: hosts and generators of a run or service that is going on.

The command talks to the controller through `RUN/control`, on the controller's host.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from titan_rl.errors import ConfigError
from titan_rl.launch.resume import CONTROL
from titan_rl.overrides import Command, Verb, did_you_mean, say

EXIT_FAILED = 1
VERBS = ("show", "add", "drain", "remove")


def _act(command: Command, prog: str) -> int:
    """Carry out one command; returns the exit code: 1 if the run refuses it."""
    names = command.words
    count = command.values.get("--generators", "")
    if count and not count.isdecimal():
        raise ConfigError(f"--generators: expected a number, got {count!r}")
    if not names:
        raise ConfigError("say which run: its directory")
    run, verb, *rest = *names, *(["show"] if len(names) == 1 else [])
    if verb not in VERBS:
        raise ConfigError(f"there is no command {verb!r}{did_you_mean(verb, VERBS)}; there are {', '.join(VERBS)}")
    if verb in ("drain", "remove") and not rest:
        raise ConfigError(f"say what to {verb}: generators or hosts; `{prog} {run}` names them")
    if verb == "show" and rest or count and verb != "add":
        raise ConfigError(f"{verb} takes no {'--generators' if count else rest[0]}")
    answer = ask(Path(run), {"verb": verb, "names": rest, "generators": int(count) if count else None})
    print("\n".join(answer.get("lines", [])), end="\n" if answer.get("lines") else "")
    if "error" in answer:
        say(prog, answer["error"])
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
usage: {prog} RUN                                            show its hosts and meshes
       {prog} RUN add [ADDRESS:PORT ...] [--generators N]    take hosts in, and start generators
       {prog} RUN drain NAME ...                             take generators or hosts away, when they are idle
       {prog} RUN remove NAME ...                            take them away at once

RUN is the directory of a run or service that is going on, on this host.

add: each ADDRESS:PORT is a `titan-rl worker`. First starts what had no room. Then a new host brings one generator, on
CUDA as many as it has devices for, up to placement.most_generators.
Whoever reaches a worker's port can run any code there: trusted networks only.
drain: a generator gets nothing new and finishes what it has; after router.drain_seconds the rest goes on elsewhere.
remove: requests go on elsewhere from the tokens that they have, also those of what is being drained.
A host's generators leave the fleet with it, down to placement.least_generators; everything else on it moves.
A command goes on if this program is ended.""",
    options={"--generators N": "how many to start; without it, as many as new hosts have room for, else 1"},
    takes_words=True,
    takes_settings=False,
)
