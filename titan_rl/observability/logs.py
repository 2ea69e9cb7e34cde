"""One log file per process of a run.

Everything a process prints, Python or native, goes to its own file; the terminal belongs to the controller.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path

_log = logging.getLogger(__name__)

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def redirect_output(file: Path) -> None:
    """Send this process's standard output and error, and its logging, to `file` (appended)."""
    file.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    logging.basicConfig(level=logging.INFO, format=_FORMAT, force=True)


class _LogFile(logging.FileHandler):
    """Says once that it cannot be written (the disk is full); logging itself prints a traceback for every line."""

    _said = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._said:
            self._said = True
            print(f"{self.baseFilename} cannot be written: {sys.exc_info()[1]}", file=sys.stderr)


def log_to_file(file: Path) -> logging.Handler:
    """Send the controller's logging to `file`, with what its threads raise; its output stays in the terminal.

    Returns:
        The handler to remove.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(file)
    handler.setFormatter(logging.Formatter(_FORMAT))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    threading.excepthook = _log_thread
    return handler


def _log_thread(failed: threading.ExceptHookArgs) -> None:
    """A library's thread that dies (TensorBoard's, on a full disk) is no news for the terminal."""
    if failed.exc_value is not None:
        _log.error("thread %s failed", failed.thread, exc_info=failed.exc_value)
