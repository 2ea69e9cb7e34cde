"""A gateway inside a run (60 s on a free machine): a script that uses OpenAI's client plays every rollout of a whole
run; rollouts' keys work while the gateway lives, and another one takes its place.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
from pathlib import Path

import openai
import pytest
from leftovers import assert_nothing_is_left, finish, listening_addresses_of, start_run, wait_for_line

from tests.support.chromium import opened
from tests.support.metrics import assert_metrics_are_known
from titan_rl.actors.gateway import RolloutGatewayClient
from titan_rl.config_registry import copy4
from titan_rl.errors import ActorGone
from titan_rl.rollout.trajectory import RolloutRequest
from titan_rl.run.start import bring_up
from titan_rl.types import PolicyVersion

SMALLER = (
    *("--loop.steps", "2", "--loop.groups-per-step", "2", "--evaluation.prompts", "8"),
    *("--loop.max-staleness", "1", "--router.weight-sync", "hot_swap", "--weights.max-live", "3"),
    *("--evaluation.target-exact-match", "0"),
    # every demonstration calls the tool, so that a policy that has seen few of them calls it too
    *("--trainer.warmup.steps", "80", "--environment.kwargs.tool-share", "1.0"),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a whole asynchronous run that listened to nothing but the host itself."""
    runs = tmp_path_factory.mktemp("runs")
    run = start_run("--recipe", "rl_configs/tool_sum.py:tool_sum_openai", *SMALLER, runs=runs)
    wait_for_line(run, "held-out")
    addresses = listening_addresses_of(run.pid)
    assert addresses and all(address.is_loopback for address in addresses)
    output = finish(run)
    assert run.returncode == 0, output
    assert_nothing_is_left(run)
    (directory,) = runs.iterdir()
    return directory


def test_an_unmodified_script_is_trained_through_the_gateway(trained: Path) -> None:
    assert_metrics_are_known(trained)
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train/loss" in line]
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["rollout/failed"] == step["rollout/branched"] == step["rollout/rendered_anew"] == 0
        assert step["reward/tool_use"] > 0 and step["rollout/turns_mean"] > 1
        assert step["train/trained_tokens"] == step["rollout/tokens"] > 0
        assert step["train/logprob_difference_max"] <= 2e-5  # what was sampled is what is trained


def test_every_control_of_its_report_works(trained: Path, tmp_path: Path) -> None:
    with opened(tmp_path) as page:
        page.open(trained / "report.html", width=390, height=844)
        assert page.use_every_control() > 90
        page.wait("document.querySelector('.message .call')?.textContent.includes('calculate')")
        page.wait("document.querySelectorAll('.token.trained').length && document.querySelectorAll('.lane').length > 5")
        assert page.errors == [] and page.requests == []
        assert page.run("document.documentElement.scrollWidth <= innerWidth"), "nothing hangs out at the side"


PLAYED = """
from titan_rl.environments.copy import Copy


class Played(Copy):
    def play(self, example, endpoint): ...
"""


async def test_programs_play_in_a_run_whose_weights_they_sample_also_after_its_gateway_died(tmp_path: Path) -> None:
    recipe = copy4()
    task = tmp_path / "played.py"
    task.write_text(PLAYED)
    config = dataclasses.replace(
        recipe,
        environment=dataclasses.replace(recipe.environment, name=f"{task}:Played"),
        generator=dataclasses.replace(recipe.generator, count=1, engine="simulated"),
    )
    said: asyncio.Queue[str] = asyncio.Queue()
    async with bring_up(config, log_directory=tmp_path / "logs", say=said.put_nowait) as meshes:
        system = meshes.system()
        assert system.gateway is not None
        await system.router.pull_model_state_dict(await system.trainer.push_model_state_dict())
        sessions = RolloutGatewayClient(system.gateway.actor)
        group = system.train_group(3, PolicyVersion(0, 0), 2)
        request = RolloutRequest(session_id="s", group=group, sample=1, max_turns=2, max_sampled_tokens=0)
        endpoint = await sessions.open(request)
        client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        answer = await client.completions.create(model=endpoint.model, prompt="12=", temperature=0.1)
        assert answer.usage.completion_tokens <= group.sampling.max_new_tokens
        record = await sessions.close("s")
        (call,) = record.turns
        assert record.failure == ""
        assert set(call.completion.versions.tolist()) == {PolicyVersion(0, 0).encode()}

        lost = await sessions.open(dataclasses.replace(request, session_id="lost"))
        os.kill(meshes.meshes["gateway"].pids[0], signal.SIGKILL)
        while not (await said.get()).startswith("gateway is back"):
            pass
        sessions.replace([system.gateway.actor])
        with pytest.raises(ActorGone, match="rollout lost was lost with its gateway"):
            await sessions.close("lost")
        again = await sessions.open(request)
        assert again.base_url == lost.base_url, "clients know the address"
        client = openai.AsyncOpenAI(base_url=again.base_url, api_key=again.api_key)
        await client.completions.create(model=again.model, prompt="12=", temperature=0.1)
        assert len((await sessions.close("s")).turns) == 1
    assert not list(Path("/dev/shm").glob(f"titan_rl-{os.getpid()}-*"))
