"""Meshes for tests that spawn actors of their own."""

from __future__ import annotations

import os
from pathlib import Path

from titan_rl.supervision.placement import Kind, MeshPlan

TESTS = Path(__file__).resolve().parents[1]


def mesh_plan(name: str, ranks: int = 1, *, beside: str) -> MeshPlan:
    """Processes on this host, of one thread each, that find the modules beside the file `beside`."""
    paths = [str(Path(beside).resolve().parent), str(TESTS), str(TESTS.parent)]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return MeshPlan(
        kind=Kind.ROLLOUT,
        name=name,
        hosts=("host0",) * ranks,
        env=(environment,) * ranks,
        devices=(None,) * ranks,
        positions=("",) * ranks,
    )
