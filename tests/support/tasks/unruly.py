"""Tasks that misbehave where their kwargs say so; named by tests as `unruly.py:Class`."""

import asyncio
import multiprocessing
import os
import pickle
import signal
import socket
import stat
import struct
import subprocess
import time
from pathlib import Path

import msgspec
import numpy as np

from titan_rl.environments.base import Environment, EnvironmentReply, Example, GroupReward, Message, Reward, Rubric

hoard = []


class Forged:
    def __reduce__(self):
        return print, ("forged",)


def write_to_all_sockets(body: bytes, length: int | None = None) -> None:
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            connection = socket.socket(fileno=os.dup(int(descriptor)))
        except OSError:
            continue
        connection.sendall(struct.pack("<Q", len(body) if length is None else length) + body)


def close_all_sockets() -> None:
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            is_socket = stat.S_ISSOCK(os.fstat(descriptor).st_mode)
        except OSError:
            continue
        if is_socket:
            os.close(descriptor)


def misbehave(how: str) -> None:
    match how:
        case "raise":
            raise ValueError("boom")
        case "exit":
            exit(3)
        case "crash":
            os._exit(7)
        case "hang":
            os.write(1, f"hanging {os.getpid()}\n".encode())  # in one piece: others write lines beside it
            while True:
                pass
        case "print":
            print("a line on stdout")
            os.write(2, b"a line on stderr\n")
        case "hog":
            hoard.append(bytearray(1 << 30))
        case "hoard":  # in small pieces, which it keeps
            while True:
                hoard.append(bytes(1 << 20))
        case "a child hogs":
            subprocess.run(["python3", "-c", "bytearray(1 << 30)"], check=True)
        case "print for ever":
            while True:
                os.write(1, b"more\n" * 10_000)
        case "shout":
            raise ValueError("x" * (20 << 20))
        case "fork":  # keeps every inherited descriptor open for longer than a test may take
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)
            os._exit(7)
        case "tell variables":
            names = "PATH HOME HF_HOME LC_TIME OPENAI_API_KEY HF_TOKEN AWS_SECRET_ACCESS_KEY MY_GRADER_KEY".split()
            raise ValueError(" ".join(name for name in names if name in os.environ))
        case "escape":
            print("\x1b[2Jred")
            raise ValueError("\x1b[2Jboom")
        case "forge":  # a frame whose pickle would run code in its reader
            write_to_all_sockets(pickle.dumps(Forged()))
            time.sleep(60)
        case "flood":  # a frame longer than any memory
            write_to_all_sockets(b"much", length=1 << 60)
            time.sleep(60)
        case "lie":  # answers call number 3 with something else than a score
            write_to_all_sockets(msgspec.msgpack.encode((3, ["perfect"], None)))
        case "answer, then forge":  # in one piece
            answer = msgspec.msgpack.encode((3, (1.0, {}), None))
            write_to_all_sockets(answer + struct.pack("<Q", 4) + b"junk", length=len(answer))
            time.sleep(60)
        case "orphan":
            child = subprocess.Popen(["sleep", "60"])
            print(f"orphan {child.pid}", flush=True)
            os._exit(7)
        case "stop":  # goes on where it was when somebody says so
            print(f"stopped {os.getpid()}", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)


def obedient(example, transcript):
    if example.answer == "who":
        return os.getpid()
    misbehave(example.answer)
    return float(transcript.stopped)


async def obedient_async(example, transcript):
    if example.answer == "tell all":
        return {"reward": 1.0, "x" * (15 << 20): 1.0}
    if example.answer == "step on":
        await asyncio.sleep(0.2)
        os.write(1, b"went on\n")
    if example.answer == "await for ever":
        await asyncio.Event().wait()
    if example.answer == "ignore cancellation":
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue
    if example.answer == "cut off":  # once it has answered, its process can neither be asked nor answer any more
        asyncio.get_running_loop().call_later(0.05, close_all_sockets)
    await asyncio.sleep(0.01)
    misbehave(example.answer)
    return 1.0


class Unruly(Environment):
    """`behaviour` maps a prompt's index (as text) to what goes wrong when it is graded."""

    def __init__(self, behaviour: dict[str, str] | None = None, size: int | None = None, seed: int = 0):
        self.behaviour = behaviour or {}
        self.size = size
        self.seed = seed

    def example(self, index):
        how = self.behaviour.get(str(index), "")
        if how.startswith("example "):
            misbehave(how.removeprefix("example "))
        return Example(prompt=(Message("user", f"{index}="),), answer=how)

    def held_out(self, count):
        return [Example(prompt=(Message("user", f"{index}="),), answer="") for index in range(min(count, 3))]

    def rubric(self):
        return Rubric(obedient, Reward(lambda example, transcript: len(transcript.messages), weight=0, name="messages"))


def shorter(example, transcripts):
    """Where each answer stands in its group, the shortest first."""
    misbehave(example.answer.removeprefix("together "))
    lengths = [len(transcript.answer) for transcript in transcripts]
    return [sorted(lengths).index(length) for length in lengths]


async def shorter_async(example, transcripts):
    await asyncio.sleep(0)
    return shorter(example, transcripts)


class Compared(Unruly):
    """Graded together as well; `behaviour` "together …" goes wrong only then."""

    function = staticmethod(shorter)

    def rubric(self):
        return Rubric(obedient, GroupReward(self.function, weight=-0.5, name="place"))


class ComparedAsync(Compared):
    function = staticmethod(shorter_async)


class Meeting(Unruly):
    """The rewards of the first `parties` prompts wait for each other."""

    def __init__(self, parties: int):
        super().__init__()
        self.parties, self.barrier = parties, multiprocessing.Barrier(parties)

    def rubric(self):
        return Rubric(self.meet)

    def meet(self, example, transcript):
        if int(example.prompt[0].content.removesuffix("=")) < self.parties:
            self.barrier.wait()
        return 1.0


class Counted(Unruly):
    """Writes down where it was made, so that a test sees how often."""

    def __init__(self, path: str, behaviour: dict[str, str]):
        super().__init__(behaviour)
        with Path(path).open("a") as file:
            print(os.getpid(), file=file)


class Careless(Unruly):
    """Nobody is to be told of the end of children."""

    def __init__(self, **options):
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        super().__init__(**options)


class UnrulyAsync(Unruly):
    def rubric(self):
        return Rubric(obedient_async)


class Countdown(Unruly):
    """Answers the policy until it has spoken three times; the count is in the state, which is of a class that only
    this file knows."""

    def respond(self, example, transcript):
        state = transcript.state or Count(0)
        state.turns += 1
        if state.turns == 2:
            misbehave(example.answer)
        done = np.equal(state.turns, 3)  # numpy's own bool
        return EnvironmentReply(messages=(Message("user", f"{state.turns}="),), done=done, state=state)

    def rubric(self):
        return Rubric(counted)


class CountdownAsync(Countdown):
    async def respond(self, example, transcript):
        await asyncio.sleep(0)
        return super().respond(example, transcript)


class Count:
    def __init__(self, turns):
        self.turns = turns


def counted(example, transcript):
    return float(transcript.state.turns)


class NotPossible(Unruly):
    def __init__(self):
        raise RuntimeError("no data set here")


class NeverReady(Unruly):
    def __init__(self):
        misbehave("hang")
