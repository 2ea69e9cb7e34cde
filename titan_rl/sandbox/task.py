"""The task that a setup names: its environment, and its examples by purpose and number."""

from __future__ import annotations

import importlib
import inspect
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from titan_rl.environments import SHORT_NAMES
from titan_rl.environments.base import Environment
from titan_rl.errors import TaskError
from titan_rl.importing import describe, import_file, import_name
from titan_rl.sandbox.wire import EnvironmentSetup, TaskCheck
from titan_rl.types import Example, Message, Purpose, ToolCall

COMPARE_SECONDS = 2.0
"""Time limit for comparing training prompts with held-out ones before a run."""
SHOWN_PROMPTS = 256
"""Training prompts that are tried with the tokenizer before a run."""
CACHED_EXAMPLES = 4096
"""Training examples that are cached. With fewer than are in flight, every reward would make its example again."""


def make_environment(setup: EnvironmentSetup) -> Environment:
    """Import what the setup names and build the environment.

    Raises:
        ConfigError: nothing has that name.
        TaskError: the name is not that of an environment.
    """
    for where in setup.imports:
        if where.endswith(".py"):
            import_file(where)
        else:
            importlib.import_module(where)
    cls = import_name(setup.name, SHORT_NAMES)
    if not (isinstance(cls, type) and issubclass(cls, Environment)):
        raise TaskError(f"environment.name {setup.name!r} is not a subclass of titan_rl.environments.base.Environment")
    kwargs = dict(setup.kwargs)
    if "seed" not in kwargs and "seed" in inspect.signature(cls).parameters:
        kwargs["seed"] = setup.run_seed
    return cls(**kwargs)


def plain(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Copy messages of user code into objects of our own classes only.

    Raises:
        TaskError: one is not a message.
    """
    for message in messages:
        if not (isinstance(message, Message) and isinstance(message.role, str) and isinstance(message.content, str)):
            raise TaskError(f"{message!r} is not a Message of two strings")
    return tuple(
        Message(
            str(message.role),
            str(message.content),
            tuple(ToolCall(str(call.name), dict(call.arguments), id=str(call.id)) for call in message.tool_calls),
            str(message.tool_call_id),
            str(message.reasoning),
            str(message.name),
        )
        for message in messages
    )


class Examples:
    """The examples of an environment, cached: any of them can be made again."""

    def __init__(self, environment: Environment, setup: EnvironmentSetup):
        self._environment = environment
        self._wanted = setup.held_out
        self._compare_seconds = min(COMPARE_SECONDS, setup.step_seconds / 2)
        self._held_out = self._hold_out()
        self.held_out = len(self._held_out)  # number of held-out prompts
        size = environment.size
        if size is not None and not (isinstance(size, int) and size > 0):
            raise TaskError(f"size is {size!r}; it is the number of training prompts, or None for an endless stream")
        sizes = [size for size in (size, setup.prompts) if size]
        self.size = min(sizes, default=None)  # distinct training prompts; None: endless
        self._made: OrderedDict[int, Example] = OrderedDict()

    def find(self, purpose: Purpose, index: int) -> Example:
        """Number `index` of the training stream, or of the held-out list.

        Raises:
            TaskError: there is no such held-out prompt.
            Exception: whatever the environment raises.
        """
        if purpose is Purpose.EVALUATE:
            if not 0 <= index < self.held_out:
                raise TaskError(f"there is no held-out prompt {index}: the environment gave {self.held_out}")
            return self._held_out[index]
        if self.size:
            index %= self.size
        example = self._made.get(index)
        if example is None:
            example = self._made[index] = _checked("example", self._environment.example(index))
            if len(self._made) > CACHED_EXAMPLES:
                self._made.popitem(last=False)
        return example

    def check(self, indices: int) -> TaskCheck:
        """Compare the first `indices` training prompts with the held-out ones, as far as `COMPARE_SECONDS` and
        half of `step_seconds` go.

        Raises:
            TaskError: something is no example, or `example` raised.
            Exception: whatever `held_out` raises.
        """
        until = time.monotonic() + self._compare_seconds
        held_out = tuple(plain(example.prompt) for example in self._held_out)
        places = {repr(prompt): place for place, prompt in enumerate(held_out)}
        training: list[tuple[Message, ...]] = []
        overlap = None
        for index in range(min(indices, self.size or indices)):
            try:
                prompt = plain(self.find(Purpose.TRAIN, index).prompt)
            except (Exception, SystemExit) as error:
                raise TaskError(f"example({index}): {describe(error)}") from error
            if len(training) < SHOWN_PROMPTS:
                training.append(prompt)
            if (place := places.get(repr(prompt))) is not None:
                overlap = (index, place)
            if overlap or time.monotonic() > until:
                break
        answers = [example.answer for example in (self.find(Purpose.TRAIN, 0), *self._held_out[:1])]
        said = [str(answer) if isinstance(answer, (str, int, float)) else "" for answer in answers]
        return TaskCheck(
            training=tuple(training),
            held_out=held_out,
            held_out_again=tuple(plain(example.prompt) for example in self._hold_out()),
            overlap=overlap,
            answers=(said[0], said[-1]),
        )

    def _hold_out(self) -> list[Example]:
        examples = self._environment.held_out(self._wanted) if self._wanted else []
        if not isinstance(examples, Iterable):
            raise TaskError(f"held_out gave {examples!r}, which is no sequence of examples")
        return [_checked("held_out", example) for example in examples]


def _checked(method: str, example: object) -> Example:
    if not isinstance(example, Example):
        raise TaskError(f"{method} gave {example!r}, which is no Example")
    return example
