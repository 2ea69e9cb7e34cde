"""Plays the flows of one client, one after the other, and prints a JSON line for each: its name and `ok`, or the error.

A flow is a function, or a coroutine function, named after what it tries; it fails by raising. Those of a script share
one event loop, as the connections of their client do.
"""

import asyncio
import atexit
import inspect
import json
import os
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

MODEL = os.environ["MODEL"]
URL = os.environ["OPENAI_BASE_URL"]
KEY = os.environ["OPENAI_API_KEY"]
RUNNER = asyncio.Runner()
atexit.register(RUNNER.close)


def play(*flows: Callable[..., Any], over: Mapping[str, Any] | None = None) -> None:
    """`over`: what each flow is played with, by its name; without it flows take nothing."""
    for name, given in over.items() if over else [("", None)]:
        for flow in flows:
            arguments = [given] if over else []
            began, result = time.monotonic(), "ok"
            try:
                if inspect.iscoroutinefunction(flow):
                    RUNNER.run(flow(*arguments))
                else:
                    flow(*arguments)
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)
                line = next((each for each in where if each.name == flow.__name__), where[-1])
                result = f"{type(error).__name__}: {error} (line {line.lineno}: {line.line})"
            told = {"flow": f"{name} {flow.__name__}".strip(), "result": result}
            print(json.dumps({**told, "seconds": round(time.monotonic() - began, 2)}), flush=True)
