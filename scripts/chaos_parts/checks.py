"""What must be true after a disturbed run, read from its directory and this machine."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_parts.faults import SHARED, marked
from chaos_parts.ground import Ground
from chaos_parts.task import STALENESS, trouble_of

COMPARED = ("train/loss", "train/grad_norm", "rollout/reward_", "staleness/", "evaluation/")
"""What both runs must report alike of every step and evaluation, by how it begins; and which groups it trained."""


@dataclass(slots=True)
class Finding:
    """What was found, and what is wrong."""

    problems: list[str] = field(default_factory=list)
    lost: int = 0
    """Admitted groups of which nobody knows what became."""
    troubles: dict[str, int] = field(default_factory=dict)
    """Prompts whose code went wrong, by how."""


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def check_run(run: Path) -> Finding:
    """Whether the run completed, kept its bound, and trained every admitted group exactly once or reported it."""
    from titan_rl.loop.checkpoint_files import checkpoints
    from titan_rl.loop.ledger import read_ledger

    found = Finding()
    if not (run / "summary.json").exists():
        found.problems.append("the run did not complete: there is no summary.json")
        return found
    config = tomllib.loads((run / "config.toml").read_text())
    steps, groups = config["loop"]["steps"], config["loop"]["groups_per_step"]
    trained = [line for line in lines_of(run) if "train/loss" in line]
    found.problems += check_steps(trained, steps=steps, groups=groups)
    (*_, newest) = checkpoints(run)
    ledger = read_ledger(newest)
    counts = ledger.buffer.counts
    found.lost = counts["admitted"] - counts["trained"] - counts["filtered"] - counts["failed"]
    if found.lost:
        found.problems.append(f"{found.lost} admitted groups are neither trained nor reported: {counts}")
    if counts["trained"] != steps * groups:
        found.problems.append(f"{counts['trained']} groups were trained, {steps * groups} should be")
    kinds = (trouble_of(index, config["environment"]["kwargs"]["every"]) for index in range(counts["admitted"]))
    found.troubles = dict(Counter(filter(None, kinds)))
    return found


def check_steps(lines: Iterable[dict[str, Any]], *, steps: int, groups: int) -> Iterator[str]:
    """Problems of the steps' numbers."""
    lines = list(lines)
    if [line["step"] for line in lines] != list(range(1, steps + 1)):
        yield f"the steps that are recorded are not 1 to {steps}, once each: {[line['step'] for line in lines]}"
    ids = Counter(group for line in lines for group in line["groups"])
    if twice := [group for group, count in ids.items() if count > 1]:
        yield f"groups were trained more than once: {twice}"
    for line in lines:
        if len(line["groups"]) != groups:
            yield f"step {line['step']} trained {len(line['groups'])} groups"
        if line["staleness/age_max"] > STALENESS:
            yield f"step {line['step']} trained a sample that was {line['staleness/age_max']} steps old"


def check_leftovers(mark: str, ground: Ground, controllers: Iterable[int], scratch: Path) -> Iterator[str]:
    """What the run has left on this machine, and in the shared memory of hosts. A port that is left needs a process.

    Args:
        controllers: process ids of the run's controllers, on their host.
        scratch: where its processes made temporary files.
    """
    if left := marked(mark):
        yield f"{len(left)} processes are left: {left}"
    for pid in controllers:
        for path in scratch.glob(f"titan_rl-{pid}.*"):
            yield f"{path} is left"
    for owner in ["*"] if ground.hosts else controllers:
        for there in ground.everywhere:
            for path in there(lambda owner=owner: [*SHARED.glob(f"titan_rl-{owner}-*")]):
                yield f"{path} is left"


def check_same(run: Path, undisturbed: Path) -> Iterator[str]:
    """In what a deterministic run differs from the undisturbed one, bit for bit."""
    from titan_rl.loop.checkpoint_files import checkpoints

    (*_, mine), (*_, other) = checkpoints(run), checkpoints(undisturbed)
    if mine.name != other.name:
        yield f"the last checkpoints are {mine.name} and {other.name}"
        return
    for what, one, two in (
        ("weights", weights_of(run), weights_of(undisturbed)),
        ("state of the trainer", state_of(mine), state_of(other)),
    ):
        if one != two:
            names = [name for name in one.keys() | two.keys() if one.get(name) != two.get(name)]
            yield f"the {what} differ in {len(names)} of {len(one)} tensors, such as {min(names)}"
    for here, there in zip(steps_of(run), steps_of(undisturbed), strict=False):
        if here != there:
            names = [name for name in here.keys() | there.keys() if here.get(name) != there.get(name)]
            yield f"step {here['step']} differs, and perhaps later ones: {', '.join(sorted(names))}"
            return


def weights_of(run: Path) -> dict[str, bytes]:
    from safetensors.numpy import load_file

    weights = load_file(run / "checkpoint" / "model.safetensors")
    return {name: tensor.tobytes() for name, tensor in weights.items()}


def state_of(checkpoint: Path) -> dict[str, bytes]:
    """Every tensor of the trainer's state, the optimizer's moments among them."""
    from titan_rl.policy.training_state import read_tensors

    tensors = read_tensors(checkpoint / "trainer", "")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def steps_of(run: Path) -> list[dict[str, Any]]:
    """What is reported of every step, and of evaluations, in an order that does not depend on time."""
    kept = [
        {key: value for key, value in line.items() if key in ("step", "groups") or key.startswith(COMPARED)}
        for line in lines_of(run)
    ]
    return sorted(kept, key=lambda line: (line["step"], "evaluation/reward" in line))
