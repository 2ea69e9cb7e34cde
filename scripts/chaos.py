#!/usr/bin/env python
"""Disturbs a real training run in every way that one machine allows, and checks that it comes out as if nothing was.

    .venv/bin/python scripts/chaos.py --seed 0 --minutes 20 --deterministic

A tiny policy is trained by programs and by turns (scripts/chaos_parts/task.py), two steps ahead of the trainer.
Meanwhile parts of the run are killed, stopped and damaged, the controller included; it is started again with `--resume
auto`. Which fault comes after which step follows from the seed. Then the same run is made undisturbed. The seed also
chooses the shape: two generators and a spare, three generators, or two of two ranks with two trainer ranks.

What is checked at the end: the run completed; every admitted prompt was trained exactly once or reported; no sample was
older than the bound; no process, port or file in shared memory is left. With --deterministic also: weights, optimizer
state, losses, rewards and trained groups are those of the undisturbed run, bit for bit.

The last line is one JSON object:
  kinds                  kinds of faults that happened, those of user code included
  faults                 faults that were done by this program; prompts whose code goes wrong are not counted
  lost                   admitted groups that were neither trained nor reported
  bitwise_equal          whether the deterministic run equals the undisturbed one; null without --deterministic
  training_time_ratio    seconds from the end of the first step to the end of the last one, undisturbed ÷ disturbed
  worst_detection_s      longest time until the death of a process was noticed
  worst_hang_detection_s the same of a process that was stopped; placement.hang_seconds is the bound
  worst_host_detection_s the same of a host that was killed or cut off; placement.host_seconds is the bound
  worst_recovery_s       longest time from a fault to the return of what it hit, or to the next finished step

Exit code 1: a check failed, and the run directories are kept. /dev/shm of the runs is one of their own where this
machine lets us mount one; where it does not, faults that need it are left out. With faults of hosts the disturbed run
is over several hosts, which are network namespaces of this machine, and the undisturbed one on one host. Where this
machine cannot make such hosts, these faults are left out too.

Other options go to both runs, such as --generator.engine simulated.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "scripts" / "bench")]

from chaos_parts.checks import Finding, check_leftovers, check_run, check_same  # noqa: E402
from chaos_parts.ground import Ground  # noqa: E402
from chaos_parts.runner import Outcome, RunFailed, train  # noqa: E402
from chaos_parts.schedule import (  # noqa: E402
    HEADER,
    KINDS,
    NEEDS_HOSTS,
    NEEDS_MOUNT,
    Injected,
    judge,
    must_be_detected,
    read_log,
    schedule,
    table,
    worst,
)
from parts.table import print_report  # noqa: E402

from tests.hosts.namespaces import Hosts, skip_reason  # noqa: E402

STEPS_PER_MINUTE = 25
"""Of the undisturbed run on two quiet cores."""
TROUBLE_EVERY = 197
"""One prompt in so many goes wrong."""
HANG_SECONDS = 8
SHAPES = (
    ("--generator.count", "2", "--placement.spares", "1"),
    ("--generator.count", "3"),
    ("--generator.count", "2", "--generator.tensor-parallel", "2", "--trainer.data-parallel", "2"),
)
"""By seed."""
PRIVATE = "CHAOS_HAS_ITS_OWN_SHARED_MEMORY"
SHARED_BYTES = 512 << 20
HOSTS = 4
"""The controller's, two with a worker, and one that joins."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the schedule and of the run")
    parser.add_argument("--minutes", type=float, default=20, help=f"{STEPS_PER_MINUTE} steps each (default: 20)")
    parser.add_argument("--deterministic", action="store_true", help="compare with the undisturbed run bit for bit")
    parser.add_argument("--every", type=int, default=18, help="steps between two faults (default: 18)")
    parser.add_argument(
        "--only",
        action="append",
        choices=KINDS,
        metavar="KIND",
        help=f"faults to choose from, one by one; default: all of {'; '.join(KINDS)}",
    )
    options, more = parser.parse_known_args()
    kinds = options.only or list(KINDS)
    if not enter_private_memory():
        print("no shared memory of our own can be mounted here: left out are", ", ".join(sorted(NEEDS_MOUNT)))
        kinds = [kind for kind in kinds if kind not in NEEDS_MOUNT]

    if NEEDS_HOSTS & {*kinds} and (reason := skip_reason()):
        print(f"{reason}: left out are", ", ".join(sorted(NEEDS_HOSTS)))
        kinds = [kind for kind in kinds if kind not in NEEDS_HOSTS]

    steps = round(options.minutes * STEPS_PER_MINUTE)
    faults = schedule(options.seed, steps, options.every, kinds)
    settings = settings_of(options.seed, steps, options.deterministic, more)
    print(f"{steps} steps, {len(faults)} faults of {len({fault.kind for fault in faults})} kinds", flush=True)
    directory = Path(tempfile.mkdtemp(prefix="chaos-"))
    finding, undisturbed = Finding(), None
    disturbed = Outcome(directory / "disturbed")
    try:
        with Hosts(HOSTS, shared_memory=SHARED_BYTES) if NEEDS_HOSTS & {*kinds} else nullcontext(()) as hosts:
            ground = disturbed.ground = Ground(hosts)
            train(disturbed, settings, faults)
            finding = check_run(disturbed.run)
            left = check_leftovers(disturbed.mark, ground, disturbed.controllers, disturbed.scratch)
            finding.problems += left
        undisturbed = Outcome(directory / "undisturbed")
        train(undisturbed, settings, [])
    except RunFailed as error:
        finding.problems.append(str(error))
    return report(disturbed, undisturbed, finding, directory, deterministic=options.deterministic)


def enter_private_memory() -> bool:
    """Go on in a mount namespace whose /dev/shm is small and ours, so that filling it harms nobody."""
    if PRIVATE in os.environ:
        return os.environ[PRIVATE] == "yes"
    mount = f"mount -t tmpfs -o size={SHARED_BYTES} chaos /dev/shm"
    possible = subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode == 0
    os.environ[PRIVATE] = "yes" if possible else "no"
    if possible:
        again = f'{mount} && exec "$0" "$@"'
        os.execvp("unshare", ["unshare", "-rm", "sh", "-c", again, sys.executable, *sys.argv])
    return possible


def settings_of(seed: int, steps: int, deterministic: bool, more: Sequence[str]) -> list[str]:
    """Arguments of `titan_rl.train`; later ones win."""
    return [
        *("--recipe", f"{ROOT / 'scripts' / 'chaos_parts' / 'task.py'}:recipe", "--seed", str(seed)),
        *("--deterministic", str(deterministic).lower(), "--loop.steps", str(steps)),
        *("--environment.kwargs.every", str(TROUBLE_EVERY), "--placement.hang-seconds", str(HANG_SECONDS)),
        *SHAPES[seed % len(SHAPES)],
        *more,
    ]


def report(
    disturbed: Outcome, undisturbed: Outcome | None, finding: Finding, directory: Path, *, deterministic: bool
) -> int:
    """Print what happened; returns the exit code."""
    problems, equal = finding.problems, None
    faults = disturbed.injected
    if (log := disturbed.run / "logs" / "controller.log").exists():
        judge(faults, read_log(log.read_text()), disturbed.moments)
    problems += [
        f"nobody noticed: {fault.what} (after step {fault.fault.step})"
        for fault in faults
        if must_be_detected(fault) and fault.detected is None
    ]
    complete = undisturbed is not None and undisturbed.seconds > 0 and disturbed.seconds > 0
    if deterministic and complete:
        assert undisturbed is not None
        differences = list(check_same(disturbed.run, undisturbed.run))
        problems += differences
        equal = not differences
    figures = {
        "kinds": len({fault.fault.kind for fault in faults}) + len(finding.troubles),
        "faults": len(faults),
        "lost": finding.lost,
        "bitwise_equal": equal,
        "training_time_ratio": round(undisturbed.seconds / disturbed.seconds, 3) if complete and undisturbed else None,
        "worst_detection_s": rounded(fault.detected for fault in faults if is_death(fault)),
        "worst_hang_detection_s": rounded(fault.detected for fault in faults if KINDS[fault.fault.kind].hangs),
        "worst_host_detection_s": rounded(fault.detected for fault in faults if fault.fault.kind in NEEDS_HOSTS),
        "worst_recovery_s": rounded(fault.recovered for fault in faults),
    }
    for problem in problems:
        print(f"FAILED: {problem}")
    if problems:
        print(f"run directories: {directory}")
    else:
        shutil.rmtree(directory, ignore_errors=True)
    took = f"{disturbed.seconds:.0f} s of training"
    if complete and undisturbed is not None:
        took += f", {undisturbed.seconds:.0f} s undisturbed"
    print_report(f"\n{took}", HEADER, table(faults, finding.troubles), figures)
    return 1 if problems else 0


def is_death(fault: Injected) -> bool:
    return bool(fault.mesh or fault.fault.kind.startswith("controller killed")) and not KINDS[fault.fault.kind].hangs


def rounded(seconds: object) -> float | None:
    found = worst(seconds)  # type: ignore[arg-type]
    return None if found is None else round(found, 2)


if __name__ == "__main__":
    sys.exit(main())
