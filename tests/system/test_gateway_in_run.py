"""A gateway inside a run: rollouts' keys work while it lives, and its death ends the run (20 s)."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from pathlib import Path

import openai
import pytest

from titan_rl.actors.gateway import GatewayClient
from titan_rl.config_registry import copy4
from titan_rl.controller.faults import FaultBoard
from titan_rl.errors import ActorFailed
from titan_rl.launch.start import start
from titan_rl.rollout.turns import RolloutRequest
from titan_rl.types import PolicyVersion

PLAYED = """
from titan_rl.environments.copy import Copy


class Played(Copy):
    def play(self, example, endpoint): ...
"""


async def test_programs_play_in_a_run_whose_weights_they_sample_and_which_ends_with_its_gateway(tmp_path: Path) -> None:
    recipe = copy4()
    task = tmp_path / "played.py"
    task.write_text(PLAYED)
    config = dataclasses.replace(
        recipe,
        environment=dataclasses.replace(recipe.environment, name=f"{task}:Played"),
        generator=dataclasses.replace(recipe.generator, count=1, engine="simulated"),
    )
    board = FaultBoard()
    async with start(config, log_directory=tmp_path / "logs", faults=board) as system:
        await system.router.pull_model_state_dict(await system.trainer.push_model_state_dict())
        sessions = GatewayClient(system.gateway, seconds=300)
        group = system.train_group(3, PolicyVersion(0, 0))
        request = RolloutRequest(session_id="s", group=group, sample=1, max_turns=2, max_sampled_tokens=0)
        endpoint = await sessions.open(request)
        client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        answer = await client.completions.create(model=endpoint.model, prompt="12=", temperature=0.1)
        assert answer.usage.completion_tokens <= group.sampling.max_new_tokens
        record = await sessions.close("s")
        (call,) = record.turns
        assert record.failure == ""
        assert set(call.completion.versions.tolist()) == {PolicyVersion(0, 0).encode()}

        os.kill(system.pids["gateway"][0], signal.SIGKILL)
        with pytest.raises(ActorFailed, match="gateway"):
            await board.watch(asyncio.Event().wait())
        with pytest.raises(ActorFailed, match="gateway"):
            await sessions.open(request)
    assert not list(Path("/dev/shm").glob(f"titan_rl-{os.getpid()}-*"))
