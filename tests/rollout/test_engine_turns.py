"""Rollouts with tools, cut histories and other prompts by a real engine: what is trained is what it sampled (20 s)."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from engine_turns import GROUPS, SAMPLES
from support.rollouts import calling_policy

from titan_rl.generation.config import generator_environment


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    directory = tmp_path_factory.mktemp("played")
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    script = Path(__file__).parent / "engine_turns.py"
    subprocess.run(
        [sys.executable, script, calling_policy(directory), directory / "results.pkl"],
        env=os.environ
        | generator_environment("cpu")
        | rank
        | {"PYTHONPATH": os.pathsep.join([str(script.parent), *filter(None, sys.path)])},
        check=True,
        timeout=600,
    )
    return pickle.loads((directory / "results.pkl").read_bytes())


def test_the_conversations_are_of_every_kind(played):
    roles = [[message.role for message in messages] for _, messages, _ in played["rollouts"]]
    assert len(roles) == GROUPS * SAMPLES and not any(error for error, _, _ in played["rollouts"])
    assert any("tool" in each for each in roles) and any("tool" not in each for each in roles)
    assert any(len(tokens) == 12 for _, tokens, _, _ in played["asked"])  # cut off
    assert len(played["asked"]) == sum(turns for _, _, turns in played["rollouts"])


def test_every_token_that_was_sampled_is_trained_once_behind_its_prompt_with_the_engines_numbers(played):
    sampled = sorted(
        (*prompt, *tokens[:position], token, logprobs[position], versions[position])
        for prompt, tokens, logprobs, versions in played["asked"]
        for position, token in enumerate(tokens)
    )
    trained = sorted(
        (
            *sample.token_ids[: position + 1].tolist(),
            float(sample.logprobs[position]),
            int(sample.versions[position]),
        )
        for sample in played["samples"]
        for position in np.flatnonzero(sample.loss_mask)
    )
    assert trained == sampled


def test_every_branch_has_a_name_of_its_own(played):
    names = [(sample.group_id, sample.sample) for sample in played["samples"]]
    assert len(set(names)) == len(names) > GROUPS * SAMPLES
    for sample in played["samples"]:
        siblings = [each for each in played["samples"] if each.group_id == sample.group_id]
        rollout = [each for each in siblings if each.sample % SAMPLES == sample.sample % SAMPLES]
        assert len({(each.advantage, each.reward) for each in rollout}) == 1
