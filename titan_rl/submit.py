"""`titan-rl launch KIND --nodes N … -- ARGUMENTS`: submits `titan-rl train ARGUMENTS` as a job of a scheduler."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from titan_rl import train
from titan_rl.errors import ConfigError
from titan_rl.overrides import EXIT_USAGE, Command, Verb, apply, print_error
from titan_rl.run.jobs import TRUSTED, KubernetesConfig, SlurmConfig, Start

KINDS: dict[str, tuple[type[SlurmConfig | KubernetesConfig], str]] = {
    "slurm": (SlurmConfig, "a batch job; goes on after preemption, requeue and the end of its time"),
    "kubernetes": (KubernetesConfig, "an indexed Job with its Service and NetworkPolicy; not tested on a cluster yet"),
}
_TRUSTED, _DRY_RUN = train.TRUSTED, "--dry-run"
_OF_THE_JOB = {"--resume", _DRY_RUN, "--help", "placement.hosts", "placement.trusted_network"}


def main(arguments: Sequence[str], *, prog: str) -> int:
    """Submit what the arguments say; returns the exit code."""
    kind, *words = arguments or ("--help",)
    if kind in ("-h", "--help"):
        print(f"usage: {prog} KIND --nodes N --trusted-network [OPTIONS] -- ARGUMENTS\n")
        print("Submit `titan-rl train ARGUMENTS` as a job that goes on by itself when it is started again.\n")
        print("\n".join(f"  {name:<12}{text}" for name, (_, text) in KINDS.items()))
        print(f"\n`{prog} KIND --help` lists the options. {TRUSTED}")
        return 0 if arguments else EXIT_USAGE
    if kind not in KINDS:
        print_error(prog, f"there is no kind {kind!r}; there are {', '.join(KINDS)}")
        return EXIT_USAGE
    config, about = KINDS[kind]
    cut = words.index("--") if "--" in words else len(words)
    verb = Verb(
        act=lambda command, prog: _submit(command, words[cut + 1 :], config),
        config=lambda command: config(),
        about=f"usage: {{prog}} --nodes N {_TRUSTED} [OPTIONS] -- ARGUMENTS\n\n{kind}: {about}.\n{TRUSTED}",
        options={_TRUSTED: "needed for more than one node", _DRY_RUN: "print the script or manifest, and do nothing"},
    )
    return verb.run(words[:cut], prog=f"{prog} {kind}")


def _submit(command: Command, words: Sequence[str], kind: type[SlurmConfig | KubernetesConfig]) -> int:
    job = apply(kind(), command.layers)
    if missing := [f"--{name} {name.upper()}" for name in job.required if not getattr(job, name)]:
        raise ConfigError(f"name {' and '.join(missing)}")
    if job.nodes > 1 and _TRUSTED not in command.flags:
        raise ConfigError(
            f"--nodes {job.nodes}: whoever reaches a port of the run can run any code on its nodes: add {_TRUSTED} if "
            "that is only people whom you trust"
        )
    asked = train.VERB.read(words)
    if taken := sorted(_OF_THE_JOB & {*asked.flags, *asked.values, *asked.given}):
        raise ConfigError(f"after --, leave out {', '.join(taken)}: the job decides that by itself")
    config, _ = train.resolve(asked)
    name = f"{job.name or config.logging.name or config.recipe.rpartition(':')[2]}-{datetime.now():%Y%m%d-%H%M%S}"
    start = Start(name, Path(config.logging.directory) / name, tuple(words))
    if _DRY_RUN in command.flags:
        print(job.text(start), end="")
        return 0
    program, *rest = job.program
    if shutil.which(program) is None:
        raise ConfigError(f"there is no {program} on this machine; {_DRY_RUN} prints what it would be given")
    file = job.file(start)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(job.text(start))
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from error
    done = subprocess.run([program, *rest, str(file)], capture_output=True, text=True)
    if done.returncode != 0:
        raise ConfigError(f"{program} refuses {file}: {done.stderr or done.stdout}")
    print(f"{done.stdout.strip()}\nsubmitted: {file}\nthe run will be below {start.directory}")
    return 0
