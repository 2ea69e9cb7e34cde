"""What a person sees of a run: the panel in a terminal; plain lines elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from titan_rl.metrics.activity import Activities
from titan_rl.types import FailureKind
from titan_rl.view.display import RunDisplay, curve


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def panel(display: RunDisplay, width: int = 80) -> list[str]:
    """The lines of the panel."""
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    console.print(display.render())
    return [line.rstrip() for line in Text.from_ansi(console.file.getvalue()).plain.splitlines()]  # type: ignore


def live(clock: Clock, steps: int = 400) -> RunDisplay:
    return RunDisplay(steps=steps, live=True, console=Console(file=io.StringIO(), force_terminal=True), clock=clock)


def test_the_start_shows_what_takes_the_time() -> None:
    clock = Clock()
    display = live(clock)
    for name in ("router", "trainer"):
        display.mesh(name, "starting processes")
    clock.now = 2.0
    display.mesh("router", "ready")
    clock.now = 9.0
    display.mesh("trainer", "building the policy")
    assert [" ".join(line.split()) for line in panel(display)] == [
        "starting 0:00:09",
        "router ready 2 s",
        "trainer building the policy 9 s",
    ]


@pytest.mark.parametrize("width", [80, 120, 240])
def test_the_panel_shows_what_is_going_on(width: int) -> None:
    clock = Clock()
    display = live(clock)
    activity = Activities(clock=clock)
    display.follow(activity.open)
    for name in ("trainer", "generator0", "generator1", "router"):
        display.mesh(name, "starting processes")
        display.mesh(name, "ready")
    for step in range(1, 101):
        clock.now += 0.5
        display.step(step, {"reward": f"{step / 100:.3f}"}, {"train": 0.05}, reward=step / 100, busy={"trainer": 0.5})
    display.evaluation(100, 0.75, 0.9)
    display.print_line("the disk is nearly full", 30)
    display.mesh("generator0", "serving v100, 3 requests")
    display.mesh("generator1", "lost")
    clock.now += 75
    with activity("train", step=101), activity("rollout", group=3), activity("rollout", group=4):
        with activity("pull", version="v101"), activity("publisher", waits_for=lambda: "a place"):
            lines = panel(display, width)
    assert all(len(line) <= width for line in lines)
    shown = " / ".join(" ".join(line.split()) for line in lines)
    assert lines[0].startswith("step 100/400 ━") and lines[0].endswith("0:02:05 · 0:02:30 left")
    for part in (
        "reward 1.000 ▁▁▂▂▃▃▄▄▅▅▆▆▇▇██",
        "held-out 0.750 (step 100)",
        " / trainer train step 101 ████░░░░ 50% / ",
        " / generator0 serving v100, 3 requests / generator1 lost / ",
        " / rollouts 2 groups / weights generators pull v101 / ready router / last step train 50 ms / ",
        " / 0:01:15 ago the disk is nearly full",
    ):
        assert part in shown, shown
    assert next(len(line.rstrip()) for line in lines if "████░░░░" in line) <= 100  # near its mesh
    assert "a place" not in shown
    with activity("trainer", waits_for=lambda: "3 groups"):
        assert any(line.split()[:5] == ["trainer", "waits", "for", "3", "groups"] for line in panel(display))


def test_a_generator_that_was_taken_away_is_not_shown_any_more() -> None:
    display = live(Clock())
    display.mesh("generator1", "ready")
    display.mesh("generator1", "lost")
    assert any("generator1" in line for line in panel(display))
    display.mesh("generator1", "")
    assert not any("generator1" in line for line in panel(display))


def test_a_panel_that_cannot_be_drawn_says_so_and_raises_nothing() -> None:
    display = live(Clock())
    activity = Activities()
    display.follow(activity.open)
    with activity("trainer", waits_for=lambda: str(1 / 0)):
        assert panel(display) == ["the panel cannot be drawn: ZeroDivisionError: division by zero"]


def test_a_curve_goes_from_its_least_to_its_largest_value() -> None:
    assert curve([]) == "" and curve([0.5]) == "▁" and curve([2.0, 2.0]) == "▁▁"
    assert curve([0.0, 1.0, 0.5]) == "▁█▅" and len(curve(list(range(1000)))) == 16


def test_outside_a_terminal_steps_are_plain_lines_and_not_too_many() -> None:
    clock, out = Clock(), io.StringIO()
    with RunDisplay(steps=100, live=True, console=Console(file=out), clock=clock) as display:
        for step in range(1, 101):
            clock.now += 0.1
            display.step(step, {"reward": "0.500", "entropy": "1.20"}, {"train": 0.05})
        display.evaluation(100, 0.95, 0.99, ["wrong  '1=' → '3'"])
    lines = out.getvalue().splitlines()
    assert lines[0] == "step    1/100  reward 0.500  entropy 1.20  [ms: train 50]"
    assert lines[1].endswith("  0:00:08 left")
    assert lines[-3].startswith("step  100/100") and lines[-3].endswith("]")
    assert lines[-2] == "held-out after step 100: exact match 0.950, reward 0.990"
    assert lines[-1] == "  wrong  '1=' → '3'"
    assert 5 <= len(lines) <= 11


@pytest.mark.parametrize("live", [False, True])
def test_no_failed_rollout_is_passed_over_between_two_lines(live: bool) -> None:
    clock, out = Clock(), io.StringIO()
    console = Console(file=out, force_terminal=live, width=200)
    display = RunDisplay(steps=100, live=live, console=console, clock=clock)
    for _ in range(2):  # the second is too soon for a line of its own
        display.add_group([(FailureKind.TOOL, "a.py, line 3: boom" + "x" * 1000)])
    at_once = "failed rollouts: 1, in 1 of the 1 groups played: 1 × tool: a.py, line 3: boom"
    assert out.getvalue().count(at_once) == 1 and len(out.getvalue()) < 300  # there may be no step
    for step in range(1, 101):
        clock.now += 0.1
        display.add_group([(FailureKind.TASK, f"cause {step}")])
        display.step(step, {}, {})
    told = [line for line in out.getvalue().splitlines() if "failed rollouts: " in line]
    assert sum(int(line.split("failed rollouts: ")[1].split(",")[0]) for line in told) == 102
    assert len(told) <= 8 and "cause 1" in told[1]


def test_failures_are_counted_by_cause_and_group_and_those_that_waited_come_last() -> None:
    clock, out = Clock(), io.StringIO()
    display = RunDisplay(steps=100, live=False, console=Console(file=out, width=300), clock=clock)
    display.step(1, {}, {})
    display.add_group([(FailureKind.TIMEOUT, "score of train prompt: did not finish within 30 s")] * 5)
    display.add_group([(FailureKind.GRADER, "score of train prompt: KeyError: 'x' (a.py:3 in right)")])
    display.add_group([(FailureKind.GRADER, "score of train prompt: KeyError: 'x' (a.py:3 in right)")])
    display.add_group([])
    clock.now += 10
    display.step(2, {}, {})
    told = "failed rollouts: 7, in 3 of the 4 groups played: 2 × grader: score of train prompt: KeyError: 'x' (a.py:3"
    assert f"{told} in right); 5 × timeout: score of train prompt: did not finish within 30 s" in out.getvalue()
