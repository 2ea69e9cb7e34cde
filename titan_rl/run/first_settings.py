"""Chooses the settings of a run from its task alone, and says why.

    task.py ─▶ survey: its prompts, right answers and demonstrations, and answers at random, all graded ─▶ choose

- What is looked at is what a run would play: rollouts of the task's own code, in processes of their own.
- A policy that has not learned anything yet answers nearly at random, so answers at random tell how often a group has
  different rewards, without a model. Weights that were trained before are not probed: the first steps' curves say it.
- `choose` is a pure function of the survey.
"""

import itertools
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from statistics import fmean
from typing import Any, NamedTuple

from titan_rl.chat.renderer import CALL, CALL_END, RESULT, RESULT_END, TURN, UNKNOWN
from titan_rl.config import RunConfig
from titan_rl.environments import SHORT_NAMES
from titan_rl.environments.base import TOOL_ERROR, Demonstration, Environment
from titan_rl.errors import TaskError
from titan_rl.importing import import_name
from titan_rl.isolation.wire import CallKind, TaskCheck, TaskInfo, UserCall
from titan_rl.metrics.rollout_record import RolloutRecord
from titan_rl.run.players import Player, PolicyTurn, message_player
from titan_rl.seeding import derive_seed
from titan_rl.types import FailureKind, FinishReason, GenerationRequest, Message, Purpose, ToolCall

LOOKED_AT = 20_000
"""Training prompts whose texts are read: a character that none of them has fails the rollouts that do."""
GROUPS, FEWEST_GROUPS, SAMPLES = 24, 8, 16
"""Played with answers at random."""
LONGEST_SECONDS = 20.0
"""After them no further group is played: programs and graders may be slow."""
SHOWN = 16
"""Prompts that are played with their right answers, and demonstrations that are played."""
MOST_SYMBOLS = 96
"""With more characters the policy writes bytes."""
LONGEST_GUESS = 16
"""Characters of an answer, where nothing says how long a right one is."""
LEAST_THOUGHT = 256
"""Tokens of an answer by a policy that was trained before, which may think first."""
MARKS, TOOL_MARKS = 32, 700
"""Tokens that a chat format adds to a message or a call; and to a prompt with tools, whose description comes on top."""
PROGRAM_GROUPS, PROGRAM_STEPS = 4, 150
"""Of a run whose rollouts are played by programs: each is a process of its own."""
KL_BAND = 0.05
"""Ten times what a step usually moves a tiny policy."""
BONUS = "trainer.loss.kwargs.entropy_bonus"
LUCK = 0.05
"""Share of answers at random that are right. With fewer, right ones are taught first where they are known: that takes
seconds, and what remains for rewards is what nobody demonstrates."""
FEW_DIFFERENT, MOST_SAMPLES = 0.5, 64
"""Groups of equal rewards teach nothing. A policy that has not learned anything has as many as answers at random."""
RIGHT = 0.9
"""Of the best reward that was seen: what an answer gets that counts as right."""
TAUGHT: dict[str, tuple[int | float, str]] = {
    "steps": (2_000, "at most: few tasks need them all"),
    "batch": (64, "demonstrations in each"),
    "enough_loss": (0.002, "nats: it ends as soon as that is reached"),
    "flat_steps": (300, "or the loss falls no more, as with wrong demonstrations"),
}
"""Of the warm-up."""
TAUGHT_LOOP = 250
"""Steps by reward after it."""


class Chosen(NamedTuple):
    setting: str
    value: Any
    reason: str


@dataclass(slots=True, kw_only=True)
class Survey:
    """What a look at a task has found. Lengths are in characters."""

    info: TaskInfo
    texts: set[str] = field(default_factory=set)
    """Characters of everything that is said in the task, right answers included."""
    prompt: int = 0
    """Of the longest prompt."""
    answer: int = 0
    """Of the longest right answer or turn of a demonstration; 0: nothing says."""
    demonstrations: bool = False
    """Whether the task has some, or its examples' answers get the best reward."""
    reply: int = 0
    """Of the longest answer by the task or a tool."""
    turns: int = 1
    """Of the policy, in the longest rollout or demonstration that was seen."""
    best: float = -inf
    """Best reward that was seen."""
    different: float = 0.0
    """Share of groups of answers at random whose rewards differ."""
    lucky: float = 1.0
    """Share of answers at random that are right."""
    longest_call: int = 0
    """Of the longest argument of a tool in a demonstration."""
    marked: bool = False
    """Whether each prompt ends with one character that is nowhere else."""


@dataclass(slots=True)
class _Speaker:
    """Says the turns that are given for a prompt, or random ones."""

    symbols: Sequence[str]
    longest: int
    turns: list[Message] | None = None

    async def next_message(self, messages: Sequence[Message], _: object, request: GenerationRequest) -> PolicyTurn:
        if self.turns is not None:
            said = sum(message.role == "assistant" for message in messages)
            turn = self.turns[said] if said < len(self.turns) else Message("assistant", "")
            return turn, FinishReason.STOP
        chance = random.Random(derive_seed("survey", request.seed))
        choices = (*self.symbols, "")  # the last one ends it
        text = "".join(itertools.takewhile(bool, (chance.choice(choices) for _ in range(self.longest))))
        return Message("assistant", text), FinishReason.STOP if len(text) < self.longest else FinishReason.LENGTH


async def survey(config: RunConfig) -> Survey:
    """Look at the task of `config`. Raises ConfigError or TaskError where it cannot be made."""
    speaker = _Speaker("0", 1)
    task = config.environment
    longest = max(task.step_seconds, task.grade_seconds, task.program_seconds)
    config = replace(config, rollout=replace(config.rollout, seconds=longest))
    async with message_player(config, speaker.next_message) as player:
        found = Survey(info=player.info)
        check: TaskCheck = await player.runner.pool.call(UserCall(CallKind.CHECK, Purpose.TRAIN, LOOKED_AT))
        for prompt in (*check.training, *check.held_out):
            found.prompt = max(found.prompt, sum(len(message.content) for message in prompt))
            found.texts.update(*(message.content for message in prompt))
        asked = ["".join(message.content for message in prompt) for prompt in (*check.training, *check.held_out)]
        found.marked = is_marked(asked, check.answers)
        task = import_name(config.environment.name, SHORT_NAMES)
        if task.demonstration is not Environment.demonstration:
            await _demonstrations(player, speaker, found)
        right = await _right_answers(player, speaker, found, check.answers[: len(check.training)])
        if not found.answer:
            found.answer = min(found.prompt, LONGEST_GUESS)
        speaker.symbols, speaker.longest = sorted(found.texts) or ["0"], found.answer + 1
        until = time.monotonic() + LONGEST_SECONDS
        await _any_calls(player, speaker, found, until)
        speaker.turns = None
        played = [await _play(player, index, SAMPLES) for index in range(GROUPS) if time.monotonic() < until]
        rollouts = [each for group in played for each in group]
        _read(found, rollouts)
        ungraded = [each.error for each in rollouts if each.failure is FailureKind.GRADER]
        if 2 * len(ungraded) > len(rollouts):
            raise TaskError(f"{len(ungraded)} of {len(rollouts)} answers at random cannot be graded: {ungraded[0]}")
        found.different = fmean([len({each.reward for each in group if not each.error}) > 1 for group in played] or [0])
        worst_right = found.best - (1 - RIGHT) * abs(found.best)
        if found.best <= 0 and all(each.error or each.reward == found.best for each in rollouts):
            found.lucky = 0.0  # nothing was seen to be better than anything else
        elif len(played) >= FEWEST_GROUPS:
            found.lucky = fmean(not each.error and each.reward >= worst_right for each in rollouts)
        at_once = not (player.info.multi_turn or player.info.tools or player.info.plays)
        answered = all(check.answers[: len(check.training)])
        found.demonstrations |= at_once and answered and right >= worst_right
        return found


def is_marked(prompts: Sequence[str], answers: Iterable[str]) -> bool:
    """Whether a character says where every prompt ends."""
    ends = {prompt[-1:] for prompt in prompts}
    elsewhere = {character for text in (*(prompt[:-1] for prompt in prompts), *answers) for character in text}
    return len(ends) == 1 and not ends & elsewhere


async def _demonstrations(player: Player, speaker: _Speaker, found: Survey) -> None:
    found.demonstrations = True
    for number in range(SHOWN):
        call = UserCall(CallKind.DEMONSTRATE, Purpose.DEMONSTRATE, number)
        shown: Demonstration = await player.runner.pool.call(call)
        speaker.turns = [message for message in shown.messages if message.role == "assistant"]
        found.turns = max(found.turns, len(speaker.turns))
        for message in (*shown.prompt, *shown.messages):
            found.texts.update(message.content)
        for turn in speaker.turns:
            arguments = [str(value) for call in turn.tool_calls for value in call.arguments.values()]
            found.texts.update(*arguments)
            found.longest_call = max(found.longest_call, *map(len, arguments), 0)
            found.answer = max(found.answer, len(turn.content))
        if shown.answer is not None:
            _read(found, await _play(player, number, 1, Purpose.DEMONSTRATE))


async def _right_answers(player: Player, speaker: _Speaker, found: Survey, answers: Sequence[str]) -> float:
    """Play prompts with their right answers; returns the mean reward."""
    told = [answer for answer in answers if answer]
    found.texts.update(*told)
    rewards = []
    for index, answer in enumerate(answers[:SHOWN]):
        if answer:
            speaker.turns = [Message("assistant", answer)]
            rollouts = await _play(player, index)
            rewards += [each.reward for each in rollouts if not each.error]
            _read(found, rollouts)
    if rewards and fmean(rewards) > 0:
        found.answer = max(found.answer, max(map(len, told)))
    return fmean(rewards or [0.0])


async def _any_calls(player: Player, speaker: _Speaker, found: Survey, until: float) -> None:
    """What tools answer when they are called with whatever comes to mind, as a policy will."""
    chance = random.Random(0)

    def value(about: Any) -> Any:
        kind = about.get("type", "string") if isinstance(about, dict) else "string"
        text = "".join(chance.choices(speaker.symbols, k=chance.randint(1, speaker.longest)))
        whole = chance.randrange(10)
        others = {"integer": whole, "number": whole, "boolean": whole < 5, "array": [], "object": {}}
        return chance.choice(about["enum"]) if isinstance(about, dict) and "enum" in about else others.get(kind, text)

    for index, tool in itertools.product(range(SHOWN), player.info.tools):
        if time.monotonic() < until:
            arguments = {name: value(about) for name, about in tool.parameters.get("properties", {}).items()}
            speaker.turns = [Message("assistant", "", (ToolCall(tool.name, arguments),))]
            _read(found, await _play(player, index))


async def _play(player: Player, index: int, samples: int = 1, purpose: Purpose = Purpose.TRAIN) -> list[RolloutRecord]:
    size = player.info.size
    return await player.play(index % size if size else index, purpose, samples=samples)


def _read(found: Survey, rollouts: Iterable[RolloutRecord]) -> None:
    """What was said in rollouts by others than the policy."""
    for rollout in rollouts:
        messages = list(itertools.chain(rollout.messages, *rollout.side_conversations))
        if not rollout.error:
            found.best = max(found.best, rollout.reward)
        found.turns = max(found.turns, sum(message["role"] == "assistant" for message in messages))
        said = [str(message["content"]) for message in messages if message["role"] != "assistant"]
        said = [text for text in said if not text.startswith(TOOL_ERROR)]
        found.texts.update(*said)
        found.reply = max([found.reply, *map(len, said)])


def choose(found: Survey, *, by_bytes: bool = False, positions: int = 0, warmup: int | None = None) -> list[Chosen]:
    """The settings, in the order in which they are shown, for a policy that writes bytes in any case, or begins with
    trained weights of so many positions. `warmup`: its steps, where the user says."""
    chosen: list[Chosen] = []
    trained = positions > 0

    def add(setting: str, value: Any, reason: str) -> None:
        if not (trained and setting.startswith("policy.tiny")):
            chosen.append(Chosen(setting, value, reason))

    info, symbols = found.info, "".join(sorted(found.texts))
    one_tool = len(info.tools) == 1 and len(info.tools[0].parameters.get("properties", {})) == 1
    by_bytes = by_bytes or trained or len(symbols) > MOST_SYMBOLS or (bool(info.tools) and not one_tool)
    turn, around, width, mark = found.answer, 0, 1, 0
    if by_bytes:
        many = len(symbols) > MOST_SYMBOLS
        why = f"{len(symbols)} different characters" if many else "symbols can call one tool with one argument"
        add("policy.tiny.tokenizer", "chat", f"{why}: the policy writes bytes in a chat format")
        width, around, mark = max(len(each.encode()) for each in symbols), MARKS, MARKS
        if info.tools:
            turn = max(turn, found.longest_call + MARKS)
            around += TOOL_MARKS + sum(len(f"{tool.description}{tool.parameters}") for tool in info.tools)
    else:
        add("policy.tiny.symbols", symbols, f"the {len(symbols)} characters of its prompts and answers")
        marks: tuple[str, ...] = ()
        why_marks = []
        if not found.marked or info.tools or info.multi_turn or info.plays:
            marks, mark, why_marks = (TURN,), 1, [f"{TURN} says where a prompt ends"]
        if info.tools:
            marks = (*marks, CALL, CALL_END, RESULT, RESULT_END, UNKNOWN)
            why_marks += [f"others call its tool; {UNKNOWN} is read for what nobody foresaw"]
            turn = max(turn, (found.longest_call or min(found.prompt, LONGEST_GUESS)) + 2)
        elif info.multi_turn or info.plays:
            marks, why_marks = (*marks, UNKNOWN), [*why_marks, f"{UNKNOWN} is read for a reply with other characters"]
        if marks:
            add("policy.tiny.special_tokens", marks, "; ".join(why_marks))
    new = width * turn + 2  # one that is too long costs reward, so that ending is learned
    why = f"the longest right answer has {width * turn}; one ends it, one is too many"
    if trained and new < LEAST_THOUGHT:
        new, why = LEAST_THOUGHT, "room to think"
    turns = max(found.turns, 2 if info.multi_turn or info.tools else 1)
    length = width * found.prompt + around + turns * (new + width * found.reply + mark)
    length = -(-length // 32) * 32
    if trained and length > positions:
        new = max(2, min(new, positions // (2 * turns)))
        length, why = positions, f"what the policy's {positions} positions leave"
    add("rollout.sampling.max_new_tokens", new, why)
    if turns > 1:
        add("rollout.max_turns", turns, "the most that were seen")
    said = "a turn" if turns == 1 else f"{turns} turns"
    add("policy.tiny.max_length", length, f"prompts of up to {width * found.prompt} and {said}")
    add("generator.max_model_len", length, "room for prompt and answers")
    rare = found.demonstrations and found.lucky < LUCK
    taught = not trained and (rare if warmup is None else warmup > 0)
    if taught and warmup is None:
        first = f"{found.lucky:.1%} of answers at random are right: right ones are taught first; "
        for name, (value, why) in TAUGHT.items():
            add(f"trainer.warmup.{name}", value, first * (name == "steps") + why)
    if taught:
        add("trainer.optimizer.lr", 3e-4, "what was taught is changed in smaller steps")
        add(BONUS, 0.05, "and searched around, not forgotten")
        add("loop.steps", TAUGHT_LOOP, "what was taught needs fewer steps by reward")
    elif found.lucky < LUCK and not trained and warmup is None:
        why = f"{found.lucky:.1%} of answers at random are right, and no `demonstration` says what to teach"
        add("trainer.warmup.steps", 0, why)
    if info.plays:
        add("loop.groups_per_step", PROGRAM_GROUPS, "programs play its rollouts, which takes time")
        add("loop.steps", PROGRAM_STEPS, "fewer and longer ones")
    elif found.different < FEW_DIFFERENT and not (taught or trained):
        why = f"{found.different:.0%} of groups of answers at random have different rewards: groups grow while few do"
        add("rollout.most_samples", MOST_SAMPLES, why)
    add("trainer.optimizer.kl_band", KL_BAND, "nats; a step that went further would be made smaller")
    if trained:
        add("trainer.optimizer.lr", 1e-6, "weights that were trained before move in small steps")
        add(BONUS, 0.0, "and know where to search")
        add("placement.device", "auto", "as this host has it")
    return chosen
