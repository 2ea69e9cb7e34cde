"""Sort names alphabetically, again whenever some are added: a chat task of one or more turns.

The user lists some names in random order and asks for them sorted by family or by given name, inside `<sorted>`
tags; in every further turn the user adds names and asks for the whole list again, whatever the policy said. Credit is
partial: in every turn the longest run of names in the right order counts, and the reward is the mean over the turns
that the conversation should have had, so that cutting it short never pays. Conversations whose set of names
`dataset.is_held_out` picks are never trained on.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from titan_rl.config import EvaluationConfig, LoopConfig, PlacementConfig, RunConfig
from titan_rl.config_registry import copy4
from titan_rl.environments.base import Environment, EnvironmentReply, Example, Message, Reward, Rubric, Transcript
from titan_rl.environments.dataset import is_held_out
from titan_rl.errors import ConfigError
from titan_rl.generation.config import GeneratorConfig
from titan_rl.overrides import variant
from titan_rl.policy.config import LossConfig, OptimizerConfig, PolicyConfig, TrainerConfig
from titan_rl.rollout.config import EnvironmentConfig, RolloutConfig, SamplingConfig
from titan_rl.seeding import derive_seed

GIVEN_NAMES = (
    "Ada Alan Amara Anders Anouk Arturo Beatriz Bela Boris Camille Carlos Chiara Chidi Daria Dilan Edith Elif Emre "
    "Esther Fatima Felix Freya Gaspard Greta Hana Hugo Ines Ivan Jamila Jonas Jun Kaito Keira Kofi Lara Leon Lucia "
    "Maja Marek Mei Milan Nadia Nikhil Noor Olga Omar Paula Pedro Priya Quentin Rafael Renata Rosa Samir Sofia Tariq "
    "Tove Ulla Umar Valentina Viktor Wanda Willem Ximena Yara Yusuf Zara Zoltan"
).split()
FAMILY_NAMES = (
    "Abbott Achebe Almeida Andersen Bakker Banerjee Bergman Bianchi Castillo Chandra Chen Costa Dahl Delgado Dubois "
    "Eriksen Evans Fabre Farouk Fischer Fonseca Gallo Garcia Goldberg Haddad Hansen Hernandez Ibrahim Ito Ivanova "
    "Jansen Jensen Jovanovic Kaplan Keller Khan Kowalski Larsen Laurent Lopez Marino Mbeki Meyer Moreau Nakamura "
    "Nasser Novak Nyström Okafor Olsen Ortega Park Petrov Pham Quintero Ramirez Rao Rossi Saito Santos Schmidt Silva "
    "Tanaka Thompson Toth Ueda Urban Vargas Vasquez Virtanen Wagner Walsh Weber Xu Yamada Yilmaz Young Zhang Zieliński"
).split()

_BLOCK = re.compile(r"<sorted>(.*?)</sorted>", re.DOTALL)
_KEYS = {"first": 0, "last": 1}


class Sorting(NamedTuple):
    """What one conversation asks for."""

    by: str
    """"first" or "last": the name that decides the order."""
    batches: tuple[tuple[str, ...], ...]
    """The names of each turn ("Given Family"), in the order in which they are shown."""

    def targets(self) -> list[list[str]]:
        """The right answer of each turn: all names so far, in order."""
        every = [name for batch in self.batches for name in batch]
        ends = [sum(map(len, self.batches[:turn])) for turn in range(1, len(self.batches) + 1)]
        return [sorted(every[:end], key=lambda name: name.split()[_KEYS[self.by]]) for end in ends]


def sorted_names(text: str) -> list[str]:
    """The names a policy answers with: the lines of its last `<sorted>` block; none without one."""
    blocks = _BLOCK.findall(text)
    return [line.strip() for line in blocks[-1].splitlines() if line.strip()] if blocks else []


def _longest_common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest sequence that both contain in this order; O(len(first) * len(second))."""
    row = [0] * (len(second) + 1)
    for item in first:
        diagonal = 0
        for column, other in enumerate(second, start=1):
            above = row[column]
            row[column] = diagonal + 1 if item == other else max(above, row[column - 1])
            diagonal = above
    return row[-1]


def order_credit(answer: Sequence[str], target: Sequence[str]) -> float:
    """Longest run of names in the right order ÷ the longer of answer and target, squared: a random order of five
    names then earns about a quarter, and every name put right pays more than the one before."""
    if not answer:
        return 0.0
    # an answer of endless lines is worth nothing more than its first ones, and comparing all of them costs time
    longest = max(len(target), len(answer))
    return (_longest_common_subsequence(answer[: 4 * len(target)], target) / longest) ** 2


def _per_turn(example: Example, transcript: Transcript, credit: Callable[[list[str], list[str]], float]) -> list[float]:
    """The credit of each turn that the conversation asks for; a turn that was not reached has the empty answer."""
    said = [sorted_names(message.content) for message in transcript.messages if message.role == "assistant"]
    targets = example.answer.targets()
    said += [[]] * (len(targets) - len(said))
    return [credit(answer, target) for answer, target in zip(said, targets, strict=False)]


def names_in_order(example: Example, transcript: Transcript) -> float:
    """Mean of `order_credit` over the turns."""
    credits = _per_turn(example, transcript, order_credit)
    return sum(credits) / len(credits)


def exact_match(example: Example, transcript: Transcript) -> float:
    """1 when exactly the right lines are given in every turn."""
    return float(all(_per_turn(example, transcript, lambda answer, target: float(answer == target))))


class AlphabetSort(Environment):
    """The task. `rollout.max_turns` must be at least `max_turns`; turns beyond it are never asked and earn nothing.

    Args:
        min_names, max_names: bounds on the number of names of the first turn.
        min_turns, max_turns: bounds on the number of turns.
        min_added, max_added: bounds on the number of names that each further turn adds.
        seed: decides the training stream, not the held-out prompts.
    """

    def __init__(
        self,
        min_names: int = 3,
        max_names: int = 8,
        min_turns: int = 1,
        max_turns: int = 1,
        min_added: int = 1,
        max_added: int = 4,
        seed: int = 0,
    ):
        for what, low, high, least in (
            ("names", min_names, max_names, 2),
            ("turns", min_turns, max_turns, 1),
            ("added", min_added, max_added, 1),
        ):
            if not least <= low <= high:
                raise ConfigError(f"environment.kwargs: need {least} <= min_{what} <= max_{what}, got {low} and {high}")
        most = max_names + (max_turns - 1) * max_added
        if most > min(len(GIVEN_NAMES), len(FAMILY_NAMES)):
            raise ConfigError(
                f"environment.kwargs: max_names + (max_turns - 1) * max_added is {most}, and there are only "
                f"{min(len(GIVEN_NAMES), len(FAMILY_NAMES))} names"
            )
        self.names = (min_names, max_names)
        self.turns = (min_turns, max_turns)
        self.added = (min_added, max_added)
        self.seed = seed

    def example(self, index: int) -> Example:
        return self._draw(random.Random(derive_seed("alphabet sort", self.seed, index)), held_out=False)

    def held_out(self, count: int) -> list[Example]:
        return [
            self._draw(random.Random(derive_seed("alphabet sort held out", index)), held_out=True)
            for index in range(count)
        ]

    def rubric(self) -> Rubric:
        return Rubric(names_in_order, Reward(exact_match, weight=0.0))

    def respond(self, example: Example, transcript: Transcript) -> EnvironmentReply:
        turn = len(transcript.finish_reasons)
        if turn >= len(example.answer.batches):
            return EnvironmentReply(done=True)
        return EnvironmentReply(messages=(_next_message(example.answer, turn),))

    def _draw(self, stream: random.Random, *, held_out: bool) -> Example:
        while True:
            counts = [stream.randint(*self.names)]
            counts += [stream.randint(*self.added) for _ in range(stream.randint(*self.turns) - 1)]
            # no given and no family name twice: the right order is then unique, by either
            given, family = stream.sample(GIVEN_NAMES, sum(counts)), stream.sample(FAMILY_NAMES, sum(counts))
            names = iter([f"{first} {last}" for first, last in zip(given, family, strict=True)])
            batches = tuple(tuple(next(names) for _ in range(count)) for count in counts)
            sorting = Sorting(stream.choice(tuple(_KEYS)), batches)
            if is_held_out("\n".join(sorted(name for batch in batches for name in batch))) is held_out:
                return Example(prompt=(_first_message(sorting),), answer=sorting)


def _first_message(sorting: Sorting) -> Message:
    listing = "\n".join(sorting.batches[0])
    return Message(
        "user",
        f"Sort these names in alphabetical order by {sorting.by} name:\n\n{listing}\n\n"
        "Answer with every name once, one per line, in exactly this form and with nothing after it:\n\n"
        "<sorted>\nFirst Last\n</sorted>",
    )


def _next_message(sorting: Sorting, turn: int) -> Message:
    listing = "\n".join(sorting.batches[turn])
    return Message(
        "user",
        f"These come in addition:\n\n{listing}\n\n"
        f"Answer with the whole list, the names from before and these, sorted by {sorting.by} name, in the same form.",
    )


def qwen3_0_6b() -> RunConfig:
    """Qwen3-0.6B sorts names in up to 3 turns: 4 FSDP trainer ranks, 2 generators of 2 (8 GPUs)."""
    return RunConfig(
        policy=PolicyConfig(path="../checkpoints/Qwen3-0.6B"),
        environment=EnvironmentConfig(
            name=f"{__file__}:AlphabetSort",
            kwargs={"min_names": 3, "max_names": 6, "min_turns": 1, "max_turns": 3, "min_added": 1, "max_added": 3},
        ),
        rollout=RolloutConfig(
            workers=4,
            samples_per_group=8,
            max_turns=3,
            renderer_kwargs={"enable_thinking": False},
            sampling=SamplingConfig(temperature=1.0, max_new_tokens=256),
        ),
        trainer=TrainerConfig(
            data_parallel=4,
            dtype="bfloat16",
            # the logits of a micro-batch (151,936 per token, float32) are what fills the memory: 5 GB here
            max_tokens_per_microbatch=8192,
            optimizer=OptimizerConfig(lr=1e-6, warmup_steps=5),
            loss=LossConfig(kwargs={"clip_low": 0.2, "clip_high": 0.2}),
        ),
        generator=GeneratorConfig(
            # three turns: about 60 tokens for each answer of 12 names, 250 in all for what is asked
            count=2,
            tensor_parallel=2,
            dtype="bfloat16",
            max_model_len=2048,
            max_num_seqs=256,
            block_size=16,
        ),
        loop=LoopConfig(steps=200, groups_per_step=64),
        evaluation=EvaluationConfig(every=20, prompts=256),
        placement=PlacementConfig(device="cuda"),
    )


def smoke() -> RunConfig:
    """Two small steps of alphabet_sort on a CPU: a chat format, 2 turns, nothing learned."""
    two_turns = {"min_names": 2, "max_names": 3, "min_turns": 2, "max_turns": 2, "min_added": 1, "max_added": 2}
    return variant(
        copy4(),
        {
            "policy.tiny.tokenizer": "chat",
            "policy.tiny.max_length": 1024,
            "environment.name": f"{__file__}:AlphabetSort",
            "environment.kwargs": two_turns,
            "rollout.samples_per_group": 4,
            "rollout.max_turns": 2,
            "rollout.renderer_kwargs": {"enable_thinking": False},
            "rollout.sampling.max_new_tokens": 16,
            "generator.count": 1,
            "generator.max_model_len": 1024,
            "generator.kv_cache_bytes": 256 << 20,
            "loop.steps": 2,
            "loop.groups_per_step": 4,
            "evaluation.every": 0,
            "evaluation.prompts": 8,
            "evaluation.target_exact_match": 0.0,
        },
    )
