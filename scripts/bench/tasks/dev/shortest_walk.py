"""Walk from one house to another in a street of twelve (a to l), in as few moves as possible.

Moves: > and < go one house on or back, R and L go four. "c:i" -> "R>>" (or ">R>", …). More moves than needed cost points, and
there is nothing for a walk that leaves the street.
"""

import itertools

from titan_rl.environments.base import Environment, Example, Message, Reward, Rubric
from titan_rl.environments.dataset import is_held_out

STREET = "abcdefghijkl"
MOVES = {">": 1, "<": -1, "R": 4, "L": -4}


def shortest(start, goal):
    """One of the shortest walks, found breadth first."""
    walks = {start: ""}
    queue = [start]
    for here in queue:
        for move, distance in MOVES.items():
            there = here + distance
            if 0 <= there < len(STREET) and there not in walks:
                walks[there] = walks[here] + move
                queue.append(there)
    return walks[goal]


def walk(start, moves):
    """Where the walk ends; None if it leaves the street or is no walk."""
    for move in moves:
        if move not in MOVES:
            return None
        start += MOVES[move]
        if not 0 <= start < len(STREET):
            return None
    return start


def houses(example):
    start, goal = example.prompt[0].content.split(":")
    return STREET.index(start), STREET.index(goal)


def efficiency(example, transcript):
    start, goal = houses(example)
    moves = transcript.answer
    end = walk(start, moves)
    if end is None or not moves:
        return 0.0
    if end != goal:
        return max(0.0, 0.3 * (1 - abs(end - goal) / 11) - 0.02 * len(moves))
    return 0.4 + 0.6 * len(example.answer) / len(moves)


def exact_match(example, transcript):
    start, goal = houses(example)
    return float(walk(start, transcript.answer) == goal and len(transcript.answer) == len(example.answer))


class ShortestWalk(Environment):
    trips = [(a, b) for a, b in itertools.permutations(range(len(STREET)), 2)]

    def example(self, index):
        train = [t for t in self.trips if not is_held_out(self.text(t))]
        return self.make(train[index * 31 % len(train)])

    def held_out(self, count):
        return [self.make(t) for t in self.trips if is_held_out(self.text(t))][:count]

    def rubric(self):
        return Rubric(efficiency, Reward(exact_match, weight=0))

    def text(self, trip):
        return f"{STREET[trip[0]]}:{STREET[trip[1]]}"

    def make(self, trip):
        return Example(prompt=(Message("user", self.text(trip)),), answer=shortest(*trip))
