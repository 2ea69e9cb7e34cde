"""One run from its start to its end, with faults on the way.

- The run is started as a user would start it. It is started again only when a fault has ended its controller, on all
  hosts that are there by then.
- Faults come one at a time, each after its step has finished.
- Whatever happens, no process of the run is left when `train` returns.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from chaos_parts.faults import MARK, WHILE_SECONDS, Attack, Hit, marked
from chaos_parts.ground import Ground, inner_pid
from chaos_parts.schedule import ENDS_CONTROLLER, KINDS, Fault, Injected, read_log

LOOK_SECONDS = 0.02
STALL_SECONDS = 300.0
"""A run that finishes no step for so long has failed."""
GONE_SECONDS = 30.0
"""How long the processes of a controller that has ended may take to end."""
NOTHING_TO_HIT_SECONDS = 60.0
"""A fault that finds nothing to hit is tried again for so long, then left out."""
RETRY_SECONDS = 0.5
ENDINGS = {-signal.SIGKILL, 128 + signal.SIGTERM}


class RunFailed(Exception):
    """A run did not come to its end."""


@dataclass(slots=True)
class Outcome:
    """What became of one run."""

    directory: Path
    """Holds the run's directory, its output and its temporary files."""
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    ground: Ground = field(default_factory=Ground)
    controllers: list[int] = field(default_factory=list)
    """Process ids on their host, one for each start."""
    finished: dict[int, float] = field(default_factory=dict)
    """When each step was finished for the first time, in seconds since the epoch."""
    moments: list[float] = field(default_factory=list)
    """The same of all steps, those that were made twice included."""
    injected: list[Injected] = field(default_factory=list)

    @property
    def run(self) -> Path:
        """Its directory; one that does not exist, if it never started."""
        return next(self.directory.glob("*/config.toml"), self.directory / "none" / "config.toml").parent

    @property
    def scratch(self) -> Path:
        return self.directory / "tmp"

    @property
    def output(self) -> Path:
        return self.directory / "output.log"

    @property
    def seconds(self) -> float:
        """From the end of the first step to the end of the last."""
        return max(self.finished.values()) - min(self.finished.values()) if self.finished else 0.0


def train(outcome: Outcome, settings: Sequence[str], faults: Sequence[Fault]) -> None:
    """Make the run; all that is known of it goes into `outcome`.

    Raises:
        RunFailed: it ended by itself before its last step, or stalled.
    """
    outcome.scratch.mkdir(parents=True)
    _Runner(outcome, settings, faults).run()


class _Runner:
    def __init__(self, outcome: Outcome, settings: Sequence[str], faults: Sequence[Fault]) -> None:
        self._outcome = outcome
        self._settings = settings
        self._left = list(faults)
        self._began = time.time()
        self._known = 0  # steps in metrics
        self._stepped = False  # whether this controller has finished a step
        self._size = -1
        self._moved = time.time()
        self._process: subprocess.Popen[bytes]
        self._not_before = 0  # step; passing troubles let several faults come due
        self._injecting: tuple[Fault, Future[Hit]] | None = None
        self._retry_until = self._next_try = 0.0
        self._passing: tuple[Injected, Hit] | None = None

    def run(self) -> None:
        with ThreadPoolExecutor(1) as self._hands:
            try:
                self._start()
                while self._process.poll() != 0:
                    self._look()
                    time.sleep(LOOK_SECONDS)
                self._read_steps()
                self._say(f"completed after {time.time() - self._began:.0f} s")
            finally:
                self._take_back()
                self._end_all()
                self._outcome.ground.close()

    def _look(self) -> None:
        self._read_steps()
        if self._injecting is not None and self._injecting[1].done():
            self._note_hit()
        if self._passing is not None and self._has_passed(self._passing[0]):
            self._take_back()
        if (code := self._process.poll()) is not None:
            return self._start_again(code) if code else None
        if self._left and self._injecting is None and self._passing is None and time.time() >= self._next_try:
            if self._stepped and max(self._outcome.finished) >= max(self._left[0].step, self._not_before):
                self._begin(self._left.pop(0))
        if time.time() > self._moved + STALL_SECONDS:
            os.kill(self._process.pid, signal.SIGUSR1)  # it logs what it waits for
            time.sleep(2.0)
            raise RunFailed(f"no step was finished for {STALL_SECONDS:g} s after {self._last()}{self._tail()}")

    def _has_passed(self, injected: Injected) -> bool:
        """What is only noticed by who needs it, such as a full disk, goes on until then, unless it is the last."""
        lasts, seen = time.time() - injected.at, KINDS[injected.fault.kind].seen
        noticed = not seen or not self._left or self._logged(seen, injected.at) is not None
        return lasts > WHILE_SECONDS and (noticed or lasts > NOTHING_TO_HIT_SECONDS)

    # Starts and ends.

    def _start(self) -> None:
        outcome = self._outcome
        environment = {**os.environ, "OMP_NUM_THREADS": "1", MARK: outcome.mark}
        command = ["titan_rl.train", *self._settings, "--resume", "auto", "--logging.directory", str(outcome.directory)]
        # a path as long as that of the scratch directory may be too long for sockets; then the run uses /tmp
        self._process = outcome.ground.start(command, environment, outcome.scratch, outcome.output)
        outcome.controllers.append(inner_pid(self._process.pid))
        self._stepped, self._moved = False, time.time()

    def _start_again(self, code: int) -> None:
        """After the controller's end."""
        if self._injecting is not None:  # it ends within moments, and says what it has hit
            self._injecting[1].exception()
            self._note_hit()
        last = self._outcome.injected[-1] if self._outcome.injected else None
        ended = last if last is not None and last.fault.kind in ENDS_CONTROLLER and last.detected is None else None
        if ended is None or code not in ENDINGS:
            raise RunFailed(f"the run ended with exit code {code} after {self._last()}{self._tail()}")
        self._wait_until_gone(self._outcome.ground.is_controllers)
        ended.detected = time.time() - ended.at
        self._wait_until_gone()  # other hosts are cut off
        self._take_back()
        said = self._outcome.output.stat().st_size
        self._start()
        ended.steps_redone = max(self._outcome.finished, default=0) - self._step_of_checkpoint(said)

    def _step_of_checkpoint(self, said: int) -> int:
        """The step that the run goes on after, once its output (from here on) says so."""
        until = time.monotonic() + STALL_SECONDS
        while time.monotonic() < until and self._process.poll() is None:
            for line in self._outcome.output.read_bytes()[said:].decode(errors="replace").splitlines():
                if line.startswith("going on after step "):
                    return int(line.split()[4])
                if "the run starts over" in line:
                    return 0
            time.sleep(LOOK_SECONDS)
        return max(self._outcome.finished, default=0)

    def _wait_until_gone(self, which: Callable[[int], bool] = lambda pid: True) -> None:
        until = time.monotonic() + GONE_SECONDS
        while left := [pid for pid in self._processes() if which(pid)]:
            if time.monotonic() > until:
                raise RunFailed(f"{GONE_SECONDS:g} s after {self._last()} these processes live: {left}")
            time.sleep(LOOK_SECONDS)

    def _processes(self) -> list[int]:
        return [pid for pid in marked(self._outcome.mark) if pid not in self._outcome.ground.idle()]

    def _end_all(self) -> None:
        """Nothing of the run is left, even if it has to be killed."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GONE_SECONDS)
        if self._process.poll() != 0:
            for pid in marked(self._outcome.mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.wait()

    # Faults.

    def _begin(self, fault: Fault) -> None:
        """Begin a fault; some take a while to find their moment."""
        outcome = self._outcome
        attack = Attack(self._process.pid, outcome.mark, outcome.run, outcome.ground, self._logged)
        self._injecting = fault, self._hands.submit(attack.inject, fault)

    def _note_hit(self) -> None:
        assert self._injecting is not None
        (fault, future), self._injecting = self._injecting, None
        try:
            hit = future.result()
        except (LookupError, OSError) as error:  # nothing is there to be hit at this very moment
            self._retry_until = self._retry_until or time.time() + NOTHING_TO_HIT_SECONDS
            if time.time() < self._retry_until:
                self._left.insert(0, fault)
                self._next_try = time.time() + RETRY_SECONDS
            else:
                self._retry_until = 0.0
                self._say(f"left out: {fault.kind}: {error}")
            return
        self._retry_until = 0.0
        if self._left:
            self._not_before = max(self._outcome.finished) + (self._left[0].step - fault.step) // 2
        injected = Injected(fault=fault, what=hit.what, at=hit.at, mesh=hit.mesh)
        self._outcome.injected.append(injected)
        if hit.undo is not None:
            self._passing = injected, hit
        self._say(hit.what)

    def _take_back(self) -> None:
        if self._passing is not None:
            (injected, hit), self._passing = self._passing, None
            assert hit.undo is not None
            hit.undo()
            injected.until = time.time()

    def _logged(self, text: str, since: float) -> float | None:
        log = read_log((self._outcome.run / "logs" / "controller.log").read_text())
        return next((line.at for line in log if line.at >= since and text in line.text), None)

    # What it says.

    def _read_steps(self) -> None:
        """Note the steps that were finished since the last look. A run that goes on cuts some off again."""
        metrics = self._outcome.run / "metrics.jsonl"
        size = metrics.stat().st_size if metrics.exists() else 0
        if size == self._size:
            return
        self._size, now = size, time.time()
        steps = list(_steps_in(metrics)) if size else []
        for step in steps[self._known :]:
            self._outcome.moments.append(now)
            self._outcome.finished.setdefault(step, now)
            self._stepped, self._moved = True, now
        self._known = len(steps)

    def _say(self, what: str) -> None:
        step = max(self._outcome.finished, default=0)
        print(f"{time.time() - self._began:7.1f} s  step {step:4}  {what}", flush=True)

    def _last(self) -> str:
        return f"'{self._outcome.injected[-1].what}'" if self._outcome.injected else "its start"

    def _tail(self) -> str:
        lines = self._outcome.output.read_text(errors="replace").splitlines()[-6:]
        return "; it said last:\n  " + "\n  ".join(lines)


def _steps_in(metrics: Path) -> Iterator[int]:
    """Numbers of the steps that were trained, in the order of their lines."""
    for line in metrics.read_text().splitlines(keepends=True):
        if line.endswith("\n") and "train/loss" in (numbers := json.loads(line)):
            yield numbers["step"]
