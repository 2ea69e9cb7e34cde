"""The panel of a run in a terminal.

    step 137/400 ━━━━━━━━━━━━━━━━━━━━━━━━━━━━╺━━━━━━━━━━━━━━━━━━━━━  1:15 · 1:12 left
    reward 0.812 ▁▂▃▅▆▇   held-out 0.750 (step 100)   tokens/s 1,934

    trainer     train step 138                                  ██████░░  71%
    generator0  serving v137, 12 requests                       ████████  98%
    rollouts    16 groups

The same `View` at the same time is the same picture. Rows do not come and go with the work, so nothing jumps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

READY = "ready"
LOST = "lost"
WARNINGS = 3
"""That the panel keeps in sight."""

_BARS = "▁▂▃▄▅▆▇█"
_FIRST = ("reward", "held-out", "staleness", "tokens/s")
"""Numbers that are shown before others, in this order."""
_CURVE = 16
"""Characters of the curve of rewards."""
_METER = 8
"""Characters of a mesh's meter."""


@dataclass(slots=True)
class MeshState:
    """A mesh as the panel shows it."""

    doing: str
    since: float
    """When its start began."""
    took: float | None = None
    """Seconds that its start took; None: it is starting."""


@dataclass(slots=True)
class View:
    """What the panel shows. Times are on the display's clock."""

    steps: int
    began: float
    training: bool = False
    """Whether the start is over."""
    done: int = 0
    seconds_left: float | None = None
    numbers: dict[str, str] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of the last step, by phase."""
    meshes: dict[str, MeshState] = field(default_factory=dict)
    work: dict[str, str] = field(default_factory=dict)
    """What goes on in the parts that are no single mesh, or whose work the controller knows best."""
    busy: dict[str, float] = field(default_factory=dict)
    """By mesh, the share of its time in which it works, 0..1."""
    warnings: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=WARNINGS))


def draw(view: View, now: float) -> RenderableType:
    """The whole panel."""
    parts = [_head(view, now)]
    if view.numbers:
        parts.append(Columns(_numbers(view), padding=(0, 3)))
    names = max(map(len, ("last step", *view.meshes)))
    parts.append(Padding(_meshes(view, now, names), (1, 0, 0, 0) if view.training else 0))
    if view.phases:
        timing = ", ".join(f"{name} {_seconds(value)}" for name, value in view.phases.items())
        parts.append(Text(f"{'last step':<{names}}  {timing}", style="dim", overflow="ellipsis", no_wrap=True))
    parts += [
        Text(f"{_clock(now - at)} ago  {text}", style="yellow", overflow="ellipsis", no_wrap=True)
        for at, text in view.warnings
    ]
    return Group(*parts)


def curve(values: Sequence[float], width: int = _CURVE) -> str:
    """Numbers as a line of bars, between the least and the largest; of more than `width` the means of neighbours."""
    count = min(width, len(values))
    parts = [values[len(values) * place // count : len(values) * (place + 1) // count] for place in range(count)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def _head(view: View, now: float) -> RenderableType:
    head = Table.grid(padding=(0, 1), expand=True)
    if not view.training:
        head.add_row(Text("starting", style="bold"), Text(_clock(now - view.began), justify="right"))
        return head
    left = "" if view.seconds_left is None else f" · {_clock(view.seconds_left)} left"
    head.add_column()
    head.add_column(ratio=1)
    head.add_column(justify="right")
    head.add_row(
        Text(f"step {view.done}/{view.steps}", style="bold"),
        ProgressBar(total=view.steps, completed=view.done),
        f"{_clock(now - view.began)}{left}",
    )
    return head


def _numbers(view: View) -> list[Text]:
    first = [name for name in _FIRST if name in view.numbers]
    shown = []
    for name in [*first, *(name for name in view.numbers if name not in first)]:
        text = Text.assemble((name, "dim"), " ", (view.numbers[name], "bold"), no_wrap=True)
        if name == "reward":
            text.append(f" {curve(view.rewards):<{_CURVE}}", "cyan")
        shown.append(text)
    return shown


def _meshes(view: View, now: float, names: int) -> RenderableType:
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(no_wrap=True, width=names)
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    table.add_column(no_wrap=True, justify="right")
    idle = []
    for name, mesh in view.meshes.items():
        share = view.busy.get(name)
        doing = view.work.get(name, mesh.doing)
        if view.training and mesh.took is not None and doing == READY and share is None:
            idle.append(name)
            continue
        last = "" if share is None else _meter(share)
        if mesh.took is None:
            last = f"{now - mesh.since:.0f} s"
        elif not view.training:
            last = f"{mesh.took:.0f} s"
        table.add_row(Text(name, style="dim"), Text(doing, style=_style(mesh)), last)
    for name, doing in view.work.items():
        if name not in view.meshes:
            table.add_row(Text(name, style="dim"), doing, "")
    if idle:
        table.add_row(Text(READY, style="dim"), Text(", ".join(idle), style="dim"), "")
    return table


def _style(mesh: MeshState) -> str:
    if mesh.doing == LOST:
        return "red"
    return "yellow" if mesh.took is None else "green" if mesh.doing == READY else ""


def _meter(share: float) -> Text:
    full = round(min(1.0, max(0.0, share)) * _METER)
    return Text.assemble(("█" * full, "cyan"), ("░" * (_METER - full), "dim"), f" {share:4.0%}")


def _seconds(value: float) -> str:
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.1f} s"


def _clock(seconds: float) -> str:
    """75 → 1:15; 3675 → 1:01:15."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
