"""usage: {prog} RUN [RUN2 ...] [--output FILE] [--follow]

Write one HTML file that shows a run, or compares several: findings, curves, staleness and lengths, what every mesh did,
rollouts token by token, settings. It needs nothing else: no network, no server, no account. A run may still be going
on.

- No text of a run is HTML or script: all of it is packed data, and the page sets it as text only.
- A content security policy lets the page's own script run and nothing else, and forbids every request.
- What is large is thinned, and the page says so. Where not all rollouts fit, every step keeps some.
"""

import base64
import gzip
import hashlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.resources import files
from itertools import groupby, zip_longest
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from titan_rl import __version__
from titan_rl.directories import CONFIG, METRICS, is_going_on
from titan_rl.errors import ConfigError
from titan_rl.metrics.metric_table import metric_of
from titan_rl.metrics.rollout_record import ROLLOUTS, BranchRecord, RolloutRecord
from titan_rl.one_line import one_line
from titan_rl.overrides import Command, Verb
from titan_rl.view.findings import compare, findings
from titan_rl.view.read import ListedRollout, Run, read_run, rollout_at

REPORT = "report.html"
AGAIN_SECONDS = 15
"""Between two reports of a run that goes on."""
MOST_ROLLOUT_BYTES = 7_500_000
"""Of packed rollouts in a report, over all its runs; with everything else it stays below 10 MB."""
CHUNK = 100_000
"""Characters of JSON in a chunk of rollouts. Each is compressed by itself: the page opens those that are looked at, in
some milliseconds."""
MOST_POINTS = 1_000
"""Of a curve; a longer one is drawn by means over equally many steps."""
PREVIEW = 60
"""Characters of a text in the list of rollouts."""

TITLE = b"<title>titan_rl report</title>"
"""By which an earlier report is recognised."""
HEAD_BYTES = 2048

SCRIPTS = ("base.js", "head.js", "charts.js", "lanes.js", "browser.js", "tokens.js", "main.js")
LIBRARY = "uPlot.iife.min.js"
"""uPlot 1.6.32 from npm, MIT."""


def write_report(runs: Sequence[Path], output: Path, *, again: bool = False) -> Path:
    """Write the report of one run, or of several to compare; returns where it is. A browser that shows it looks for a
    newer one every `AGAIN_SECONDS`, if there will be one: `again`."""
    draft = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        with open(draft, "w", encoding="utf-8") as file:
            file.writelines(_page([read_run(directory) for directory in runs], again))
        draft.replace(output)
    finally:
        draft.unlink(missing_ok=True)
    return output


def _page(runs: Sequence[Run], again: bool) -> Iterator[str]:
    styles = _asset("vendor/uPlot.min.css") + _asset("page/style.css")
    script = "\n".join([_asset(f"vendor/{LIBRARY}"), *(_asset(f"page/{name}") for name in SCRIPTS)])
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    shown: list[dict[str, Any]] = []
    blocks: list[tuple[str, str]] = []
    for number, run in enumerate(runs):
        for chunk, (kept, block) in enumerate(_chunks(run, MOST_ROLLOUT_BYTES // len(runs))):
            blocks.append((f"rollouts-{number}-{chunk}", block))
            shown += [_row(rollout, number, chunk, place) for place, rollout in enumerate(kept)]
    head = _asset("page/page.html").replace("{{script-hash}}", f"sha256-{digest}").replace("{{style}}", styles)
    head = head.replace("{{again}}", f'<meta http-equiv="refresh" content="{AGAIN_SECONDS}">' * again)
    before, after = head.split("{{data}}")
    yield before
    yield _block("main", _packed(_json(_main(runs, len(shown)))))
    yield f"<script>{script}</script>\n"
    columns = {name: [row[name] for row in shown] for name in (shown[0] if shown else ())}
    yield _block("rollouts", _packed(_json(columns)))
    for name, block in blocks:
        yield _block(name, block)
    yield after


def _asset(name: str) -> str:
    return files("titan_rl.view").joinpath(name).read_text(encoding="utf-8")


def _block(name: str, data: str) -> str:
    return f'<script type="text/plain" id="data-{name}">{data}</script>\n'


def _main(runs: Sequence[Run], shown: int) -> dict[str, Any]:
    names = dict.fromkeys(name for run in runs for name in run.series)
    return {
        "version": __version__,
        "written": time.strftime("%Y-%m-%d %H:%M"),
        "runs": [_about(run) for run in runs],
        "findings": [[asdict(each) for each in findings(run)] for run in runs],
        "compared": [asdict(each) for each in compare(runs)],
        "metrics": {name: _meaning(name) for name in names},
        "series": {name: [_curve(run.series.get(name, {})) for run in runs] for name in names},
        "seconds": [_curve(run.seconds) for run in runs],
        "ages": [_ages(run) for run in runs],
        "timelines": [[asdict(each) for each in run.timelines] for run in runs],
        "settings": _settings(runs),
        "rollouts": {"shown": shown, "recorded": sum(run.recorded for run in runs)},
    }


def _about(run: Run) -> dict[str, Any]:
    return {
        "name": run.name,
        "directory": str(run.directory),
        "recipe": str(run.config.get("recipe", "")),
        "steps": run.steps,
        "wanted_steps": run.config.get("loop.steps"),
        "done": bool(run.summary),
        "stopped_early": str(run.summary.get("stopped_early") or ""),
        "seconds": _short(max([run.summary.get("seconds_total") or 0.0, *run.seconds.values()])),
        "tokens": sum(run.values("rollout/tokens")),
    }


def _meaning(name: str) -> dict[str, str]:
    metric = metric_of(name)
    if metric is None:
        return {}
    bad = metric.bad if metric.limit is None else metric.bad.replace("{limit}", f"{metric.limit:g}")
    return {"unit": metric.unit, "meaning": metric.meaning, "bad": bad, "do": metric.do}


def _curve(series: Mapping[int, float | None]) -> dict[str, Any]:
    """Steps and values; `of` is the number of steps of which each value is the mean."""
    entries = [*series.items()]
    of = -(-len(entries) // MOST_POINTS) or 1
    steps, values = [], []
    for at in range(0, len(entries), of):
        part = [value for _, value in entries[at : at + of] if value is not None]
        steps.append(entries[min(at + of, len(entries)) - 1][0])
        values.append(_short(sum(part) / len(part)) if part else None)
    return {"steps": steps, "values": values, "of": of}


def _ages(run: Run) -> list[float | None]:
    """Share of the trained samples by age in optimizer steps, mean over the steps."""
    ages: list[float | None] = []
    while values := run.values(f"staleness/share_of_age_{len(ages)}"):
        ages.append(_short(sum(values) / len(values)))
    return ages


def _settings(runs: Sequence[Run]) -> list[list[Any]]:
    """Every setting with its value in each run; None: the run has no such setting."""

    def text(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value, default=str)

    names = dict.fromkeys(name for run in runs for name in run.config)
    return [[name, *(text(run.config[name]) if name in run.config else None for run in runs)] for name in names]


def _short(value: float | None, digits: int = 5) -> float | None:
    """Significant digits that a reader can use; the run's files have all."""
    return None if value is None else float(f"{value:.{digits}g}")


# --- rollouts --------------------------------------------------------------------------------------------------------


def _chunks(run: Run, most_bytes: int) -> Iterator[tuple[list[ListedRollout], str]]:
    """Rollouts with their packed details, until `most_bytes` are full."""
    if not run.rollouts:
        return
    used = size = 0
    chunk: list[ListedRollout] = []
    details: list[str] = []
    key = attrgetter("evaluated", "step")  # the first of every step, then the second of every step, …
    steps = [[*those] for _, those in groupby(sorted(run.rollouts, key=key), key)]
    rollouts = [each for those in zip_longest(*steps) for each in those if each is not None]
    with open(run.directory / ROLLOUTS, "rb") as file:
        for number, each in enumerate(rollouts):
            chunk.append(each)
            details.append(_json(_detail(rollout_at(file, each))))
            size += len(details[-1])
            if size >= CHUNK or number == len(rollouts) - 1:
                block = _packed(f"[{','.join(details)}]")
                used += len(block)
                if used > most_bytes:
                    return
                yield chunk, block
                chunk, size, details = [], 0, []


def _row(rollout: ListedRollout, run: int, chunk: int, place: int) -> dict[str, Any]:
    return {
        **{name: getattr(rollout, name) for name in ("step", "group", "attempt", "sample")},
        "stop": rollout.stop_reason,
        "tokens": rollout.sampled_tokens,
        **{name: one_line(getattr(rollout, name), PREVIEW) for name in ("prompt", "answer", "wanted")},
        "error": one_line(f"{rollout.failure}: {rollout.error}", PREVIEW) if rollout.error else "",
        **{name: _short(getattr(rollout, name)) for name in ("advantage", "gap")},
        "reward": None if rollout.error else _short(rollout.reward),
        "evaluated": int(rollout.evaluated),
        "kept": " ".join(rollout.kept),
        "run": run,
        "chunk": chunk,
        "place": place,
    }


def _detail(record: RolloutRecord) -> dict[str, Any]:
    """What the page shows of one rollout when it is chosen."""
    return {
        "conversations": [*record.side_conversations, record.messages],
        "turns": msgspec.to_builtins(record.turns),
        "parts": {name: value if math.isfinite(value) else None for name, value in record.reward_parts.items()},
        "branches": [*map(_branch, record.branches)],
    }


def _branch(branch: BranchRecord) -> dict[str, Any]:
    none = [None] * len(branch.token_ids)
    generator, trainer = branch.logprobs or none, branch.trainer_logprobs or none
    return {
        "ids": branch.token_ids,
        "texts": branch.texts or [],
        "trained": branch.trained,
        "logprobs": [_short(value, 4) for value in generator],
        "gaps": [None if a is None or b is None else _short(b - a, 3) for a, b in zip(generator, trainer, strict=True)],
        "weights": [_short(value, 4) for value in branch.weights or ()],
        "versions": branch.versions or [],
        "advantages": branch.advantages,
    }


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _packed(text: str) -> str:
    """JSON as data inside HTML, whose letters can neither end a script element nor begin one, whatever a policy wrote.
    The inverse is `unpack` in page/base.js."""
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), compresslevel=6, mtime=0)).decode("ascii")


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
            if TITLE not in there.read(HEAD_BYTES):
                raise ConfigError(
                    f"{where} is there and is no report: it is not replaced; name another file, --output FILE"
                )
    runs = [run.resolve() for run in runs]
    try:
        with suppress(KeyboardInterrupt):
            while "--follow" in command.flags and any(map(is_going_on, runs)):
                print(write_report(runs, where, again=True))
                time.sleep(AGAIN_SECONDS)
        print(write_report(runs, where))
    except OSError as error:
        raise ConfigError(f"{where} cannot be written: {error.strerror or error}") from error
    return 0


VERB = Verb(
    act=_act,
    about=__doc__,
    options={
        "--output FILE": f"where to; RUN/{REPORT}, of several runs ./{REPORT}, without it. A file that is no report is "
        "not replaced",
        "--follow": f"write it again every {AGAIN_SECONDS} seconds while the run goes on; a browser shows the newest",
    },
    takes_words=True,
    takes_settings=False,
)
