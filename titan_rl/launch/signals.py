"""Signals of the controller: heard in one place, from before anything is spawned until the process's last instruction.

- From `hold_signals` on they wait until `StopSignals` hears them: there is no event loop yet that could.
- The first SIGINT, SIGTERM or SIGHUP ends the work in hand; what follows (saving the weights, closing) goes on.
- Each further one only skips the saving. None ever interrupts the closing, and none kills this process: the handlers
  stay until `processes.leave` ends it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from types import FrameType

from titan_rl.errors import Stopped, TitanError

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def hold_signals() -> None:
    """Keep signals waiting until `StopSignals`. Call it in the main thread, before any process is spawned."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


class StopSignals:
    """Passes each signal on as `Stopped`, in the main thread, also while the event loop sleeps."""

    def __init__(self, report: Callable[[TitanError], None]) -> None:
        """Call it in the main thread, in the event loop of the run.

        Args:
            report: told of every signal.
        """
        self._report = report
        self._waking, signalled = socket.socketpair()
        for end in (self._waking, signalled):
            end.setblocking(False)
        # Any thread may be the one that the kernel interrupts; this byte wakes the loop, whose thread runs the handler.
        # `loop.add_signal_handler` does the same, but takes its handlers away when the loop is closed.
        asyncio.get_running_loop().add_reader(self._waking, lambda: self._waking.recv(64))
        signal.set_wakeup_fd(signalled.detach(), warn_on_full_buffer=False)
        for number in _SIGNALS:
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has set it
                signal.signal(number, self._hear)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _forget_terminal()
        self._report(Stopped(number))


def _forget_terminal() -> None:
    """Once the terminal is gone every word to it is an error, which would end the run in the middle of its clean-up."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
