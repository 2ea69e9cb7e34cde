"""What a task is: prompts by index, a rubric, and answers to the policy where a task has several turns.

A new task needs one file: a subclass of `Environment` and its reward functions, all importable from here.

    from titan_rl.environments.base import Environment, Example, Message, Rubric, tool

    @tool
    def multiply(first: int, second: int) -> str:
        'The product of two numbers.'
        return str(first * second)

    def right(example, transcript):
        return {"right": transcript.answer == example.answer, "turns": len(transcript.finish_reasons)}

    class Double(Environment):
        def example(self, index):
            return self._ask(1000 + index)

        def held_out(self, count):
            return [self._ask(number) for number in range(min(count, 1000))]

        def tools(self):
            return [multiply]

        def rubric(self):
            return Rubric(right)

        def _ask(self, number):
            return Example(prompt=(Message("user", f"2*{number}="),), answer=str(2 * number))

What must hold, because calls run in several processes, each of which may be killed and started anew at any time:

- `example`, `demonstration`, `held_out` and `size` depend on the constructor's arguments and on nothing else.
- A method keeps nothing for a later call. What a conversation needs is in the example, the transcript, or the
  `state` that `respond` returns (it must pickle) and finds again in `transcript.state`.
- Any call may be made again with the same arguments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any

from titan_rl.environments.rubric import GroupReward, Reward, Rubric, Transcript
from titan_rl.environments.tools import Tool, ToolError, tool
from titan_rl.errors import TaskError
from titan_rl.types import Endpoint, Example, Message, ToolCall

__all__ = [
    "Demonstration",
    "Endpoint",
    "Environment",
    "EnvironmentReply",
    "Example",
    "GroupReward",
    "Message",
    "Reward",
    "Rubric",
    "Tool",
    "ToolCall",
    "ToolError",
    "Transcript",
    "tool",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentReply:
    """What an environment says after a turn of the policy."""

    messages: tuple[Message, ...] = ()
    """Put in front of the policy next, in order; at least one unless `done`."""
    done: bool = False
    """The conversation is over and goes to the rubric."""
    state: Any = None
    """Comes back as `transcript.state`; must pickle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A conversation as it should go, for the supervised warm-up."""

    prompt: tuple[Message, ...]
    """As an example's."""
    messages: tuple[Message, ...]
    """What follows, a turn of the policy (role "assistant") first. Its turns are taught, each with the stop token that
    ends it; other messages are what the environment answers, and are only read."""
    answer: Any = None
    """As an example's: with it `titan-rl try` can play the demonstration and show its reward. Not needed to train."""


class Environment(ABC):
    """Base of every task.

    The constructor takes what `environment.kwargs` of the config holds. If it has a parameter `seed` that the kwargs
    do not set, it gets the run's seed, so that runs with different seeds see different prompts.
    """

    size: int | None = None
    """Distinct training prompts: `example` is asked for 0 .. size - 1 only, over and over. None: endless."""

    warning: str = ""
    """What a user should know of the prompts before a run starts, in one sentence; empty: nothing."""

    @staticmethod
    def from_examples(rows: Any, reward: Any, **options: Any) -> type[Environment]:
        """A task made of rows (a list of dicts, a JSON lines or Parquet file, a `datasets.Dataset`) and a reward:

            Riddles = Environment.from_examples("riddles.jsonl", right, prompt="question", answer="answer")

        Options are those of `dataset.DatasetEnvironment`. A tenth of the prompts is held out, by their text.
        """
        from titan_rl.environments.dataset import make_task

        return make_task(rows, reward, **options)

    @abstractmethod
    def example(self, index: int) -> Example:
        """Training prompt number `index` (>= 0): always the same one, and never one of the held-out prompts. Texts
        may repeat; the index is the prompt's identity."""

    @abstractmethod
    def held_out(self, count: int) -> list[Example]:
        """At most `count` prompts for evaluation, the same at every call and whatever the seed. A run is refused where
        they are not."""

    @abstractmethod
    def rubric(self) -> Rubric:
        """The rewards. Called once per process."""

    def respond(self, example: Example, transcript: Transcript) -> EnvironmentReply | Awaitable[EnvironmentReply]:
        """The answer to the policy's last turn; plain or `async def`. A task that does not define it has one turn.
        It is not asked about a turn that calls tools: the tools answer that."""
        return EnvironmentReply(done=True)

    def play(self, example: Example, endpoint: Endpoint) -> Any | Awaitable[Any]:
        """Play a whole rollout: any program that talks to `endpoint`, an OpenAI-compatible server in front of the
        policy, with whatever client it likes; plain or `async def`. A task that defines it is played this way and no
        other: `respond` is not asked and tools are not called. What is asked with the endpoint's key and what the
        policy answers is the conversation that is trained; it is over when this returns.

        It runs in a process of its own, forked from one that has made the environment: it may block, compute, exit and
        start processes, all of which end with the rollout. Its imports should be made with the environment, or every
        rollout repeats them; connections and threads should not.

        Returns:
            A state, which the rubric finds in `transcript.state`; it must pickle.
        """
        raise TaskError(f"{type(self).__name__} has no method `play`")

    def tools(self) -> Sequence[Tool]:
        """What the policy may call. Asked for once per process. Calls are answered until a turn makes none, or
        `rollout.max_turns` is reached: the calls of the last turn are not made."""
        return ()

    def tool_error(self, problem: str) -> str:
        """How the policy is told what is wrong with its call, a sentence."""
        return f"Error: {problem}"

    def demonstration(self, index: int) -> Demonstration:
        """Demonstration number `index` (>= 0): always the same one, and never of a held-out prompt. Asked for only when
        `trainer.warmup.steps` is not 0."""
        raise TaskError(f"{type(self).__name__} has no method `demonstration`, and trainer.warmup asks for it")
