"""What a person sees while a run goes on: a live panel in a terminal, one plain line per step elsewhere.

The display only shows what it is told and never changes the run.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from titan_rl.observability.activity import Span
from titan_rl.observability.display.panel import LOST, READY, MeshState, View, draw
from titan_rl.one_line import counted, one_line

PLAIN_LINE_SECONDS = 2.0
"""Seconds between two step lines outside a terminal. Evaluations are always printed."""
FAILURE_LINE_SECONDS = 10.0
"""Seconds between two lines about failures while no step line reports them."""
LONGEST_CAUSE = 160
"""Characters of a failure's cause. The logs have all of it."""
MOST_CAUSES = 2
"""Causes of failures that one line names."""
_PROMPT = re.compile(r"prompt \d+")
PACE_STEPS = 50
"""Newest steps by which the time that is left is estimated."""

_OF_TRAINER = ("train", "publish", "checkpoint", "warm_up", "restore")
"""Spans of the trainer's work."""

_log = logging.getLogger(__name__)


class RunDisplay:
    """The display of one run.

    The controller calls `mesh(name, doing)` whenever it knows what a mesh does, then `played`, `step` and `evaluation`.
    As a sink of `Activities` it also shows open spans.
    """

    def __init__(
        self,
        *,
        steps: int,
        live: bool,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console()
        self._clock = clock
        self._live = live and self._console.is_terminal
        self._view = View(steps=steps, began=clock())
        self._paces: deque[tuple[float, int]] = deque(maxlen=PACE_STEPS)  # when which step was finished
        self._spans: dict[Span, None] = {}
        self._groups = self._groups_failed = 0  # since failures were last printed
        self._errors: dict[str, tuple[str, int]] = {}  # an example and a count of each cause
        self._late: dict[str, tuple[str, int]] = {}
        self._last_line = float("-inf")
        self._panel = Live(get_renderable=self.render, console=self._console, refresh_per_second=4)

    def __enter__(self) -> RunDisplay:
        if self._live:
            self._panel.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._panel.stop()

    def say(self, text: str, level: int = logging.INFO) -> None:
        """One line that stays, on the console and in the log. Warnings stay in the panel for a while too."""
        _log.log(level, "%s", text)
        if level >= logging.WARNING:
            self._view.warnings.append((self._clock(), one_line(text, LONGEST_CAUSE)))
        self._console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def mesh(self, name: str, doing: str) -> None:
        """What a mesh is doing now, such as `("generator0", "building the engine")`. Its start is over when it is
        `READY`. Empty: it is not there any more."""
        if not doing:
            self._view.meshes.pop(name, None)
            return
        now = self._clock()
        mesh = self._view.meshes.get(name)
        if mesh is None or mesh.doing == LOST:
            mesh = self._view.meshes[name] = MeshState(doing, now)
        mesh.doing = doing
        if doing == READY and mesh.took is None:
            mesh.took = now - mesh.since

    def began(self, span: Span) -> None:
        """Show a span until it ends."""
        self._view.training = True
        self._spans[span] = None

    def ended(self, span: Span) -> None:
        del self._spans[span]

    def played(self, errors: Sequence[str], late: Sequence[str] = ()) -> None:
        """Count a group that was played, and its rollouts that failed. They are printed with the next step's line, or
        after `FAILURE_LINE_SECONDS` without one: if all rollouts fail there is no step.

        Args:
            errors: of the failed rollouts, but those that ran out of time.
            late: of those. They are told last, because they may have waited for others.
        """
        self._groups += 1
        self._groups_failed += bool(errors or late)
        for causes, those in ((self._errors, errors), (self._late, late)):
            for error in those:
                known = _PROMPT.sub("", error)  # the same error of other prompts
                example, count = causes.get(known, (error, 0))
                causes[known] = example, count + 1
        if self._clock() - self._last_line >= FAILURE_LINE_SECONDS and (failures := self._told_failures()):
            self._last_line = self._clock()
            self.say(failures, logging.WARNING)

    def _told_failures(self) -> str:
        """Failures since the last call; empty if there were none."""
        most, late = (sorted(causes.values(), key=itemgetter(1), reverse=True) for causes in (self._errors, self._late))
        causes = most + late
        told = [f"{count} × {one_line(example, LONGEST_CAUSE)}" for example, count in causes[:MOST_CAUSES]]
        more = [f"{sum(count for _, count in rest)} of other causes"] if (rest := causes[MOST_CAUSES:]) else []
        failed = sum(count for _, count in causes)
        groups = f"in {self._groups_failed} of the {self._groups} groups played"
        self._groups = self._groups_failed = 0
        self._errors, self._late = {}, {}
        return f"failed rollouts: {failed}, {groups}: {'; '.join(told + more)}" if failed else ""

    def step(
        self,
        step: int,
        numbers: Mapping[str, str],
        phases: Mapping[str, float],
        *,
        reward: float | None = None,
        busy: Mapping[str, float] | None = None,
    ) -> None:
        """A finished optimizer step.

        Args:
            numbers: by name, as they are shown.
            phases: seconds by phase.
            reward: for the curve.
            busy: by mesh, the share of its time in which it worked.
        """
        view, now = self._view, self._clock()
        view.done, view.phases = step, dict(phases)
        view.numbers |= numbers
        view.busy |= busy or {}
        if reward is not None:
            view.rewards.append(reward)
        self._paces.append((now, step))
        (first, then), count = self._paces[0], len(self._paces)
        if count > 1 and step > then:
            view.seconds_left = (now - first) / (step - then) * (view.steps - step)
        if now - self._last_line < PLAIN_LINE_SECONDS and step != view.steps:
            return
        failures = self._told_failures()
        if not self._live or failures:
            self._last_line = now
            said = "  ".join(f"{name} {value}" for name, value in numbers.items())
            timing = " ".join(f"{name} {1000 * value:.0f}" for name, value in phases.items())
            line = f"step {step:>4}/{view.steps}  {said}  [ms: {timing}]"
            self.say("  ".join(filter(None, (line, failures))), logging.WARNING if failures else logging.INFO)

    def evaluation(self, step: int, exact_match: float, reward: float, transcripts: Sequence[str] = ()) -> None:
        """A finished evaluation, with lines that show what was said."""
        self._view.numbers["held-out"] = f"{exact_match:.3f} (step {step})"
        self.say(f"held-out after step {step}: exact match {exact_match:.3f}, reward {reward:.3f}")
        for transcript in transcripts:
            self.say(f"  {transcript}")

    def render(self) -> RenderableType:
        """The panel as it is now. Called by the panel's own thread, several times a second. Never raises."""
        view = self._view
        try:
            now = replace(
                view,  # copies of what the event loop changes meanwhile
                numbers=view.numbers.copy(),
                rewards=view.rewards.copy(),
                meshes=view.meshes.copy(),
                busy=view.busy.copy(),
                warnings=view.warnings.copy(),
                work=self._work(),
            )
            return draw(now, self._clock())
        except Exception as error:
            return Text(f"the panel cannot be drawn: {type(error).__name__}: {error}", style="red")

    def _work(self) -> dict[str, str]:
        """What the open spans say about the parts of the run."""
        if not self._view.training:
            return {}
        spans = list(self._spans.copy())
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
