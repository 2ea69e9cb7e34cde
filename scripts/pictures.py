"""Draws the pictures of the manuals from run directories.

    scripts/pictures.py RUN [RUN …]                     writes .github/learning.svg and .github/transcript.svg
    scripts/pictures.py --signs "WORDS=RUN" […]         writes .github/signs.svg

`signs.svg` has a row of curves for each run, under its words: rewards, entropy, groups that taught nothing.

`learning.svg` shows held-out exact match and training reward of every run over its steps, from `metrics.jsonl`.
`transcript.svg` shows what the policy of the first run answered before training and after it, from the lines that its
console showed, which `logs/controller.log` keeps.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURES = Path(__file__).resolve().parents[1] / ".github"
COLOURS = ("#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed")
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 320, 48, 16, 160, 40
EVALUATION = re.compile(r"held-out after step \d+: exact match .*")
ANSWER = re.compile(r"^  (right|wrong)  .*")
ANSWERS_SHOWN = 4


def read_metrics(run: Path, key: str) -> list[tuple[int, float]]:
    """(step, value) of every line that has the key."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [(line["step"], line[key]) for line in lines if line.get(key) is not None]


def recipe_of(run: Path) -> str:
    """The name of a run directory without its time and process id."""
    return run.name.rsplit("-", 3)[0]


def polyline(points: list[tuple[int, float]], last_step: int, style: str) -> str:
    def place(step: int, value: float) -> str:
        x = LEFT + step / last_step * (WIDTH - LEFT - RIGHT)
        return f"{x:.1f},{TOP + (1 - min(max(value, 0.0), 1.0)) * (HEIGHT - TOP - BOTTOM):.1f}"

    return f'<polyline fill="none" {style} points="{" ".join(place(*point) for point in points)}"/>'


def learning_curve(runs: list[Path]) -> str:
    """An SVG file: exact match as a thick line, reward as a thin one."""
    last_step = max(step for run in runs for step, _ in read_metrics(run, "evaluation/exact_match"))
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12" fill="#57606a"><rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
    ]
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = TOP + (1 - value) * (bottom - TOP)
        parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{y}" y2="{y}" stroke="#d0d7de" stroke-width="0.6"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{value:g}</text>')
    for quarter in range(5):
        step = round(last_step * quarter / 4)
        x = LEFT + quarter / 4 * (right - LEFT)
        parts.append(f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 6}" text-anchor="middle">optimizer steps</text>')
    for number, run in enumerate(runs):
        colour = COLOURS[number % len(COLOURS)]
        rewards, matches = (read_metrics(run, key) for key in ("rollout/reward_mean", "evaluation/exact_match"))
        parts.append(polyline(rewards, last_step, f'stroke="{colour}" stroke-width="0.8" opacity="0.45"'))
        parts.append(polyline(matches, last_step, f'stroke="{colour}" stroke-width="2.4"'))
        y = TOP + 14 + 20 * number
        parts.append(f'<text x="{right + 12}" y="{y}" fill="{colour}" font-weight="bold">{recipe_of(run)}</text>')
    y = TOP + 24 + 20 * len(runs)
    parts.append(f'<text x="{right + 12}" y="{y}">thick: held-out</text>')
    parts.append(f'<text x="{right + 12}" y="{y + 15}">exact match, greedy</text>')
    parts.append(f'<text x="{right + 12}" y="{y + 32}">thin: training reward</text></svg>')
    return "\n".join(parts) + "\n"


PANELS = (
    ("reward", {"rollout/reward_mean": "training", "evaluation/reward": "held-out"}),
    ("entropy, nats", {"train/entropy": ""}),
    ("share of groups with equal rewards", {"groups/equal_rewards": ""}),
)
PANEL, ROW, GAP, CURVE = 210, 150, 36, 90


def signs(runs: Mapping[str, Path]) -> str:
    """An SVG file."""
    parts = []
    for row, (words, run) in enumerate(runs.items()):
        top = row * ROW + 40
        parts.append(f'<text x="{GAP}" y="{top - 22}" font-weight="bold">{words}</text>')
        for column, (title, keys) in enumerate(PANELS):
            curves = {key: read_metrics(run, key) for key in keys}
            left, last = GAP + column * (PANEL + GAP), max(step for curve in curves.values() for step, _ in curve)
            most = max(1.0, *(value for curve in curves.values() for _, value in curve))
            parts.append(f'<text x="{left}" y="{top - 6}">{title}</text><text x="{left - 4}" y="{top + 8}" ')
            parts.append(f'text-anchor="end">{most:.2g}</text><text x="{left + PANEL}" y="{top + CURVE + 14}" ')
            parts.append(f'text-anchor="end">step {last}</text><path d="M{left} {top}v{CURVE}h{PANEL}" fill="none" ')
            parts.append('stroke="#d0d7de"/>')
            for number, (key, curve) in enumerate(curves.items()):
                points = " ".join(
                    f"{left + step / last * PANEL:.1f},{top + CURVE * (1 - max(value, 0) / most):.1f}"
                    for step, value in curve[:: max(1, len(curve) // 100)]
                )
                style = f'fill="none" stroke="{COLOURS[number]}" stroke-width="1.5"'
                parts.append(
                    f'<polyline {style} points="{points}"/><text x="{left + PANEL - 4}" fill="{COLOURS[number]}" '
                )
                parts.append(f'y="{top + CURVE - 8 - 14 * number}" text-anchor="end">{keys[key]}</text>')
    width, height = len(PANELS) * (PANEL + GAP) + GAP, len(runs) * ROW
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
    white = 'font-size="11" fill="#57606a"><rect width="100%" height="100%" fill="#ffffff"/>'
    return f"{head}{white}{''.join(parts)}</svg>\n"


def evaluations(run: Path) -> list[list[str]]:
    """The console's lines of each evaluation: its result, then some answers."""
    found: list[list[str]] = []
    for line in (run / "logs" / "controller.log").read_text(encoding="utf-8").splitlines():
        if match := EVALUATION.search(line):
            found.append([match[0]])
        elif found and (match := ANSWER.search(line.partition("progress: ")[2] or line)):
            found[-1].append(match[0])
    return found


def transcript(run: Path, svg: Path) -> None:
    """Write the first and the last evaluation as a picture of a terminal."""
    shown = evaluations(run)
    if len(shown) < 2:
        raise SystemExit(f"{run}/logs/controller.log tells of {len(shown)} evaluations; a run before and after has two")
    console = Console(record=True, width=84, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(f"$ titan-rl train --recipe {recipe_of(run)}", highlight=False)
    for result, *answers in (shown[0], shown[-1]):
        console.print(Text(result, style="bold"))
        for answer in answers[:ANSWERS_SHOWN]:
            console.print(Text(answer, style="green" if answer.lstrip().startswith("right") else "red"))
    drawn = console.export_svg(title="before and after", unique_id="titan-rl")
    svg.write_text(re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL), encoding="utf-8")  # fonts of a web server


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="run directories; the first one's answers are shown")
    parser.add_argument("--signs", nargs="+", metavar="WORDS=RUN", help="draw what runs look like, one row each")
    parser.add_argument("--output", type=Path, default=PICTURES, help="folder for the pictures")
    arguments = parser.parse_args()
    arguments.output.mkdir(exist_ok=True)
    if arguments.signs:
        runs = {words: Path(run) for words, _, run in (each.partition("=") for each in arguments.signs)}
        (arguments.output / "signs.svg").write_text(signs(runs), encoding="utf-8")
        print(f"wrote {arguments.output}/signs.svg")
        return 0
    (arguments.output / "learning.svg").write_text(learning_curve(arguments.runs), encoding="utf-8")
    transcript(arguments.runs[0], arguments.output / "transcript.svg")
    print(f"wrote {arguments.output}/learning.svg and {arguments.output}/transcript.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
