"""`titan-rl bubbles RUN`: which mesh waited for whom. Writes the run's trace too, where it has none."""

from __future__ import annotations

import json
from pathlib import Path

from titan_rl.errors import ConfigError
from titan_rl.overrides import Command, Verb

LEAST_SHARE = 0.005
"""Shorter waits are not listed."""


def _act(command: Command, prog: str) -> int:
    print(described(Path(command.word("run: its directory")), as_json="--json" in command.flags))
    return 0


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


VERB = Verb(
    act=_act,
    about="""
usage: {prog} RUN [--json]

Show what share of the time from the first step to the last each mesh worked, and for whom it waited else.
RUN is a run directory, of a run that has ended or goes on. The whole timeline is in RUN/trace.json.gz, which is written
now if it lacks something: open it at https://ui.perfetto.dev.""",
    options={"--json": "print one JSON object; `busy`, `idle` and `waits` are shares"},
    takes_words=True,
    takes_settings=False,
)
