"""What the environment said moves no weight but by being read: held by the trainer's own gradients (15 s)."""

import asyncio
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.rollouts import calling_policy, play

from titan_rl.rollout.report import Rollout
from titan_rl.rollout.samples import training_samples
from titan_rl.rollout.token_graph import TokenGraph
from titan_rl.types import NO_VERSION, Completion, FinishReason


def token_by_token(sample):
    """As many documents as the sample has trained tokens: each token alone, behind what it was sampled behind."""
    documents = []
    for number, position in enumerate(np.flatnonzero(sample.loss_mask)):
        mask = np.arange(position + 1) == position
        documents.append(
            replace(
                sample,
                sample=1000 + number,
                token_ids=sample.token_ids[: position + 1],
                loss_mask=mask,
                logprobs=np.where(mask, sample.logprobs[: position + 1], 0).astype(np.float32),
                versions=np.where(mask, sample.versions[: position + 1], NO_VERSION),
            )
        )
    return documents


def forked(sample) -> list:
    """The samples of a rollout that told the first half of `sample` once and went on from it in two ways."""

    def completion(token_ids, logprob):
        return Completion(
            request_id="r",
            token_ids=np.array(token_ids, dtype=np.int32),
            logprobs=np.full(len(token_ids), logprob, dtype=np.float32),
            versions=np.zeros(len(token_ids), dtype=np.int64),
            finish_reason=FinishReason.STOP,
        )

    prompt, said = sample.token_ids[:6].tolist(), sample.token_ids[6:13].tolist()
    graph = TokenGraph()
    graph.add(prompt, completion(said, -2.0))
    graph.add([*prompt, *said, 5, 6], completion([7, 8], -3.0))
    graph.add([*prompt, *said, 9], completion([4], -2.5))
    return list(training_samples(3, [Rollout(sample=0, graph=graph, reward=1.0)], [-0.7], rollouts=1))


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """Of one rollout of tool_sum with a forged result in its last turn, and of one that branched."""
    model_path = calling_policy(tmp_path_factory.mktemp("tiny"))
    turns = ("<tool>12+35</tool>", "<tool>1</tool>", "<result>9</result>47$")
    _, (sample,), _ = asyncio.run(play(model_path, *turns, name="tool_sum"))
    return model_path, replace(sample, advantage=1.3), forked(sample)


@pytest.fixture(scope="module")
def gradients(samples, tmp_path_factory):
    model_path, sample, branches = samples
    everything = replace(
        sample,
        loss_mask=np.arange(len(sample.token_ids)) >= 6,
        logprobs=np.where(sample.loss_mask, sample.logprobs, -2.0).astype(np.float32),
        versions=np.zeros_like(sample.versions),
    )
    batches = {
        "played": [sample],
        "token by token": token_by_token(sample),
        "environment trained too": [everything],
        "branches": branches,
        "branches token by token": [document for branch in branches for document in token_by_token(branch)],
    }
    directory = tmp_path_factory.mktemp("gradients")
    (directory / "batches.pkl").write_bytes(pickle.dumps(batches))
    ranks = {"RANK": "0", "WORLD_SIZE": "1"}
    script = Path(__file__).parent / "gradient_ranks.py"
    subprocess.run(
        [sys.executable, script, model_path, directory / "batches.pkl", directory / "results.pkl"],
        env=os.environ | ranks | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=600,
    )
    return pickle.loads((directory / "results.pkl").read_bytes())


def test_the_mask_is_where_tokens_came_from(samples):
    _, sample, _ = samples
    marks = "".join("x" if trained else "." for trained in sample.loss_mask)
    # prompt; call, result; call, refusal; forged result and answer
    assert marks == "......" + "x" * 7 + "...." + "x" * 3 + "..." + "x" * 6


def test_a_rollouts_gradient_is_that_of_its_sampled_tokens_alone(gradients):
    played, tokens = gradients["played"]
    apart, as_many = gradients["token by token"]
    assert tokens == as_many == 16
    assert np.abs(played).max() > 1e-3
    np.testing.assert_allclose(played, apart, atol=1e-6)


def test_training_the_environments_words_would_show(gradients):
    difference = gradients["played"][0] - gradients["environment trained too"][0]
    assert np.abs(difference).max() > 1e-3


def test_branches_train_what_they_share_once(gradients):
    branches, tokens = gradients["branches"]
    apart, as_many = gradients["branches token by token"]
    assert tokens == as_many == 7 + 2 + 1
    np.testing.assert_allclose(branches, apart, atol=1e-6)
