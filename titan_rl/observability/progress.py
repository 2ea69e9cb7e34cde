"""What a person sees while a run goes on: a live panel in a terminal, one plain line per step elsewhere.

The display only reads what it is told; a display that is off changes nothing about the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from titan_rl.one_line import one_line

PLAIN_LINE_SECONDS = 2.0
"""Outside a terminal at most one step line per so many seconds; evaluations are always printed."""
FAILURE_LINE_SECONDS = 10.0
"""Failures are told once per so many seconds where no step line tells them."""
LONGEST_CAUSE = 160
"""Characters of a failure's cause; logs have all of it."""


class RunDisplay:
    """The display of one run.

    Told by the controller: `mesh(name, doing)` while parts come up, then `phase`, `failed`, `step` and `evaluation`.
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
        self._phase_seconds: dict[str, float] = {}
        self._failures = 0  # since they were last printed
        self._first_failure = ""
        self._last_line = float("-inf")
        self._panel: Live | None = None

    def __enter__(self) -> RunDisplay:
        if self._live:
            self._panel = Live(self._render(), console=self._console, refresh_per_second=4)
            self._panel.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._panel is not None:
            self._panel.update(self._render())
            self._panel.stop()
            self._panel = None

    def say(self, text: str) -> None:
        """One line that stays."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def mesh(self, name: str, doing: str) -> None:
        """What a mesh is doing now, such as `("trainer", "train step 12")`."""
        self._meshes[name] = doing
        self._refresh()

    @contextmanager
    def phase(self, name: str, doing: Mapping[str, str]) -> Iterator[None]:
        """Times one phase of a step and shows who works at it; seconds are available from `phase_seconds`.

        Args:
            doing: mesh → what it does during the phase; all others are shown as idle.
        """
        for mesh in {**self._meshes, **doing}:
            self._meshes[mesh] = doing.get(mesh, "idle")
        self._refresh()
        started = self._clock()
        try:
            yield
        finally:
            self._phase_seconds[name] = self._clock() - started

    def phase_seconds(self) -> dict[str, float]:
        """Seconds per phase since the last call."""
        seconds, self._phase_seconds = self._phase_seconds, {}
        return seconds

    def failed(self, rollouts: int, cause: str) -> None:
        """So many rollouts failed, the first for this reason. Printed with the next step's line, and without one every
        `FAILURE_LINE_SECONDS`: where all fail there is no step."""
        self._failures += rollouts
        self._first_failure = self._first_failure or one_line(cause, LONGEST_CAUSE)
        if self._clock() - self._last_line >= FAILURE_LINE_SECONDS and (failures := self._told_failures()):
            self._last_line = self._clock()
            self.say(failures)

    def _told_failures(self) -> str:
        """What failed since this was last asked; empty where nothing did."""
        count, cause, self._failures, self._first_failure = self._failures, self._first_failure, 0, ""
        return f"failed rollouts: {count}, the first: {cause}" if count else ""

    def step(self, step: int, numbers: Mapping[str, str], phases: Mapping[str, float]) -> None:
        """A finished optimizer step: its numbers by name, and the seconds of its phases."""
        timing = " ".join(f"{name} {1000 * value:.0f}" for name, value in phases.items())
        self._progress.update(self._task, completed=step)
        self._numbers |= {**numbers, "ms per phase": timing}
        self._refresh()
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
        self._refresh()
        self.say(f"held-out after step {step}: exact match {exact_match:.3f}, reward {reward:.3f}")
        for transcript in transcripts:
            self.say(f"  {transcript}")

    def _refresh(self) -> None:
        if self._panel is not None:
            self._panel.update(self._render())

    def _render(self) -> RenderableType:
        numbers = Table.grid(padding=(0, 2))
        for name, value in self._numbers.items():
            numbers.add_row(f"[dim]{name}", value)
        meshes = Table.grid(padding=(0, 2))
        for name, doing in self._meshes.items():
            meshes.add_row(f"[dim]{name}", doing)
        return Group(self._progress, numbers, meshes)
