"""`titan-rl report RUN [RUN2 ...] [--output FILE]`: one HTML file that shows a run, or compares several."""

from __future__ import annotations

from pathlib import Path

from titan_rl.errors import ConfigError
from titan_rl.overrides import Command, Verb
from titan_rl.report.page import REPORT, write_report
from titan_rl.report.read import CONFIG, METRICS

TITLE = b"<title>titan_rl report</title>"
"""By which an earlier report is recognised."""
_HEAD_BYTES = 2048


def _act(command: Command, prog: str) -> int:
    runs = [Path(word) for word in command.words]
    if not runs:
        raise ConfigError("say which runs: their directories")
    for run in runs:
        if not any((run / name).is_file() for name in (CONFIG, METRICS)):
            raise ConfigError(f"{run} is no run directory: it has neither {CONFIG} nor {METRICS}")
    output = command.values.get("--output")
    where = Path(output) if output else runs[0] / REPORT if len(runs) == 1 else Path(REPORT)
    if where.is_file():
        with open(where, "rb") as there:
            if TITLE not in there.read(_HEAD_BYTES):
                raise ConfigError(
                    f"{where} is there and is no report: it is not replaced; name another file, --output FILE"
                )
    try:
        print(write_report([run.resolve() for run in runs], where))
    except OSError as error:
        raise ConfigError(f"{where} cannot be written: {error.strerror or error}") from error
    return 0


VERB = Verb(
    act=_act,
    about="""
usage: {prog} RUN [RUN2 ...] [--output FILE]

Write one HTML file that shows a run, or compares several: findings, curves, staleness and lengths, what every mesh did,
rollouts token by token, settings. It needs no network. A run may still be going on.""",
    options={
        "--output FILE": f"where to; RUN/{REPORT}, of several runs ./{REPORT}, without it. A file that is no report is "
        "not replaced"
    },
    takes_words=True,
    takes_settings=False,
)
