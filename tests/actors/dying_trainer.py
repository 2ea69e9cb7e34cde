"""A trainer whose ranks kill themselves where a file tells them to, once."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

from titan_rl.actors.trainer import PolicyTrainer
from titan_rl.types import PolicyVersion

DEATH = "death"
"""File in the directory of the policy that says when: "before copy 2 of rank 1"."""


class DyingTrainer(PolicyTrainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        from titan_rl.policy.state_copies import StateCopies
        from titan_rl.policy.updater import PolicyUpdater

        note, write = Path(self._model_path, DEATH), StateCopies.write
        train = PolicyUpdater.train_step

        def die_if_told(when: str) -> None:
            if note.exists() and note.read_text() == f"{when} of rank {self._rank}":
                note.unlink()
                os.kill(os.getpid(), signal.SIGKILL)

        def write_or_die(copies: StateCopies, version: PolicyVersion, *tensors: Any) -> None:
            die_if_told(f"before copy {version.step}")
            write(copies, version, *tensors)
            die_if_told(f"after copy {version.step}")

        def train_or_hang(updater: PolicyUpdater, *args: Any) -> Any:
            if note.exists() and note.read_text() == f"hang of rank {self._rank}":
                note.unlink()
                threading.Event().wait()
            return train(updater, *args)

        PolicyUpdater.train_step = train_or_hang  # type: ignore[method-assign]
        StateCopies.write = write_or_die  # type: ignore[method-assign]
