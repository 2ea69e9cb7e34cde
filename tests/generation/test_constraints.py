"""A random policy under a constraint says what it must, whoever samples it and wherever it goes on (20 s)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rank_processes import run_on_ranks

from titan_rl.policy.config import TinyPolicyConfig
from titan_rl.policy.models.tiny import make_tiny_policy


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_policy(TinyPolicyConfig(tokenizer="chat", max_length=1024), tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def found(policy: Path) -> dict[str, Any]:
    return run_on_ranks("vllm_constraint_scenario:everything", 1, model=str(policy), samples=100)[0]


def check_calls(found: dict[str, Any], samples: int) -> None:
    assert len(found["calls"]) == samples
    assert all(found["stopped"])
    for calls in found["calls"]:
        (call,) = calls
        assert (call["name"], call["problem"]) == ("look", "")
        assert call["arguments"].keys() == {"place", "count", "why"}
        assert isinstance(call["arguments"]["why"], str)
        assert call["arguments"]["place"] in ("here", "there")
        assert 0 <= call["arguments"]["count"] <= 99


def test_every_answer_is_one_call_that_its_schema_allows(found: dict[str, Any]) -> None:
    check_calls(found, 100)
    assert {call["arguments"]["place"] for (call,) in found["calls"]} == {"here", "there"}
    assert found["free"] == 25, "others beside them end too"


def test_what_was_forced_had_no_alternative(found: dict[str, Any]) -> None:
    assert sum(each == 0.0 for each in found["logprobs"]) > len(found["logprobs"]) / 2
    assert min(found["logprobs"]) < -0.5


def test_an_answer_that_goes_on_elsewhere_is_the_same(found: dict[str, Any]) -> None:
    assert found["goes on"] == found["whole"]


def test_a_constraint_that_cannot_be_kept_is_refused(found: dict[str, Any]) -> None:
    words = ("cannot be compiled", "cannot be compiled", "needs a stop token", "40000 characters", "would be ignored")
    assert len(found["refused"]) == len(words)
    for word, sentence in zip(words, found["refused"], strict=True):
        assert word in sentence


def test_where_nothing_is_possible_an_answer_ends(found: dict[str, Any]) -> None:
    assert found["closed"] == (True, 1)


@pytest.mark.acceptance
def test_two_ranks_say_what_one_says_in_1000_of_1000(policy: Path) -> None:
    ranks = run_on_ranks("vllm_constraint_scenario:everything", 2, model=str(policy), samples=1000)
    check_calls(ranks[0], 1000)
    assert ranks[0]["tokens"] == ranks[1]["tokens"]
