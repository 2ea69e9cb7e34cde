"""How large a report is, how long it takes to write, and how soon a browser shows it.

    python scripts/bench/report.py [--steps 200] [--rollouts 500]

A run of so many steps with so many recorded rollouts each is made up (`tests/report/synthetic.py`); its report is
written and opened in headless Chromium, Debian's package `chromium`. The table has the medians of three openings.

The last line is one JSON object: `megabytes`, `write_seconds`, `first_paint_ms`, `curves_drawn_ms` and
`rollouts_open_ms` (the list works) from the start of the navigation, and how many rollouts were `recorded`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "report"), str(Path(__file__).resolve().parent)]

from parts.table import print_report  # noqa: E402
from support.chromium import opened  # noqa: E402
from synthetic import make_run  # noqa: E402

from titan_rl.report.page import write_report  # noqa: E402

TIMES = 3
MOMENTS = """JSON.stringify({
    first_paint_ms: performance.getEntriesByName("first-contentful-paint")[0].startTime,
    curves_drawn_ms: performance.getEntriesByName("drawn")[0].startTime,
    rollouts_open_ms: performance.getEntriesByName("ready")[0].startTime,
    count: document.getElementById("rollout-count").textContent,
})"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rollouts", type=int, default=500, help="recorded in every step")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        run = make_run(Path(made) / "run", steps=arguments.steps, rollouts=arguments.rollouts)
        began = time.monotonic()
        report = write_report([run], run / "report.html")
        seconds = time.monotonic() - began
        with opened(Path(made) / "profile") as page:
            moments = []
            for _ in range(TIMES):
                page.open(report)
                moments.append(json.loads(page.run(MOMENTS)))
        figures = {"megabytes": report.stat().st_size / 1e6, "write_seconds": seconds}
        figures |= {name: median(each[name] for each in moments) for name in moments[0] if name != "count"}
        figures["recorded"] = sum(1 for _ in open(run / "rollouts.jsonl"))
        rows = [[name, value] for name, value in figures.items()]
        print(moments[0]["count"])
        print_report("report", ["figure", "value"], rows, figures)


if __name__ == "__main__":
    main()
