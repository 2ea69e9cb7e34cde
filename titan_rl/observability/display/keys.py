"""Single keys of a terminal while a run goes on. Whatever happens to the process, the terminal is as it was before.

- Ctrl-C, Ctrl-Z and Ctrl-\\ are still signals; only lines and the echo are off.
- The terminal is given back at the end, and before the process is stopped (Ctrl-Z, SIGTSTP) or killed by Ctrl-\\
  (SIGQUIT). After `fg` the keys work again; after `bg` they are left alone: the terminal is somebody else's.
- SIGINT, SIGTERM and SIGHUP end a run in good order, so they come here as the end of the block.
"""

from __future__ import annotations

import asyncio
import os
import signal
import termios
import tty
from collections.abc import Callable
from types import FrameType

_LEAVING = (signal.SIGTSTP, signal.SIGQUIT)


class Keys:
    """Inside its block, calls back with every key. Enter it in the main thread, in the event loop that is to hear."""

    def __init__(
        self,
        on_key: Callable[[str], None],
        *,
        terminal: int = 0,
        give_back: Callable[[], object] = lambda: None,
        take: Callable[[], object] = lambda: None,
    ) -> None:
        """
        Args:
            terminal: a descriptor; one that is no terminal gives no keys.
            give_back, take: called when the terminal is somebody else's for a while, and when it is ours again.
        """
        self._on_key = on_key
        self._terminal = terminal
        self._give_back, self._take = give_back, take
        self._before: list[object] | None = None  # the terminal's settings; None: they are not ours now
        self._handlers: dict[int, object] = {}

    @property
    def works(self) -> bool:
        return bool(self._handlers)

    def __enter__(self) -> Keys:
        if self._is_ours():
            self._set()
            asyncio.get_running_loop().add_reader(self._terminal, self._read)
            self._handlers = {number: signal.signal(number, self._leave) for number in _LEAVING}
        return self

    def __exit__(self, *_: object) -> None:
        if self._handlers:
            asyncio.get_running_loop().remove_reader(self._terminal)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)  # type: ignore[arg-type]
            self._handlers = {}
        self._restore()

    def _is_ours(self) -> bool:
        try:
            return os.isatty(self._terminal) and os.tcgetpgrp(self._terminal) == os.getpgrp()
        except OSError:  # it is gone, or not our controlling terminal
            return False

    def _set(self) -> None:
        before = termios.tcgetattr(self._terminal)
        tty.setcbreak(self._terminal, termios.TCSANOW)
        self._before = before

    def _restore(self) -> None:
        before, self._before = self._before, None
        if before is not None and self._is_ours():
            try:
                termios.tcsetattr(self._terminal, termios.TCSANOW, before)  # type: ignore[arg-type]
            except termios.error:  # it is gone
                pass

    def _read(self) -> None:
        try:
            keys = os.read(self._terminal, 64)
        except OSError:  # it is gone
            keys = b""
        if not keys:
            asyncio.get_running_loop().remove_reader(self._terminal)
        for key in keys.decode(errors="ignore"):
            self._on_key(key)

    def _leave(self, number: int, frame: FrameType | None) -> None:
        """Do what the signal does by default, with the terminal as it was."""
        self._give_back()
        self._restore()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        # Stopped here, until SIGCONT.
        signal.signal(number, self._leave)
        if self._is_ours():
            self._set()
            self._take()
