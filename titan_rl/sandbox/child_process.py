"""One life of an environment's child process: batches of calls, and which of them is to blame when it dies.

- `run` ends: with the child's own end of the batch, or with a `Death` that names the call to blame where one is known.
  The bound is the child's own progress, read from the shared cell by a timer that sleeps exactly until the running call
  would be slow, and then late.
- After a `Death`, or `stop`, the process is gone (`SpawnedProcess`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from titan_rl.sandbox.environment_wire import Answer, Call, EnvironmentSetup, ProgressCell, TaskInfo
from titan_rl.sandbox.spawned_process import SpawnedProcess

BETWEEN_CALLS_SECONDS = 5.0
"""What a child may add to a call's own time for pickling and for coroutines that are slow to be cancelled."""


class Death(NamedTuple):
    """Why a batch did not finish."""

    cause: str
    blamed: int
    """Position of the call that ran when the process died, or `ProgressCell.NOBODY`."""
    late: bool
    """The call was killed for running too long, so trying it again would only take as long again."""


class ChildProcess:
    """A running child. Make one with `start`."""

    def __init__(self, setup: EnvironmentSetup):
        self._setup = setup
        self._loop = asyncio.get_running_loop()
        self._process = SpawnedProcess("titan_rl.sandbox.environment_child")
        self._cell: ProgressCell | None = ProgressCell.create()
        self._verdict: Death | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._on_slow: Callable[[int], None] = lambda position: None
        self.slow = False
        """The batch that it runs has lasted longer than `slow_seconds`."""
        self.info = TaskInfo(size=None, held_out=0, multi_turn=False)

    @staticmethod
    async def start(setup: EnvironmentSetup) -> ChildProcess:
        """Spawn a child and wait until its environment is made.

        Raises:
            TaskError: the environment could not be imported or made, or not within `setup.start_seconds`.
        """
        child = ChildProcess(setup)
        assert child._cell is not None
        try:
            child.info = await child._process.make_environment(setup, (child._cell.fd,))
        except BaseException:
            child._close_cell()
            raise
        return child

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def exited(self) -> bool:
        return self._process.exited

    async def run(
        self,
        calls: Sequence[Call],
        deliver: Callable[[Answer], None],
        on_slow: Callable[[int], None],
        *,
        at_once: bool = False,
    ) -> Death | None:
        """Run a batch. None when it is over: calls that got no answer were not begun.

        Args:
            deliver: gets each answer as it comes.
            on_slow: called once if the batch is slow, with the position of the call that has run for so long, after
                which no plain one is begun; `ProgressCell.NOBODY` where coroutines wait.
            at_once: every answer is sent before the next call begins, which may be one that hangs.
        """
        assert self._cell is not None
        self._cell.mark(ProgressCell.NOBODY)
        self._on_slow = on_slow
        self._watch(self._setup.slow_seconds)
        try:
            self._process.send((calls, at_once))
            await self._process.drain()
            while (answers := await self._process.receive()) is not None:
                for answer in answers:
                    deliver(answer)
            return None
        except (EOFError, OSError):
            blamed = await self.stop()
            return self._verdict or Death(f"the environment's process {self._process.ending()}", blamed, late=False)
        finally:
            self.slow = False
            if self._timer is not None:
                self._timer.cancel()

    async def stop(self, *, patient: bool = True) -> int:
        """End the process, see `SpawnedProcess.stop`; may be called again.

        Returns:
            Position of the call that ran when it ended, or `ProgressCell.NOBODY`.
        """
        await self._process.stop(patient=patient)
        return self._close_cell()

    def _close_cell(self) -> int:
        cell, self._cell = self._cell, None
        if cell is None:
            return ProgressCell.NOBODY
        position, _ = cell.read()
        cell.close()
        return position

    def _watch(self, seconds: float) -> None:
        self._timer = self._loop.call_later(seconds, self._check_progress)

    def _check_progress(self) -> None:
        if self._cell is None or self._process.exited:
            return
        position, age = self._cell.read()
        nobody = position == ProgressCell.NOBODY
        if not self.slow and (nobody or age >= self._setup.slow_seconds):
            self.slow = True
            self._on_slow(position)
        limit = self._setup.step_seconds + (BETWEEN_CALLS_SECONDS if nobody else 0.0)
        if age < limit:
            self._watch((limit if self.slow else self._setup.slow_seconds) - age)
            return
        late = f"did not finish within {self._setup.step_seconds:g} s and was killed"
        self._verdict = Death(late, position, late=True)
        self._process.kill()
