"""usage: {prog} TASK [--policy POLICY] [--prompts N] [--held-out] [--environment.kwargs.NAME VALUE ...]

Play a task without training: prompts, tools, rewards and stop reasons on the screen. What is played, and who grades it,
is what a run would use. Demonstrations and typing load neither torch nor Monarch.

TASK is file.py (where it has one task), file.py:Class, pkg.mod:Class, a bundled task (`titan-rl recipes`), or a run
directory.

exit codes: 0 played; 1 a rollout failed, or nothing could be played; 2 wrong task or settings
"""

import asyncio
import re
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from titan_rl.config import RunConfig
from titan_rl.environments.base import Demonstration, Environment, task_settings
from titan_rl.errors import ActorGone, ConfigError, GeneratorFailed, RequestError, TaskError, TitanError
from titan_rl.isolation.wire import CallKind, UserCall
from titan_rl.metrics.rollout_record import RolloutRecord
from titan_rl.one_line import counted
from titan_rl.overrides import EXIT_FAILED, Command, Verb, option_overrides, print_error
from titan_rl.playing.policies import first_run, number_of, read_task, run_of, run_until_signal, weights_player
from titan_rl.rollout.report import plain_message
from titan_rl.rollout.trajectory import extends
from titan_rl.run.checks import check_environment
from titan_rl.run.players import Player, PolicyTurn, message_player
from titan_rl.supervision.run_end import Options
from titan_rl.types import FinishReason, Message, Purpose, ToolCall, ToolSpec
from titan_rl.view.conversation import draw_conversations, draw_end, draw_messages

TYPED, DEMONSTRATIONS = "typed", "demonstrations"
SHOWN_PROMPTS = 3
HOW_TO_TYPE = "type the policy's turns; a line that ends in \\ goes on; /TOOL {JSON} calls a tool; Ctrl-D ends"


class Person:
    """A policy that a person types. Shows what was said meanwhile, each message once."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._echoes = sys.stdin.isatty()
        self.begin()
        self.ended = False
        self._typed: asyncio.Future[str | None] | None = None  # of the thread that reads a line
        self._one_at_a_time = asyncio.Lock()

    def begin(self) -> None:
        self.shown = 0
        """Messages of the conversation that were shown."""
        self._conversation: list[Message] = []

    async def next_message(self, messages: Sequence[Message], tools: Sequence[ToolSpec], _: object) -> PolicyTurn:
        """Raises TitanError: there is no further line."""
        async with self._one_at_a_time:  # what is shown last is what is answered
            if self.shown and not extends(messages, self._conversation[: self.shown]):
                self._show(self._conversation[self.shown :])
                # a program edited its history, or asks beside it
                self._console.print("another conversation:", style="dim")
                self.shown = 0
            self._show(messages[self.shown :])
            self.shown, self._conversation = len(messages), [*messages]
            while True:
                text = await self._line()
                try:
                    said = read_turn(text, tools)
                except ConfigError as error:
                    self._console.print(str(error), style="red")
                    continue
                self.shown += self._echoes  # the terminal shows it
                self._conversation = [*messages, said]
                return said, FinishReason.STOP

    def _show(self, messages: Sequence[Message]) -> None:
        if messages:
            self._console.print(draw_messages([*map(plain_message, messages)]))

    async def _line(self) -> str:
        """What is typed. It is read in a thread of its own, so that Ctrl-C and a program's time limit still work. What
        a turn did not wait for is the next turn's."""
        if self._typed is None:
            self._typed = asyncio.get_running_loop().create_future()
            threading.Thread(target=self._read, args=(self._typed,), name="terminal", daemon=True).start()
        text = await asyncio.shield(self._typed)
        self._typed = None
        if text is None:
            self.ended = True
            self._console.print()
            raise TitanError("the input is over")
        return text

    def _read(self, typed: asyncio.Future[str | None]) -> None:
        """In that thread: the next line; None: there is none."""
        try:
            lines = [input("assistant> " * self._echoes)]
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1][:-1]
                lines.append(input("         > " * self._echoes))
            text: str | None = "\n".join(lines)
        except (EOFError, OSError, ValueError):
            text = None
        with suppress(RuntimeError):  # the loop was closed meanwhile
            typed.get_loop().call_soon_threadsafe(typed.set_result, text)


@dataclass(slots=True)
class Trial:
    """Plays prompts one after the other and shows them."""

    console: Console
    prompts: int
    samples: int
    purpose: Purpose
    rewards: list[float] = field(default_factory=list)
    failed: int = 0

    async def demonstrations(self, config: RunConfig) -> int:
        turns: list[Message] = []  # of the policy, in the demonstration that is played

        async def next_turn(*_: object) -> PolicyTurn:
            if not turns:
                raise RequestError("the task goes on where the demonstration has ended: it has no further turn")
            return turns.pop(0), FinishReason.STOP

        async with message_player(config, next_turn) as player:
            self._begin(player, "its own demonstrations")
            for number in range(self.prompts):
                call = UserCall(CallKind.DEMONSTRATE, Purpose.DEMONSTRATE, number)
                shown: Demonstration = await player.runner.pool.call(call)
                turns[:] = [message for message in shown.messages if message.role == "assistant"]
                self._title(number, "demonstration")
                if shown.answer is not None:
                    self._show(await player.play(number, Purpose.DEMONSTRATE))
                else:
                    self.console.print(draw_messages([*map(plain_message, (*shown.prompt, *shown.messages))]))
                    self.console.print("not graded: Demonstration.answer is not set", style="dim")
            return self._sum_up()

    async def typed(self, config: RunConfig) -> int:
        person = Person(self.console)
        patient = replace(config, rollout=replace(config.rollout, seconds=0.0))  # people are slow
        async with message_player(patient, person.next_message) as player:
            self._begin(player, HOW_TO_TYPE)
            for index in self._indices(player):
                self._title(index)
                person.begin()
                try:
                    rollouts = await player.play(index, self.purpose)
                except TitanError:
                    if person.ended:
                        break
                    raise
                alone = [msgspec.structs.replace(each, side_conversations=[]) for each in rollouts]
                self._show(alone, seen=person.shown)
                if person.ended:
                    break
            return self._sum_up()

    async def policy(self, player: Player, name: str) -> int:
        self._begin(player, name)
        for index in self._indices(player):
            rollouts = await player.play(index, self.purpose, samples=self.samples)
            self._title(index)
            self._show(rollouts)
        return self._sum_up()

    def _begin(self, player: Player, policy: str) -> None:
        info, name = player.info, player.config.environment.name
        turns = "several turns" if info.multi_turn or info.tools else "one turn"
        how = "played by a program" if info.plays else turns
        size = "endless" if info.size is None else info.size
        self.console.print(f"task {name}: {how}, {size} training prompts")
        if info.tools:
            self.console.print("tools:")
        for tool in info.tools:
            arguments = ", ".join(tool.parameters.get("properties", {}))
            about = tool.description.strip().partition("\n")[0]
            self.console.print(Text.assemble((f"  {tool.name}({arguments})", "yellow"), (f"  {about}", "dim")))
        self.console.print(f"policy: {policy}")

    def _indices(self, player: Player) -> range:
        there = player.info.held_out if self.purpose is Purpose.EVALUATE else player.info.size
        if self.purpose is Purpose.EVALUATE and not there:
            raise TaskError(f"the environment {player.config.environment.name} gave no held-out prompts")
        return range(self.prompts if there is None else min(self.prompts, there))

    def _title(self, number: int, what: str = "") -> None:
        what = what or ("held-out prompt" if self.purpose is Purpose.EVALUATE else "training prompt")
        self.console.print(Rule(f"{what} {number}", style="dim", align="left"))

    def _show(self, rollouts: Sequence[RolloutRecord], *, seen: int = 0) -> None:
        """The rollouts of a prompt: messages from number `seen` on, after the first rollout without the prompt."""
        for number, rollout in enumerate(rollouts):
            if number:
                self.console.print()
            if conversations := draw_conversations(rollout, seen=seen):
                self.console.print(conversations)
            self.console.print(draw_end(rollout))
            roles = [message["role"] for message in rollout.messages]
            seen = roles.index("assistant") if "assistant" in roles else seen
            if rollout.error:
                self.failed += 1
            else:
                self.rewards.append(rollout.reward)

    def _sum_up(self) -> int:
        self.console.print(Rule(style="dim"))
        graded = len(self.rewards)
        mean = f", mean reward {sum(self.rewards) / graded:.3f}" if graded else ""
        failed = f"; {self.failed} failed and would not be trained" if self.failed else ""
        self.console.print(f"{counted(graded, 'rollout')} graded{mean}{failed}")
        return EXIT_FAILED if self.failed else 0


def read_turn(text: str, tools: Sequence[ToolSpec]) -> Message:
    """What somebody typed as a message: `/add {"first": 1}` calls a tool, all else is text. Raises ConfigError: a call
    that cannot be read."""
    called = re.match(r"/(\w+)\s*(.*)", text, re.DOTALL)
    if called is None or not tools:
        return Message("assistant", text)
    name, rest = called.groups()
    known = {tool.name: tool for tool in tools}
    if name not in known:
        raise ConfigError(f"there is no tool {name!r}; there are {', '.join(known)}")
    try:
        arguments = msgspec.json.decode(rest or "{}", type=dict[str, Any])
    except msgspec.DecodeError as error:
        names = ", ".join(f'"{each}": …' for each in known[name].parameters.get("properties", {}))
        raise ConfigError(f"that call cannot be read ({error}): /{name} {{{names}}}") from error
    return Message("assistant", "", (ToolCall(name, arguments),))


def _act(command: Command, prog: str) -> int:
    run = None
    if name := command.word("task", ""):
        if (run := run_of(Path(name))) is None:
            named = option_overrides([("TASK", *each) for each in task_settings(name)], Path.cwd())
            command.layers[-1] = [*named, *command.layers[-1]]  # before the task's own arguments
    policy = command.values.get("--policy", "")
    if policy not in ("", DEMONSTRATIONS, TYPED):
        run = run or first_run([policy])
    prompts, samples = number_of(command, "--prompts", SHOWN_PROMPTS), number_of(command, "--samples", 1)
    held_out = "--held-out" in command.flags
    remedy = "name a task: file.py:Class, a bundled one (`titan-rl recipes`), or a run directory"
    config = read_task(command, run, remedy=remedy)
    config = replace(config, evaluation=replace(config.evaluation, prompts=prompts if held_out else 1))
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    trial = Trial(console, prompts, samples, Purpose.EVALUATE if held_out else Purpose.TRAIN)
    demonstrates = check_environment(config).demonstration is not Environment.demonstration
    policy = policy or (DEMONSTRATIONS if demonstrates else TYPED)
    if policy == DEMONSTRATIONS and not demonstrates:
        raise ConfigError(f"{config.environment.name} has no method `demonstration`; --policy {TYPED} asks you")
    if policy not in (DEMONSTRATIONS, TYPED):

        async def work(directory: Path, options: Options) -> tuple[int, str]:
            async with weights_player(command, config, policy, options) as player:
                return await trial.policy(player, policy), "is over"

        return run_until_signal("try", config, work, partial(console.print, style="dim"))

    try:
        return asyncio.run(trial.typed(config) if policy == TYPED else trial.demonstrations(config))
    except (TaskError, GeneratorFailed, ActorGone) as error:
        print_error(prog, error)
        return EXIT_FAILED


VERB = Verb(
    act=_act,
    about=__doc__,
    options={
        "--policy POLICY": "demonstrations: the task's own (default, if it has some); typed: by you; "
        "a run, one of its checkpoints, or a Hugging Face directory",
        "--prompts N": f"how many prompts ({SHOWN_PROMPTS})",
        "--samples N": "rollouts of each prompt by weights (1)",
        "--held-out": "held-out prompts instead of training prompts",
        "--recipe NAME": "play with a recipe's task and settings; TASK then takes the place of its task",
        "--config FILE.toml": "settings; relative file names in it start at its directory",
    },
    takes_words=True,
)
