"""Tasks that are played by programs, well-behaved and not; named by tests as `programs.py:Class`."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

from titan_rl.environments.base import Environment, Example, Message, Rubric
from titan_rl.environments.programs import run_command, run_script

IMPORTED_BY = os.getpid()


class Note:
    """A state of a class that only this file knows."""

    def __init__(self, text):
        self.text = text


def noted(example, transcript):
    return float(transcript.state.text == example.answer)


class Programs(Environment):
    """What a prompt's program does is named in `behaviour` by the prompt's number; by default it says who it is."""

    def __init__(self, behaviour=None, seed=0):
        self.behaviour = behaviour or {}

    def example(self, index):
        return Example(prompt=(Message("user", f"{index}="),), answer=str(index))

    def held_out(self, count):
        return [Example(prompt=(Message("user", f"{index}+"),), answer=f"held out {index}") for index in range(count)]

    def rubric(self):
        return Rubric(noted)

    def play(self, example, endpoint):
        return misbehave(self.behaviour.get(example.answer, "note"), example, endpoint)


def misbehave(how, example, endpoint):
    match how:
        case "note":
            return Note(example.answer)
        case "who":
            return {"pid": os.getpid(), "session": os.getsid(0), "imported by": IMPORTED_BY, "key": endpoint.api_key}
        case "nothing":
            return None
        case "raise":
            raise ValueError("boom")
        case "exit":
            sys.exit(3)
        case "crash":
            os._exit(3)
        case "vanish":
            os._exit(0)
        case "kill itself":
            os.kill(os.getpid(), signal.SIGKILL)
        case "unpicklable":
            return threading.Lock()
        case "large":
            return b"x" * (8 << 20)
        case "a command prints without end":
            return run_command(["yes"], endpoint=endpoint)
        case script if script.endswith(".py"):
            return run_script(script, endpoint=endpoint)
        case "rest":
            os.write(1, b"resting\n")  # at once: others write too
            signal.pause()
        case "burn":
            print(f"burning {os.getpid()}")
            while True:
                pass
        case "stubborn family":
            family = [stubborn(), stubborn(new_session=True), subprocess.Popen(["sleep", "600"]).pid]
            print("family", *family)
            while True:
                time.sleep(600)
        case "leaves family":
            family = [stubborn(), stubborn(new_session=True)]
            print("family", *family)
            return None


def stubborn(new_session=False):
    """A grandchild that ignores whatever can be ignored, orphaned at once."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        if os.fork() == 0:
            if new_session:
                os.setsid()
            for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(each, signal.SIG_IGN)
            os.write(writing, str(os.getpid()).encode())
            time.sleep(600)
        os._exit(0)
    os.wait()
    return int(os.read(reading, 32))


class AsyncPrograms(Programs):
    async def play(self, example, endpoint):
        await asyncio.sleep(0)
        return misbehave(self.behaviour.get(example.answer, "note"), example, endpoint)
