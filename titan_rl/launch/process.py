"""What a process of a run does first: the controller before it imports Monarch, the others before any actor."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from titan_rl.importing import import_user_module
from titan_rl.launch.placement import SUPERVISION_ENVIRONMENT
from titan_rl.observability.logs import redirect_output


def prepare_controller() -> None:
    """Call before anything that imports Monarch."""
    if "monarch" in sys.modules and not SUPERVISION_ENVIRONMENT.items() <= os.environ.items():
        logging.getLogger(__name__).warning(
            "monarch was imported before titan_rl.launch: a process that is stopped for 30 s will be taken for dead"
        )
    os.environ.update(SUPERVISION_ENVIRONMENT)


def prepare_process(mesh: str, log_directory: str, imports: tuple[str, ...]) -> None:
    """Give the process its log file and import the user's modules under the names that pickled objects expect.

    Args:
        mesh: name of the mesh, for the file name; the rank comes from the environment.
        log_directory: of the run; empty: leave standard output alone.
        imports: files or modules of the user, in order.
    """
    if log_directory:
        rank = os.environ.get("RANK", "0")
        alone = os.environ.get("WORLD_SIZE", "1") == "1"
        redirect_output(Path(log_directory) / (f"{mesh}.log" if alone else f"{mesh}-rank{rank}.log"))
    for name in imports:
        import_user_module(name)
