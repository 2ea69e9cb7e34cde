"""Adding up three digits; the exercises are in three_sums.jsonl, one {"q": "3+5+1=", "a": 9} per line."""

from pathlib import Path

from titan_rl.environments.base import Environment


def score(example, transcript):
    wanted = str(example.answer)
    said = transcript.answer.strip()
    if said == wanted:
        return {"score": 1.0, "exact_match": 1.0}
    if not said.isascii() or not said.isdigit() or len(said) > 2:
        return {"score": 0.0, "exact_match": 0.0}
    # a number at least: up to 0.6 for being near
    off = abs(int(said) - int(wanted))
    return {"score": max(0.1, 0.6 - 0.05 * off), "exact_match": 0.0}


ThreeSums = Environment.from_examples(Path(__file__).parent / "three_sums.jsonl", score, prompt="q", answer="a")
