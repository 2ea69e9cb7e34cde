"""What a person sees while a run goes on: a live panel in a terminal, one plain line per step elsewhere.

    step 137/400 ━━━━━━━━━━━━━━━━━━━━━━━━━━━━╺━━━━━━━━━━━━━━━━ 0:01:15 · 0:01:12 left
    reward 0.812 ▁▂▃▅▆▇   held-out 0.750 (step 100)   tokens/s 1,934

    trainer     train step 138                                  ██████░░  71%
    generator0  serving v137, 12 requests                       ████████  98%
    rollouts    16 groups

The display only shows what it is told and never changes the run. Rows do not come and go with the work, so nothing
jumps.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from titan_rl.metrics.rollout_record import Failed
from titan_rl.metrics.timeline import Span
from titan_rl.one_line import counted, one_line
from titan_rl.types import FailureKind

READY = "ready"
LOST = "lost"
WARNINGS = 3
"""That the panel keeps in sight."""
PLAIN_LINE_SECONDS = 2.0
"""Seconds between two step lines outside a terminal. Evaluations are always printed."""
FAILURE_LINE_SECONDS = 10.0
"""Seconds between two lines about failures while no step line reports them."""
LONGEST_CAUSE = 160
"""Characters of a failure's cause. The logs have all of it."""
MOST_CAUSES = 2
"""Causes of failures that one line names."""
PACE_SECONDS = 3600.0
"""The time that is left is estimated by the steps of the last so many seconds, of which one may take half an hour."""

_OF_TRAINER = ("train", "publish", "checkpoint", "warm_up", "restore")
"""Spans of the trainer's work."""
_FIRST = ("reward", "held-out", "staleness", "tokens/s")
"""Numbers that are shown before others, in this order."""
_BARS = "▁▂▃▄▅▆▇█"
_CURVE, _METER, _WIDEST = 16, 8, 100
"""Characters of the curve of rewards, a mesh's meter and a mesh's line, whose meter so stays near its name."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class MeshState:
    doing: str
    since: float
    """When its start began."""
    took: float | None = None
    """Seconds that its start took; None: it is starting."""


class RunDisplay:
    """The display of one run.

    The controller calls `mesh(name, doing)` whenever it knows what a mesh does, then `follow`, `add_group`, `step` and
    `evaluation`.
    """

    def __init__(
        self, *, steps: int, live: bool, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console or Console()
        self._clock = clock
        self._live = live and self._console.is_terminal
        self._steps = steps
        columns = (TextColumn("[bold]step {task.completed}/{task.total}"), BarColumn(None), TimeElapsedColumn())
        left = (TextColumn("·"), TimeRemainingColumn(), TextColumn("left"))
        self._progress = Progress(*columns, *left, expand=True, get_time=clock, speed_estimate_period=PACE_SECONDS)
        self._training_steps = self._progress.add_task("", total=steps)
        self._began = clock()
        self._numbers: dict[str, str] = {}
        self._rewards: list[float] = []
        self._phases: dict[str, float] = {}  # seconds of the last step
        self._meshes: dict[str, MeshState] = {}
        self._busy: dict[str, float] = {}  # by mesh, the share of its time in which it works, 0..1
        self._warnings: deque[tuple[float, str]] = deque(maxlen=WARNINGS)
        self._spans: Mapping[Span, None] | None = None  # that are open; None: the start is not over
        self._groups = self._groups_failed = 0  # since failures were last printed
        self._failures: Counter[Failed] = Counter()  # since then
        self._last_line = float("-inf")
        self._panel = Live(get_renderable=self.render, console=self._console, refresh_per_second=4)

    def __enter__(self) -> "RunDisplay":
        if self._live:
            self._panel.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._panel.stop()

    def print_line(self, text: str, level: int = logging.INFO) -> None:
        """One line that stays, on the console and in the log. Warnings stay in the panel for a while too."""
        _log.log(level, "%s", text)
        if level >= logging.WARNING:
            self._warnings.append((self._clock(), one_line(text, LONGEST_CAUSE)))
        self._console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def mesh(self, name: str, doing: str) -> None:
        """What a mesh is doing now, such as `("generator0", "building the engine")`. Its start is over when it is
        `READY`. Empty: it is not there any more."""
        if not doing:
            self._meshes.pop(name, None)
            return
        now = self._clock()
        mesh = self._meshes.get(name)
        if mesh is None or mesh.doing == LOST:
            mesh = self._meshes[name] = MeshState(doing, now)
        mesh.doing = doing
        if doing == READY and mesh.took is None:
            mesh.took = now - mesh.since

    def follow(self, spans: Mapping[Span, None]) -> None:
        """The start is over. `spans`: those that are open, now and later."""
        self._spans = spans

    def add_group(self, failures: Sequence[Failed]) -> None:
        """Count a group that was played, and its rollouts that failed. They are printed with the next step's line, or
        after `FAILURE_LINE_SECONDS` without one: if all rollouts fail there is no step."""
        self._groups += 1
        self._groups_failed += bool(failures)
        self._failures.update(failures)
        if self._clock() - self._last_line >= FAILURE_LINE_SECONDS and (told := self._take_failures()):
            self._last_line = self._clock()
            self.print_line(told, logging.WARNING)

    def step(
        self,
        step: int,
        numbers: Mapping[str, str],
        phases: Mapping[str, float],
        *,
        reward: float | None = None,
        busy: Mapping[str, float] | None = None,
    ) -> None:
        """A finished optimizer step: its numbers as they are shown, seconds by phase, the reward for the curve, and by
        mesh the share of its time in which it worked."""
        now = self._clock()
        self._progress.update(self._training_steps, completed=step)
        self._phases = dict(phases)
        self._numbers |= numbers
        self._busy |= busy or {}
        if reward is not None:
            self._rewards.append(reward)
        if now - self._last_line < PLAIN_LINE_SECONDS and step != self._steps:
            return
        failures = self._take_failures()
        if not self._live or failures:
            self._last_line = now
            values = "  ".join(f"{name} {value}" for name, value in numbers.items())
            timing = " ".join(f"{name} {1000 * value:.0f}" for name, value in phases.items())
            left = self._progress.tasks[0].time_remaining
            until = f"  {timedelta(seconds=left)} left" if left else ""
            line = f"step {step:>4}/{self._steps}  {values}  [ms: {timing}]{until}"
            self.print_line("  ".join(filter(None, (line, failures))), logging.WARNING if failures else logging.INFO)

    def evaluation(self, step: int, exact_match: float, reward: float, transcripts: Sequence[str] = ()) -> None:
        """A finished evaluation, with lines that show what was answered."""
        self._numbers["held-out"] = f"{exact_match:.3f} (step {step})"
        self.print_line(f"held-out after step {step}: exact match {exact_match:.3f}, reward {reward:.3f}")
        for transcript in transcripts:
            self.print_line(f"  {transcript}")

    def _take_failures(self) -> str:
        """Failures since the last call; empty if there were none. Time-outs are named last: they may have waited for
        others."""
        causes = sorted(self._failures.items(), key=lambda each: (each[0][0] is FailureKind.TIMEOUT, -each[1]))
        named = [f"{count} × {kind}: {one_line(cause, LONGEST_CAUSE)}" for (kind, cause), count in causes[:MOST_CAUSES]]
        more = [f"{sum(count for _, count in rest)} of other causes"] if (rest := causes[MOST_CAUSES:]) else []
        failed = self._failures.total()
        groups = f"in {self._groups_failed} of the {self._groups} groups played"
        self._groups = self._groups_failed = 0
        self._failures.clear()
        return f"failed rollouts: {failed}, {groups}: {'; '.join(named + more)}" if failed else ""

    # --- the panel ---------------------------------------------------------------------------------------------------

    def render(self) -> RenderableType:
        """The panel as it is now. Called by the panel's own thread, several times a second. Never raises."""
        try:
            return self._draw(self._clock())
        except Exception as error:
            return Text(f"the panel cannot be drawn: {type(error).__name__}: {error}", style="red")

    def _draw(self, now: float) -> RenderableType:
        """What the event loop changes meanwhile is copied before it is looped over."""
        starting = Text.assemble(("starting", "bold"), f"  {timedelta(seconds=int(now - self._began))}")
        training = self._spans is not None
        parts = [self._progress.get_renderable() if training else starting]
        if numbers := self._numbers.copy():
            first = {name: numbers[name] for name in _FIRST if name in numbers}
            parts.append(Columns([self._number(*each) for each in (first | numbers).items()], padding=(0, 3)))
        meshes = self._meshes.copy()
        width = max(map(len, ("last step", *meshes)))
        parts.append(Padding(Constrain(self._table(meshes, now, width), _WIDEST), (int(training), 0, 0, 0)))
        if self._phases:
            spent = self._phases.items()
            timing = ", ".join(f"{name} {1000 * s:.0f} ms" if s < 1 else f"{name} {s:.1f} s" for name, s in spent)
            parts.append(Text(f"{'last step':<{width}}  {timing}", style="dim", overflow="ellipsis", no_wrap=True))
        for at, text in self._warnings.copy():
            line = f"{timedelta(seconds=int(now - at))} ago  {text}"
            parts.append(Text(line, style="yellow", overflow="ellipsis", no_wrap=True))
        return Group(*parts)

    def _number(self, name: str, value: str) -> Text:
        text = Text.assemble((name, "dim"), " ", (value, "bold"), no_wrap=True)
        return text.append(f" {curve(self._rewards):<{_CURVE}}", "cyan") if name == "reward" else text

    def _table(self, meshes: Mapping[str, MeshState], now: float, width: int) -> RenderableType:
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(no_wrap=True, width=width)
        table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        table.add_column(no_wrap=True, justify="right")
        idle, work, training = [], self._work(), self._spans is not None
        for name, mesh in meshes.items():
            share = self._busy.get(name)
            doing = work.get(name, mesh.doing)
            if training and mesh.took is not None and doing == READY and share is None:
                idle.append(name)
                continue
            last = "" if share is None else _meter(share)
            if mesh.took is None:
                last = f"{now - mesh.since:.0f} s"
            elif not training:
                last = f"{mesh.took:.0f} s"
            starts = "yellow" if mesh.took is None else "green" if mesh.doing == READY else ""
            table.add_row(Text(name, style="dim"), Text(doing, style="red" if mesh.doing == LOST else starts), last)
        for name, doing in work.items():
            if name not in meshes:
                table.add_row(Text(name, style="dim"), doing, "")
        if idle:
            table.add_row(Text(READY, style="dim"), Text(", ".join(idle), style="dim"), "")
        return table

    def _work(self) -> dict[str, str]:
        """What goes on in the parts that are no single mesh, or whose work the controller knows best, by open spans."""
        if self._spans is None:
            return {}
        spans = [*self._spans]
        trains = [each for each in spans if each.waits_for is None and each.name in _OF_TRAINER]
        waits = [each.waits_for for each in spans if each.waits_for is not None and each.name == "trainer"]
        groups = sum(each.name == "rollout" for each in spans)
        plays = [counted(groups, "group")] if groups else []
        plays += [f"evaluate {each.ids.get('version', '')}" for each in spans if each.name == "evaluate"]
        pulls = [f"generators pull {each.ids.get('version', '')}" for each in spans if each.name == "pull"]
        idle = f"waits for {waits[0]()}" if waits else "waits"
        return {
            "trainer": f"{trains[-1].name} {trains[-1]}" if trains else idle,
            "rollouts": ", ".join(plays) or "wait",
            "weights": ", ".join(pulls) or "up to date",
        }


def curve(values: Sequence[float]) -> str:
    """Numbers as a line of bars, between the least and the largest; of more than `_CURVE` the means of neighbours."""
    count = min(_CURVE, len(values))
    parts = [values[len(values) * place // count : len(values) * (place + 1) // count] for place in range(count)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def _meter(share: float) -> Text:
    full = round(min(1.0, max(0.0, share)) * _METER)
    return Text.assemble(("█" * full, "cyan"), ("░" * (_METER - full), "dim"), f" {share:4.0%}")
