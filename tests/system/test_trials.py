"""A trial on a fleet that others have used, one of which failed, is the run of its config, bit for bit: it begins with
what was taught once for all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from test_resume import numbers

PROGRAM = """
import math
import sys

from rich.console import Console

from titan_rl.config_registry import load_recipe
from titan_rl.overrides import variant
from titan_rl.playing.policies import run_until_signal
from titan_rl.playing.tune import LR, SAMPLES, Candidate, Search, trial_config

small = {"deterministic": True, "loop.groups_per_step": 4, "evaluation.prompts": 16, "logging.directory": sys.argv[1]}
config = variant(load_recipe("copy4_async"), small | {"trainer.warmup.steps": 24, "trainer.warmup.batch": 8})
first, second = Candidate({LR: 1e-2, SAMPLES: 4}), Candidate({LR: 1e-3, SAMPLES: 6})
refused = Candidate({LR: 1e-3, "trainer.logprob_alarm.stop_mean": 1e-12})


async def work(directory, options):
    from titan_rl.run.start import bring_up

    async with bring_up(trial_config(config, first, 3), **options) as meshes:
        search = Search(config, meshes, directory, Console())
        await search.trial(first, 3)
        await search.teach()
        await search.trial(refused, 3)
        await search.trial(second, 3)
    assert math.isfinite(first.scores[0]) and math.isfinite(second.scores[0]) and refused.scores == [-math.inf]
    return 0, "is done"


sys.exit(run_until_signal("tune", config, work, print))
"""


def run(*command: str | Path) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_a_trial_after_others_is_the_run_of_its_config(tmp_path: Path) -> None:
    said = run("-c", PROGRAM, tmp_path / "fleet")
    assert "trial-2 failed: step 0: " in said
    (search,) = (tmp_path / "fleet").iterdir()
    last = search / "trial-3"
    run("-m", "titan_rl.train", "--config", last / "config.toml", "--logging.directory", tmp_path / "alone")
    (alone,) = (tmp_path / "alone").iterdir()
    assert len(numbers(alone)) >= 3
    assert numbers(last) == numbers(alone) != numbers(search / "trial-0")
