"""Pages in headless Chromium, driven over its DevTools protocol.

Every console error, exception and network request of a page is collected."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

SECONDS = 60.0


def chromium() -> str:
    """Its program; skips the test where it is missing."""
    beside_python = str(Path(sys.executable).parent)  # where scripts/chromium.py puts it
    program = shutil.which("chromium", path=beside_python) or shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("headless Chromium is missing: scripts/chromium.py, or apt-get install chromium")
    return program


class Page:
    """One page. What a test looks at afterwards: `errors` and `requests`."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._next = 0
        self._loaded = False
        self._file = ""
        self.errors: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def open(self, file: Path, width: int = 1280, height: int = 900, *, dark: bool = False) -> None:
        """Load a report, and wait until it is whole."""
        self._file = file.resolve().as_uri()
        self.errors.clear()
        self.requests.clear()
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if width < 600 else 1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded = False
        self.ask("Page.navigate", url=self._file)
        while not self._loaded:
            self._hear(json.loads(self._connection.recv(timeout=SECONDS)))
        self.wait("document.documentElement.dataset.ready === 'true'")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to one command."""
        self._next += 1
        self._connection.send(json.dumps({"id": self._next, "method": method, "params": parameters}))
        while (message := json.loads(self._connection.recv(timeout=SECONDS))).get("id") != self._next:
            self._hear(message)
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']}")
        return message["result"]

    def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        answer = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until an expression holds."""
        look = f"({condition}) ? resolve(true) : Date.now() > last ? resolve(false) : setTimeout(look, 10)"
        held = self.run(
            f"new Promise((resolve) => {{ const last = Date.now() + {1000 * SECONDS / 4};"
            f" const look = () => {look}; look(); }})"
        )
        assert held, f"it never came to {condition}; errors of the page: {self.errors}"

    def use_every_control(self) -> int:
        """Click every button, open every fold, change every input; returns the number of different controls."""
        return self.run(Path(__file__).with_name("use_every_control.js").read_text())

    def picture(self, file: Path, *, whole: bool = True) -> Path:
        """A screenshot."""
        if whole:
            height = self.run("document.documentElement.scrollHeight")
            width = self.run("innerWidth")
            clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
            data = self.ask("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"]
        else:
            data = self.ask("Page.captureScreenshot")["data"]
        file.write_bytes(base64.b64decode(data))
        return file

    def _hear(self, message: dict[str, Any]) -> None:
        method, told = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(each.get("value", each)) for each in told["args"]))
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent" and told["request"]["url"].partition("#")[0] != self._file:
            if not told["request"]["url"].startswith("data:"):
                self.requests.append(told["request"]["url"])


@contextmanager
def opened(profile: Path) -> Iterator[Page]:
    """A page in a browser of its own.

    Args:
        profile: an empty directory.
    """
    program = subprocess.Popen(
        [
            chromium(),
            "--headless=new",
            "--no-sandbox",  # containers run as root
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--log-level=3",
            "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
            "about:blank",
        ],
        env={**os.environ, "LC_ALL": "en_US.UTF-8"},  # of the language POSIX no number can be formatted
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert program.stderr is not None
        address = next(line.split()[-1] for line in program.stderr if line.startswith("DevTools listening on "))
        with connect(address, max_size=None) as browser:
            browser.send(json.dumps({"id": 1, "method": "Target.getTargets"}))
            targets = json.loads(browser.recv(timeout=SECONDS))["result"]["targetInfos"]
        (target,) = (each["targetId"] for each in targets if each["type"] == "page")
        with connect(f"{address.partition('/devtools')[0]}/devtools/page/{target}", max_size=None) as connection:
            yield Page(connection)
    finally:
        program.kill()
        program.wait()
