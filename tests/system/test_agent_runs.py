"""A whole run in which every rollout is played by a script that uses OpenAI's client (40 s on a free machine)."""

from __future__ import annotations

import json
from pathlib import Path

from leftovers import (
    REPOSITORY,
    assert_nothing_is_left,
    finish,
    listening_addresses_of,
    start_run,
    wait_for_line,
)

SMALLER = (
    *("--loop.steps", "2", "--loop.groups-per-step", "2", "--evaluation.prompts", "8"),
    *("--evaluation.target-exact-match", "0"),
    # every demonstration calls the tool, so that a policy that has seen few of them calls it too
    *("--trainer.warmup.steps", "80", "--environment.kwargs.tool-share", "1.0"),
)


def test_an_unmodified_script_is_trained_through_the_gateway_and_nothing_listens_to_the_network(tmp_path: Path) -> None:
    config = REPOSITORY / "rl_configs" / "tool_sum_openai.toml"
    run = start_run("--config", str(config), *SMALLER, runs=tmp_path)
    wait_for_line(run, "held-out")
    addresses = listening_addresses_of(run.pid)
    assert addresses and all(address.is_loopback for address in addresses)
    output = finish(run)
    assert run.returncode == 0, output
    assert_nothing_is_left(run)

    (directory,) = tmp_path.iterdir()
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train/loss" in line]
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["rollout/failed"] == step["rollout/branched"] == step["rollout/rendered_anew"] == 0
        assert step["reward/tool_use"] > 0 and step["rollout/turns_mean"] > 1
        assert step["train/trained_tokens"] == step["rollout/tokens"] > 0
        assert step["train/logprob_difference_max"] <= 2e-5  # what was sampled is what is trained
