"""Rows of a data set as a task: a column is the prompt, a column the answer, a function the reward.

In a Python file, as the task `riddles.py:Riddles`:

    Riddles = Environment.from_examples("riddles.jsonl", right, prompt="question", answer="answer")

In a recipe or TOML file, without any code but the reward's:

    [environment]
    name = "dataset"
    [environment.kwargs]
    path = "riddles.jsonl"
    reward = "riddles.py:right"

Every row is an example. Which ones are held out is decided by the text of the prompt (`is_held_out`), so the same ones
are whatever the seed, the order and the rows beside them. Rows of one text are either all trained or all held out.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from titan_rl.environments.base import Environment, Example, Message, Reward, Rubric
from titan_rl.environments.rubric import RewardFunction
from titan_rl.errors import AbsentError, ConfigError
from titan_rl.importing import import_name
from titan_rl.seeding import derive_seed

HELD_OUT_SHARE = 10
"""One prompt in so many is held out."""

_ENUMERABLE = 10_000
"""If a task has at most this many texts, all are enumerated; if it has more, some are drawn."""


def fold(text: str) -> int:
    """A hash that is the same in every process and easy to compute elsewhere: h = (h * 131 + ord(c)) mod 1000003."""
    value = 0
    for character in text:
        value = (value * 131 + ord(character)) % 1_000_003
    return value


def is_held_out(text: str) -> bool:
    return fold(text) % HELD_OUT_SHARE == 0


def training_text(stream: random.Random, symbols: str, length: int) -> str:
    """The stream's next text of `length` symbols that is not held out."""
    while True:
        text = "".join(stream.choices(symbols, k=length))
        if not is_held_out(text):
            return text


def held_out_texts(stream: random.Random, symbols: str, length: int, count: int) -> list[str]:
    """`count` different held-out texts of `length` symbols; fewer where there are fewer, or would be hard to find."""
    possible = len(symbols) ** length
    if possible <= _ENUMERABLE:
        texts = [text for text in map("".join, product(symbols, repeat=length)) if is_held_out(text)]
        return stream.sample(texts, count) if len(texts) > count else texts
    drawn: dict[str, None] = {}  # a dict keeps the order of drawing
    # at most a tenth of the held-out texts, so that duplicates stay rare and the loop ends
    while len(drawn) < min(count, possible // HELD_OUT_SHARE**2):
        text = "".join(stream.choices(symbols, k=length))
        if is_held_out(text):
            drawn[text] = None
    return list(drawn)


Rows = str | Path | Iterable[Mapping[str, Any]]
"""A file (JSON lines, or Parquet with pyarrow), a list of dicts, or a `datasets.Dataset`."""


class DatasetEnvironment(Environment):
    """The task.

    Args:
        path: the rows. A relative file name starts at the TOML file that holds it, else at the working directory.
        reward: a reward function, a `Reward`, a `Rubric`, or the name of one (`file.py:function`, `pkg.mod:function`).
        prompt: column of the prompt, a text (a user's message) or a list of `{"role": …, "content": …}`.
        answer: column of what the reward finds as `example.answer`; empty: the whole row.
        system: text of a system message before every prompt; empty: none.
        test_path: rows to evaluate on; empty: a tenth of the rows.
        seed: decides the order of the training prompts, not which ones are held out.

    Raises:
        ConfigError: a file or a row cannot be read, or no row is left to train on.
    """

    stream = "dataset"
    """Names the chance that orders the rows."""
    settings = ("path", "test_path")
    """Arguments that hold the rows, for messages."""

    def __init__(
        self,
        path: Rows,
        reward: str | RewardFunction | Reward | Rubric,
        prompt: str = "prompt",
        answer: str = "answer",
        system: str = "",
        test_path: Rows = "",
        seed: int = 0,
    ):
        rewards = import_name(reward) if isinstance(reward, str) else reward
        self._rubric = rewards if isinstance(rewards, Rubric) else Rubric(rewards)
        self._columns = (prompt, answer)
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
        where, left_out = f"environment.kwargs.{self.settings[0]}", len(rows) - self.size
        repeats = len(rows) - len({text for text, _ in rows})
        repeated = f"{repeats} of {len(rows)} rows repeat the prompt of an earlier row"
        if not self._train:
            raise ConfigError(f"{where}: all rows are held out" + f"; {repeated}" * (repeats > 0))
        if left_out and not by_text:
            self.warning = f"{where}: prompts of {self.settings[1]} are in {left_out} of {len(rows)} rows: not trained"
        elif repeats * HELD_OUT_SHARE > len(rows):
            self.warning = f"{where}: {repeated}"
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
        prompt, answer = self._columns
        for where, row in read_rows(f"environment.kwargs.{setting}", rows):
            if not isinstance(row, Mapping) or any(name and name not in row for name in (prompt, answer)):
                raise ConfigError(f"{where}: expected an object with {' and '.join(filter(None, (prompt, answer)))}")
            messages = _messages(where, row[prompt])
            content = "\n".join(message.content for message in messages)
            yield content, Example(prompt=(*self._system, *messages), answer=row[answer] if answer else dict(row))


def make_task(rows: Rows, reward: RewardFunction | Reward | Rubric, **options: Any) -> type[DatasetEnvironment]:
    """See `Environment.from_examples`."""
    kept = rows if isinstance(rows, (str, Path)) else list(rows)

    class DatasetTask(DatasetEnvironment):
        def __init__(self, seed: int = 0):
            super().__init__(kept, reward, seed=seed, **options)

    return DatasetTask


def read_rows(setting: str, rows: Rows) -> Iterator[tuple[str, Any]]:
    """Every row, with where it stands for messages.

    Args:
        setting: the setting that names the file, for messages.

    Raises:
        AbsentError: there is no such file, or nothing to read it with.
        ConfigError: the file cannot be read, or has no rows.
    """
    if isinstance(rows, (str, Path)):
        file = Path(rows)
        if not file.is_file():
            raise AbsentError(f"{setting}: there is no file {file}")
        numbered = _parquet_rows(file) if file.suffix == ".parquet" else _json_rows(file)
    else:
        numbered = ((f"row {number}", row) for number, row in enumerate(rows, start=1))
    nothing = True
    for each in numbered:
        nothing = False
        yield each
    if nothing:
        raise ConfigError(f"{setting}: {rows} has no rows")


def _json_rows(file: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            yield f"{file}:{number}", json.loads(line)
        except ValueError as error:  # neither JSON nor UTF-8
            raise ConfigError(f"{file}:{number}: not a line of JSON ({error})") from error


def _parquet_rows(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise AbsentError(
            f"{file}: Parquet needs the package pyarrow ({error}): `pip install pyarrow`, or use JSON lines"
        ) from error
    try:
        rows = pyarrow.parquet.read_table(file).to_pylist()
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{file}: not a Parquet file ({error})") from error
    for number, row in enumerate(rows, start=1):
        yield f"{file}: row {number}", row


def _messages(where: str, prompt: object) -> tuple[Message, ...]:
    if isinstance(prompt, str) and prompt.strip():
        return (Message("user", prompt),)
    if isinstance(prompt, Sequence) and prompt and all(isinstance(each, Mapping) for each in prompt):
        try:
            return tuple(Message(str(each["role"]), str(each["content"])) for each in prompt)
        except KeyError as error:
            raise ConfigError(f"{where}: a message of the prompt has no {error}") from error
    raise ConfigError(f"{where}: the prompt is {prompt!r}; it must be a text or a list of messages")
