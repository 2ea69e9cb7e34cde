"""What a task is: prompts by index, a rubric, and answers to the policy where a task has several turns.

A new task needs one file: a subclass of `Environment` and its reward functions, all importable from here. The README
begins with one.

What must hold, because calls run in several processes, each of which may be killed and started anew at any time:

- `example`, `demonstration`, `initial_state`, `held_out` and `size` depend on the constructor's arguments, and on
  nothing else.
- A method or a tool keeps nothing for a later call. What a conversation needs is in the example, the transcript, or
  the state that `initial_state` makes, tools change, and `respond` returns and finds in `transcript.state`.
- Any call may be made again with the same arguments.
"""

import inspect
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_rl.environments.dataset import HELD_OUT_SHARE, SUFFIXES, Rows, is_held_out, prompt_messages, read_rows
from titan_rl.environments.rubric import GroupReward, Reward, RewardFunction, Rubric, Transcript
from titan_rl.environments.tools import State, Tool, ToolError, tool
from titan_rl.errors import ConfigError, TaskError
from titan_rl.importing import import_file, import_name
from titan_rl.one_line import one_line
from titan_rl.seeding import derive_seed
from titan_rl.types import Endpoint, Example, Message, ToolCall

__all__ = ["DatasetEnvironment", "Demonstration", "Endpoint", "Environment", "EnvironmentReply", "Example"]
__all__ += ["GroupReward", "Message", "Reward", "Rubric", "State"]
__all__ += ["Tool", "ToolCall", "ToolError", "Transcript", "tool"]

TOOL_ERROR = "Error: "
"""How `Environment.tool_error` begins, where a task does not define it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentReply:
    """What an environment says after a turn of the policy."""

    messages: tuple[Message, ...] = ()
    """Put in front of the policy next, in order; at least one unless `done`."""
    done: bool = False
    """The conversation is over and goes to the rubric."""
    state: Any = None
    """Comes back as `transcript.state`; must pickle. None: as it was."""
    reward: float | None = None
    """Of the turn that it answers, added to the rollout's reward; None: the task gives this turn none."""
    role: str = ""
    """Whose turn that was, in a game or a team: each role has credit of its own. A role's reward is the score of its
    name, or else that of the whole rollout; and the rewards of its turns."""
    anew: bool = False
    """The policy sees `messages` alone from now on, and nothing of what was said before: another player's view, or a
    summary. `transcript.messages` begin with them. A view that repeats what its player saw and said continues it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A conversation as it should go, for the supervised warm-up."""

    prompt: tuple[Message, ...]
    messages: tuple[Message, ...]
    """What follows, a turn of the policy (role "assistant") first. Its turns are taught, each with the stop token that
    ends it; other messages are what the environment answers, and are only read."""
    answer: Any = None
    """As an example's: with it `titan-rl try` can play the demonstration and show its reward. Not needed to train."""
    rejected: tuple[Message, ...] = ()
    """What should not follow, in the same form: `trainer.warmup.dpo_beta` asks for it."""


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
    def from_examples(rows: Any, reward: Any, **options: Any) -> type["Environment"]:
        """A task made of rows (a list of dicts, a JSON lines or Parquet file, a `datasets.Dataset`) and a reward:

            Riddles = Environment.from_examples("riddles.jsonl", right, prompt="question", answer="answer")

        Options are those of `DatasetEnvironment`. A tenth of the prompts is held out, by their text.
        """
        path = rows if isinstance(rows, (str, Path)) else list(rows)

        class DatasetTask(DatasetEnvironment):
            def __init__(self, seed: int = 0):
                super().__init__(path, reward, seed=seed, **options)

        return DatasetTask

    @abstractmethod
    def example(self, index: int) -> Example:
        """Training prompt number `index` (>= 0): always the same one, and never one of the held-out prompts. Texts
        may repeat; the index is the prompt's identity."""

    @abstractmethod
    def held_out(self, count: int) -> list[Example]:
        """At most `count` prompts for evaluation, the same for every seed. A run is refused if a second call gives
        others."""

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
        rollout repeats them; connections and threads should not. Returns a state, which the rubric finds in
        `transcript.state`; it must pickle.
        """
        raise TaskError(f"{type(self).__name__} has no method `play`")

    def initial_state(self, example: Example) -> Any:
        """What a rollout begins with, such as a budget, a notebook or a board: `transcript.state`, which `respond` may
        replace, and what a tool gets in a parameter of type `State`. It must pickle: every call may be made in another
        process."""
        return None

    def clean_up(self, example: Example, transcript: Transcript) -> None | Awaitable[None]:
        """Free what a rollout's state names, such as a server that a tool has started; plain or `async def`. Called
        once for every rollout with a state that a tool, `respond` or `play` has left, when it is graded, has failed or
        was given up. What a call opened that then raised is not known, nor is it called where its rollout worker dies:
        what must be freed even then needs an expiry of its own. One that raises fails its rollout."""
        return None

    def tools(self) -> Sequence[Tool]:
        """What the policy may call. Asked for once per process. Calls are answered until a turn makes none, or
        `rollout.max_turns` is reached: the calls of the last turn are not made."""
        return ()

    def tool_error(self, problem: str) -> str:
        """How the policy is told what is wrong with its call, a sentence."""
        return f"{TOOL_ERROR}{problem}"

    def demonstration(self, index: int) -> Demonstration:
        """Demonstration number `index` (>= 0): always the same one, and never of a held-out prompt. Asked for only when
        `trainer.warmup.steps` is not 0. A task of one turn that does not define it shows right answers: those of its
        examples that are texts or numbers."""
        kind, example = type(self), self.example(index % self.size if self.size else index)
        turns = (kind.respond, kind.tools, kind.play) != (Environment.respond, Environment.tools, Environment.play)
        if turns or not (answer := right_answer(example)):
            raise TaskError(
                f"{type(self).__name__} has no method `demonstration`, and example({index}) no answer, a text or a "
                "number, that is all there is to say; trainer.warmup asks for one of them"
            )
        said = [(Message("assistant", text),) for text in (answer, example.rejected) if text]
        return Demonstration(prompt=example.prompt, messages=said[0], answer=example.answer, rejected=sum(said[1:], ()))


def right_answer(example: Example) -> str:
    """What the policy should say, if the example's answer is a text or a number; else nothing."""
    return str(example.answer) if isinstance(example.answer, (str, int, float)) else ""


def exact_match(example: Example, transcript: Transcript) -> float:
    """1 when the answer is the right text, ended by the policy itself."""
    right = right_answer(example)
    return float(transcript.stopped and right != "" and transcript.answer == right)


def task_settings(task: str) -> list[tuple[str, list[str]]]:
    """What TASK of a command line means, settings and their words: a file with one task, `file.py:Class`, a bundled
    task's name, or a file of rows. Raises ConfigError as `find_task`."""
    if task.endswith(SUFFIXES):
        return [("environment.name", ["dataset"]), ("environment.kwargs.path", [task])]
    return [("environment.name", [find_task(task) if task.endswith(".py") else task])]


def find_task(file: str) -> str:
    """`file.py:Name` of the only task in a file: a class of its own, or what `from_examples` made. Raises ConfigError
    if there is none, or several."""
    module = import_file(file)
    found = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Environment) and not inspect.isabstract(value)
        # else it was imported: what `from_examples` makes has the name of nothing
        if value.__module__ == module.__name__ or getattr(sys.modules[value.__module__], name, None) is not value
    }
    found = {name: task for name, task in found.items() if not any(task in each.__mro__[1:] for each in found.values())}
    if len(found) == 1:
        return f"{file}:{next(iter(found))}"
    if found:
        raise ConfigError(f"{file} has several tasks: say which, as {' or '.join(f'{file}:{name}' for name in found)}")
    raise ConfigError(
        f"{file} has no task: a subclass of titan_rl.environments.base.Environment with `example`, `held_out` and "
        "`rubric`, or what Environment.from_examples(rows, reward) returns"
    )


class DatasetEnvironment(Environment):
    """Rows of a data set as a task: a column is the prompt, a column the answer, a function the reward.

    In a recipe or TOML file, without any code but the reward's:

        [environment]
        name = "dataset"
        [environment.kwargs]
        path = "riddles.jsonl"
        reward = "riddles.py:right"

    Args:
        path: the rows. A relative file name starts at the TOML file that holds it, else at the working directory.
        reward: a reward function, a `Reward`, a `Rubric`, or the name of one (`file.py:function`, `pkg.mod:function`);
            by default 1 for the right text.
        prompt: column of the prompt, a text (a user's message) or a list of `{"role": …, "content": …}`.
        answer: column of what the reward finds as `example.answer`; empty: the whole row.
        rejected: column of a worse answer, a text; empty: there is none.
        system: text of a system message before every prompt; empty: none.
        test_path: rows to evaluate on; empty: a tenth of the rows.
        seed: decides the order of the training prompts, not which ones are held out.

    Raises:
        ConfigError: a file or a row cannot be read, or no row is left to train on.
    """

    stream = "dataset"
    """Seed namespace of the order of the rows."""
    settings = ("path", "test_path")
    """Arguments that hold the rows, for messages."""

    def __init__(
        self,
        path: Rows,
        reward: str | RewardFunction | Reward | Rubric = exact_match,
        prompt: str = "prompt",
        answer: str = "answer",
        rejected: str = "",
        system: str = "",
        test_path: Rows = "",
        seed: int = 0,
    ):
        rewards = import_name(reward) if isinstance(reward, str) else reward
        self._rubric = rewards if isinstance(rewards, Rubric) else Rubric(rewards)
        self._columns = (prompt, answer, rejected)
        self._system = (Message("system", system),) if system else ()
        rows = list(self._examples(self.settings[0], path))
        if by_text := isinstance(test_path, (str, Path)) and not str(test_path):
            test = [(text, example) for text, example in rows if is_held_out(text)]
        else:
            test = list(self._examples(self.settings[1], test_path))
        tested = {text for text, _ in test}
        self._test = [example for _, example in test]
        self._train = [example for text, example in rows if text not in tested]
        self.size = len(self._train)
        where = f"environment.kwargs.{self.settings[0]}" if isinstance(path, (str, Path)) else "the task's rows"
        left_out = len(rows) - self.size
        repeats = len(rows) - len({text for text, _ in rows})
        repeated = f"{repeats} of {len(rows)} rows repeat the prompt of an earlier row"
        if not self._train:
            raise ConfigError(f"{where}: all rows are held out" + f"; {repeated}" * (repeats > 0))
        if left_out and not by_text:
            self.warning = f"{where}: prompts of {self.settings[1]} are in {left_out} of {len(rows)} rows: not trained"
        elif repeats * HELD_OUT_SHARE > len(rows):
            self.warning = f"{where}: {repeated}, which is right only if a prompt has several answers"
        random.Random(derive_seed(self.stream, seed)).shuffle(self._train)

    def example(self, index: int) -> Example:
        return self._train[index % len(self._train)]

    def held_out(self, count: int) -> list[Example]:
        examples = list(self._test)
        if len(examples) > count:
            examples = random.Random(derive_seed(f"{self.stream} held out")).sample(examples, count)
        return examples

    def rubric(self) -> Rubric:
        return self._rubric

    def _examples(self, setting: str, rows: Rows) -> Iterator[tuple[str, Example]]:
        """Each example, behind the text that decides whether it is held out."""
        prompt, answer, rejected = self._columns
        for where, row in read_rows(f"environment.kwargs.{setting}", rows):
            if not isinstance(row, Mapping) or any(name and name not in row for name in self._columns):
                wanted, found = " and ".join(filter(None, self._columns)), one_line(repr(row), 160)
                raise ConfigError(f"{where}: expected an object with {wanted} (prompt= and answer= name them): {found}")
            messages = prompt_messages(where, row[prompt])
            content = "\n".join(message.content for message in messages)
            said = row[answer] if answer else dict(row)
            worse = right_answer(Example(prompt=(), answer=row[rejected])) if rejected else ""
            yield content, Example(prompt=(*self._system, *messages), answer=said, rejected=worse)
