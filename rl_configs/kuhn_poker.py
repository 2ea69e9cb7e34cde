"""Kuhn poker: one policy plays both players of a game with hidden cards, and has to bluff.

Of three cards, J < Q < K, each player gets one and pays 1. The first player passes or bets 1, then the second one does;
after a pass and a bet the first player is asked again. Who passes a bet has lost, else the higher card wins. Perfect
players end at -1/18 for the first one (Kuhn 1950).

A player sees its own card and what was played, such as `Qpb`, and answers with a symbol: `b` bets, `p` passes, and any
other loses 2 at once. The first player's winnings are the rollout's reward.
"""

from __future__ import annotations

from itertools import permutations

from titan_rl.config import RunConfig
from titan_rl.config_registry import copy4
from titan_rl.environments.base import Environment, EnvironmentReply, Example, Message, Reward, Rubric, Transcript
from titan_rl.overrides import variant

CARDS = "JQK"
DEALS = tuple(permutations(CARDS, 2))
"""The first player's card and the second one's."""
FOLDED = {"bp": 1, "pbp": -1}
SHOWN = {"pp": 1, "bb": 2, "pbb": 2}
"""Games by what was played: what the first player wins, and what the higher card wins."""
PLAYERS = ("first", "second")
ILLEGAL, LOST = "x", 2


def payoff(deal: tuple[str, str], played: str) -> int:
    """What the first player wins."""
    if played.endswith(ILLEGAL):
        return LOST if len(played) % 2 == 0 else -LOST
    if played in FOLDED:
        return FOLDED[played]
    first, second = map(CARDS.index, deal)
    return SHOWN[played] if first > second else -SHOWN[played]


def winnings(example: Example, transcript: Transcript) -> dict[str, float]:
    """A score by each player's name is that player's reward."""
    won = payoff(example.answer, transcript.state)
    return {"first": won, "second": -won}


class KuhnPoker(Environment):
    size = len(DEALS)

    def example(self, index: int) -> Example:
        deal = DEALS[index % len(DEALS)]
        return Example(prompt=(Message("user", deal[0]),), answer=deal)

    def held_out(self, count: int) -> list[Example]:
        return [self.example(index) for index in range(min(count, len(DEALS)))]

    def initial_state(self, example: Example) -> str:
        return ""

    def respond(self, example: Example, transcript: Transcript) -> EnvironmentReply:
        player = len(transcript.state) % 2
        played = transcript.state + (transcript.answer if transcript.answer in ("p", "b") else ILLEGAL)
        over = played in FOLDED or played in SHOWN or played.endswith(ILLEGAL)
        views = () if over else (Message("user", example.answer[1 - player] + played),)
        return EnvironmentReply(messages=views, anew=True, role=PLAYERS[player], state=played, done=over)

    def rubric(self) -> Rubric:
        return Rubric(Reward(winnings, key="first"))


def self_play() -> RunConfig:
    """A tiny policy learns Kuhn poker against itself on a CPU."""
    return variant(
        copy4(),
        {
            "policy.tiny.symbols": "JQKpb",
            "environment.name": f"{__file__}:KuhnPoker",
            "environment.kwargs": {},
            "rollout.samples_per_group": 64,
            "rollout.max_turns": 3,
            "rollout.sampling.max_new_tokens": 1,
            "rollout.advantage.name": "rae",
            # each player overshoots what beats the other: with a bonus that falls, and smaller steps, they settle
            "trainer.loss.kwargs": {"entropy_bonus": 0.2, "entropy_decay": 1.0},
            "trainer.optimizer.decay_ratio": 1.0,
            "trainer.optimizer.min_lr_factor": 0.1,
            "generator.count": 1,
            "loop.steps": 400,
            "loop.groups_per_step": len(DEALS),
            "evaluation.every": 0,
            "evaluation.prompts": len(DEALS),
            "evaluation.target_exact_match": 0.0,
        },
    )
