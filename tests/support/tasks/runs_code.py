"""A code task: the reward runs what the policy wrote."""

import os

from titan_rl.environments.base import Environment
from titan_rl.isolation.policy_code import run_policy_code

ANSWERS = os.path.abspath(__file__)


def right(example, transcript):
    result = run_policy_code(transcript.answer, stdin="3 4\n", seconds=2)
    return {"right": float(result.stdout.strip() == str(example.answer)), result.ended: 1.0}


RunsCode = Environment.from_examples([{"prompt": f"add {n}", "answer": 7} for n in range(50)], right)
