"""Runs a function on every rank of a small generator, each rank a fresh process with a generator's environment.

As a program: `python rank_processes.py MODULE:FUNCTION ARGUMENTS.pickle RESULT.pickle`.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from titan_rl.generation.config import generator_environment
from titan_rl.processes import OWNER, RENDEZVOUS

BOUND = 240.0
"""Seconds after which a scenario fails."""


def run_on_ranks(function: str, ranks: int, *, deterministic: bool = False, **arguments: Any) -> list[Any]:
    """What `function(**arguments)` returned on each rank, in the environment of a (deterministic) generator."""
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory() as scratch:
        given = Path(scratch) / "arguments.pickle"
        given.write_bytes(pickle.dumps(arguments))
        processes = []
        for rank in range(ranks):
            rendezvous = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                RENDEZVOUS: str(Path(scratch) / "rendezvous"),
                OWNER: str(os.getpid()),
                "PYTHONPATH": os.pathsep.join([str(here.parents[1]), str(here)]),
            }
            log = open(Path(scratch) / f"{rank}.log", "w+")  # noqa: SIM115 (lives as long as the process)
            command = [sys.executable, __file__, function, str(given), str(Path(scratch) / f"{rank}.pickle")]
            environment = os.environ | generator_environment("cpu", deterministic=deterministic) | rendezvous
            processes.append((subprocess.Popen(command, env=environment, stdout=log, stderr=log), log))
        try:
            codes = [process.wait(timeout=BOUND) for process, _ in processes]
        finally:
            for process, _ in processes:
                process.kill()
        logs = []
        for _, log in processes:
            log.seek(0)
            logs.append(log.read()[-4000:])
            log.close()
        assert not any(codes), f"exit codes {codes}\n" + "\n----\n".join(logs)
        return [pickle.loads((Path(scratch) / f"{rank}.pickle").read_bytes()) for rank in range(ranks)]


def main() -> None:
    target, given, result = sys.argv[1:]
    module, _, name = target.partition(":")
    outcome = getattr(importlib.import_module(module), name)(**pickle.loads(Path(given).read_bytes()))
    Path(result).write_bytes(pickle.dumps(outcome))
    sys.stdout.flush()
    os._exit(0)  # a scenario may leave a broken process group behind, which an orderly exit would wait for


if __name__ == "__main__":
    main()
