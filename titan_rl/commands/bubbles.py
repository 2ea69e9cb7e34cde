"""`titan-rl bubbles RUN`: which mesh waited for whom. Writes the run's trace too, where it has none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from titan_rl.errors import ConfigError
from titan_rl.overrides import Command, Verb

ABOUT = """
usage: {prog} RUN [--json]

Show what share of the time from the first step to the last each mesh worked, and for whom it waited else.
RUN is a run directory, of a run that has ended or goes on. The whole timeline is in RUN/trace.json.gz, which is written
now if it lacks something: open it at https://ui.perfetto.dev."""

OPTIONS = {"--json": "print one JSON object; `busy`, `idle` and `waits` are shares"}


def main(argv: Sequence[str], *, prog: str) -> int:
    """Returns the exit code."""
    names = [word for word in argv if not word.startswith("-")]

    def act(command: Command, prog: str) -> int:
        if len(names) != 1:
            raise ConfigError("say which run: its directory")
        print(described(Path(names[0]), as_json="--json" in command.flags))
        return 0

    rest = [word for word in argv if word.startswith("-")]
    return Verb(act=act, about=ABOUT, options=OPTIONS).run(rest, prog=prog)


def described(run: Path, *, as_json: bool = False) -> str:
    """What is told of a run. Raises ConfigError if it has no timelines."""
    from titan_rl.observability.bubbles import find_bubbles
    from titan_rl.observability.spans import read_spans
    from titan_rl.observability.timeline import SPANS
    from titan_rl.observability.trace import TRACE, write_trace

    if not (run / SPANS).is_dir():
        raise ConfigError(f"{run} has no timelines ({SPANS}/): it is no run directory, or logging.spans was off")
    found = find_bubbles(read_spans(run))
    newest = max(file.stat().st_mtime for file in (run / SPANS).iterdir())
    if not (run / TRACE).exists() or (run / TRACE).stat().st_mtime < newest:
        write_trace(run)
    if as_json:
        return json.dumps(found.to_json(), indent=2)
    width = max(len(each.mesh) for each in found.meshes)
    lines = [f"{'mesh'.ljust(width)}   busy   idle   waited for"]
    for each in found.meshes:
        waits = ", ".join(
            f"{cause} {share:.0%} ({share * found.seconds:.1f} s)"
            for cause, share in each.waits.items()
            if share >= LEAST_SHARE
        )
        lines.append(f"{each.mesh.ljust(width)}  {each.busy:5.0%}  {each.idle:5.0%}   {waits}")
    return "\n".join([*lines, "", found.sentence(), f"timeline: {run / TRACE}, for https://ui.perfetto.dev"])


LEAST_SHARE = 0.005
"""Shorter waits are not listed."""
