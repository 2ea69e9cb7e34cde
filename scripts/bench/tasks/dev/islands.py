# how many islands (runs of #) are there in a strip of sea? "##..#.#." -> 3
from titan_rl.environments.base import Environment

strips = [format(n, "08b").replace("1", "#").replace("0", ".") for n in range(256)]
rows = [{"strip": s, "islands": len([run for run in s.split(".") if run])} for s in strips]


def count(example, transcript):
    try:
        guess = int(transcript.answer)
    except ValueError:
        return {"count": 0.0, "exact_match": 0.0}
    error = abs(guess - example.answer)
    return {"count": {0: 1.0, 1: 0.4}.get(error, 0.1), "exact_match": float(error == 0)}


Islands = Environment.from_examples(rows, count, prompt="strip", answer="islands")
