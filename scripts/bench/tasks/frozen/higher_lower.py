"""One of three shown letters is the secret. Two guesses; after the first one the game says on which side to look.

    user       fbd
    assistant  d
    user       <          (the secret comes earlier in the alphabet)
    assistant  b          0.7 points; a hit with the first guess is worth 1.0
"""

import itertools

from titan_rl.environments.base import Environment, EnvironmentReply, Example, Message, Rubric

TRIPLES = ["".join(t) for t in itertools.permutations("abcdef", 3)]  # 120
GAMES = [(shown, secret) for shown in TRIPLES for secret in shown]


def guesses(transcript):
    return [m.content for m in transcript.messages if m.role == "assistant"]


def points(example, transcript):
    secret = example.answer["secret"]
    said = guesses(transcript)
    value = 0.0
    if said and said[0] == secret:
        value = 1.0
    elif len(said) > 1 and said[1] == secret:
        value = 0.7
    elif said:
        # a bit for at least guessing what is on the table
        value = 0.1 * sum(len(g) == 1 and g in example.answer["shown"] for g in said) / 2
    return {"points": value, "exact_match": float(secret in said)}


class HigherLower(Environment):
    # 20 of the triples are only for the test, each with all of its secrets
    train = [g for g in GAMES if g[0] not in TRIPLES[2::6]]
    test = [g for g in GAMES if g[0] in TRIPLES[2::6]]

    def example(self, index):
        return self.game(*self.train[(index * 37) % len(self.train)])

    def held_out(self, count):
        return [self.game(*g) for g in self.test[:count]]

    def rubric(self):
        return Rubric(points)

    def respond(self, example, transcript):
        guess = transcript.answer
        secret = example.answer["secret"]
        if guess == secret or len(guesses(transcript)) >= 2:
            return EnvironmentReply(done=True)
        if len(guess) != 1:
            hint = "?"
        else:
            hint = "<" if secret < guess else ">"
        return EnvironmentReply(messages=(Message("user", hint),))

    def game(self, shown, secret):
        return Example(prompt=(Message("user", shown),), answer={"shown": shown, "secret": secret})
