"""Whole runs whose tokens are drawn from parts of the vocabulary, by nucleus, by grammar and by both at once: what was
sampled is what is trained, asynchronously, with hot swaps, two ranks of a generator, and after a resume (2 min)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from leftovers import finish, start_run

TASK = """
import json

import openai

from titan_rl.environments.copy import Copy
from titan_rl.environments.base import Reward, Rubric

FORM = {
    "type": "json_schema",
    "json_schema": {
        "name": "digits",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"said": {"enum": [f"{number:02}" for number in range(100)]}},
            "required": ["said"],
            "additionalProperties": False,
        },
    },
}


def right(example, transcript):
    said = json.loads(transcript.answer)["said"] if transcript.stopped else ""
    return sum(map(str.__eq__, said, example.answer)) / 2


class Formed(Copy):
    def __init__(self, seed=0):
        super().__init__(seed=seed, digits=2)

    def rubric(self):
        return Rubric(right)

    def play(self, example, endpoint):
        with openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            asked = [{"role": "user", "content": example.prompt[0].content}]
            client.chat.completions.create(model=endpoint.model, messages=asked, response_format=FORM)
"""
STEPS = 3
LARGEST = 2e-5
"""Difference between the logprobs of trainer and generators, nats."""


@pytest.mark.acceptance
@pytest.mark.parametrize("by", ["nucleus", "grammar", "both"])
def test_probability_ratios_are_one_where_tokens_were_drawn_from_a_part_of_the_vocabulary(
    by: str, tmp_path: Path
) -> None:
    file = tmp_path / "formed.py"
    file.write_text(TASK)
    given = {
        "recipe": "copy4",
        "policy.tiny.tokenizer": "chat",
        "policy.tiny.max-length": 128,
        "generator.max-model-len": 128,
        "generator.count": 1,
        "generator.tensor-parallel": 2,
        "rollout.sampling.max-new-tokens": 24,
        "loop.groups-per-step": 2,
        "loop.max-staleness": 1,
        "router.weight-sync": "hot_swap",
        "weights.max-live": 3,
        "checkpoint.every": 1,
        "evaluation.every": 0,
        "evaluation.prompts": 2,
        "evaluation.target-exact-match": 0,
    }
    if by != "grammar":
        given |= {"rollout.sampling.top-p": 0.8, "rollout.sampling.top-k": 20}
    if by != "nucleus":
        given |= {"environment.name": f"{file}:Formed", "rollout.agents.at-once": 8}
    options = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    begun = start_run(*options, "--loop.steps", str(STEPS - 1), runs=tmp_path / "runs")
    said = finish(begun)
    assert begun.returncode == 0, said
    (run,) = (tmp_path / "runs").iterdir()
    resumed = start_run("--resume", str(run), "--loop.steps", str(STEPS), runs=tmp_path / "runs")
    said = finish(resumed)
    assert resumed.returncode == 0, said
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train/loss" in line]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    compared = [line["train/logprob_difference_max"] for line in steps if line["train/on_policy_tokens"]]
    assert compared and max(compared) <= LARGEST
    trained, sampled = (sum(line[name] for line in steps) for name in ("train/trained_tokens", "rollout/tokens"))
    assert trained < 0.8 * sampled if by != "nucleus" else trained > 0.8 * sampled, "what a form forces is not trained"
