"""What a person sees while a run goes on: a live panel in a terminal, one plain line per step elsewhere.

The display only shows what it is told and never changes the run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from titan_rl.observability.activity import Span
from titan_rl.one_line import one_line

PLAIN_LINE_SECONDS = 2.0
"""Seconds between two step lines outside a terminal. Evaluations are always printed."""
FAILURE_LINE_SECONDS = 10.0
"""Seconds between two lines about failures while no step line reports them."""
LONGEST_CAUSE = 160
"""Characters of a failure's cause. The logs have all of it."""

_log = logging.getLogger(__name__)


class RunDisplay:
    """The display of one run.

    The controller calls `mesh(name, doing)` during the start, then `failed`, `step` and `evaluation`. As a sink of
    `Activities` it also shows open spans.
    """

    def __init__(
        self, *, steps: int, live: bool, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console or Console()
        self._clock = clock
        self._steps = steps
        self._live = live and self._console.is_terminal
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._progress.add_task("training", total=steps)
        self._meshes: dict[str, str] = {}
        self._numbers: dict[str, str] = {}
        self._doing: dict[str, dict[Span, None]] = {}  # open spans by name
        self._failures = 0  # since they were last printed
        self._first_failure = ""
        self._last_line = float("-inf")
        self._panel: Live | None = None

    def __enter__(self) -> RunDisplay:
        if self._live:
            self._panel = Live(get_renderable=self.render, console=self._console, refresh_per_second=4)
            self._panel.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._panel is not None:
            self._panel.stop()
            self._panel = None

    def say(self, text: str, level: int = logging.INFO) -> None:
        """One line that stays, on the console and in the log."""
        _log.log(level, "%s", text)
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def mesh(self, name: str, doing: str) -> None:
        """What a mesh is doing now, such as `("trainer", "train step 12")`."""
        self._meshes[name] = doing

    def began(self, span: Span) -> None:
        """Show a span until it ends."""
        if span.waits_for is None:
            self._doing.setdefault(span.name, {})[span] = None

    def ended(self, span: Span) -> None:
        if span.waits_for is None:
            del self._doing[span.name][span]

    def failed(self, rollouts: int, cause: str) -> None:
        """Count failed rollouts, with the cause of the first. They are printed with the next step's line, or after
        `FAILURE_LINE_SECONDS` without one: if all rollouts fail there is no step."""
        self._failures += rollouts
        self._first_failure = self._first_failure or one_line(cause, LONGEST_CAUSE)
        if self._clock() - self._last_line >= FAILURE_LINE_SECONDS and (failures := self._told_failures()):
            self._last_line = self._clock()
            self.say(failures)

    def _told_failures(self) -> str:
        """Failures since the last call; empty if there were none."""
        count, cause, self._failures, self._first_failure = self._failures, self._first_failure, 0, ""
        return f"failed rollouts: {count}, the first: {cause}" if count else ""

    def step(self, step: int, numbers: Mapping[str, str], phases: Mapping[str, float]) -> None:
        """A finished optimizer step: its numbers by name, and the seconds of its phases."""
        timing = " ".join(f"{name} {1000 * value:.0f}" for name, value in phases.items())
        self._progress.update(self._task, completed=step)
        self._numbers |= {**numbers, "ms per phase": timing}
        if self._clock() - self._last_line < PLAIN_LINE_SECONDS and step != self._steps:
            return
        failures = self._told_failures()
        if not self._live or failures:
            self._last_line = self._clock()
            said = "  ".join(f"{name} {value}" for name, value in numbers.items())
            self.say("  ".join(filter(None, (f"step {step:>4}/{self._steps}  {said}  [ms: {timing}]", failures))))

    def evaluation(self, step: int, exact_match: float, reward: float, transcripts: Sequence[str] = ()) -> None:
        """A finished evaluation, with lines that show what was said."""
        self._numbers["exact match"] = f"{exact_match:.3f} (step {step})"
        self.say(f"held-out after step {step}: exact match {exact_match:.3f}, reward {reward:.3f}")
        for transcript in transcripts:
            self.say(f"  {transcript}")

    def render(self) -> RenderableType:
        """The panel as it is now. Called by the panel's own thread, several times a second."""
        doing = {}
        for name, spans in self._doing.copy().items():
            at_once = list(spans)
            doing[name] = f"{at_once[-1]}" if len(at_once) == 1 else f"{len(at_once)} at once" if at_once else "idle"
        table = Table.grid(padding=(0, 2))
        for name, value in (self._numbers | self._meshes | doing).items():
            table.add_row(f"[dim]{name}", value)
        return Group(self._progress, table)
