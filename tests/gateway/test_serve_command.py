"""`titan-rl serve` as a user starts it, with a real vLLM engine, and fleets that die (40 s)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from support.gateway import MODEL, client, say, served, until_busy
from support.serving import serving

from titan_rl.config import PlacementConfig
from titan_rl.errors import ActorFailed
from titan_rl.gateway.config import GatewayConfig
from titan_rl.policy.config import TinyPolicyConfig
from titan_rl.policy.models.tiny import make_tiny_policy

ROOT = Path(__file__).resolve().parents[2]
KEY = "secret"
SEVERAL_QUESTIONS = 2.5
"""Seconds."""
SOON = 20.0
"""Seconds: less than the 30 after which Monarch by itself gives up waiting."""
GONE_SECONDS = 10.0
PF_EXITING = 0x4
"""Of the flags in /proc/PID/stat, whether a process has begun to end in the kernel (include/linux/sched.h)."""


@contextlib.contextmanager
def served_checkpoint(
    tmp_path: Path, *arguments: str, length: int = 128
) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """The command's process, the base URL, and the model's name; the process is stopped as by Ctrl-C at the end."""
    checkpoint = make_tiny_policy(TinyPolicyConfig(symbols="0123456789+=", max_length=length, seed=2), tmp_path)
    runs = ("--logging.directory", str(tmp_path / "runs"))
    with serving("--policy.path", str(checkpoint), *runs, *arguments, key=KEY) as found:
        yield found


def left_of(session: int) -> list[str]:
    """Command lines of the session's processes. What the kernel ends with its parent gets a moment for it."""
    until = time.monotonic() + GONE_SECONDS
    while (found := _living(session)) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def _living(session: int) -> list[str]:
    """But for those that are on their way out of the kernel."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            _, _, _, own, _, _, flags = (entry / "stat").read_text().rpartition(")")[2].split()[:7]
            if int(own) == session and not int(flags) & PF_EXITING:
                found.append((entry / "cmdline").read_text())
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
    return found


def test_a_checkpoint_is_served_by_vllm_and_ctrl_c_leaves_nothing(tmp_path):
    with served_checkpoint(tmp_path) as (process, url, model):
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=url, api_key="wrong").models.list()
        ai = openai.OpenAI(base_url=url, api_key=KEY)
        assert [each.id for each in ai.models.list()] == [model]

        def complete(**options):
            return ai.completions.create(
                model=model, prompt="1+1=", max_tokens=8, extra_body={"ignore_eos": True}, **options
            )

        first, again = complete(seed=3, n=2, logprobs=0), complete(seed=3, n=2, logprobs=0)
        assert [choice.text for choice in first.choices] == [choice.text for choice in again.choices]
        assert first.choices[0].text != first.choices[1].text
        assert len(first.choices[0].logprobs.token_logprobs) == 8
        assert all(logprob < 0 for logprob in first.choices[0].logprobs.token_logprobs)
        greedy = complete(temperature=0).choices[0].text
        streamed = "".join(chunk.choices[0].text for chunk in complete(temperature=0, stream=True))
        assert streamed == greedy
        with pytest.raises(openai.BadRequestError, match="max_model_len"):
            ai.completions.create(model=model, prompt="1+1=", max_tokens=128)
        health = httpx.get(url.removesuffix("/v1") + "/health").json()  # needs no key
        assert health["generators"] == {"generator0": {"state": "serving", "version": "v0"}}
    assert process.returncode == 0
    assert left_of(process.pid) == []
    assert not list(Path("/dev/shm").glob(f"titan_rl-{process.pid}-*"))


async def test_a_service_outlives_its_parts_and_its_clients_hear_nothing_of_it():
    async with served(generators=2, gateway=GatewayConfig(port=0, model=MODEL, api_key=KEY)) as up:
        ai, url = client(up, KEY), up.gateway.url
        calls = []
        for mesh in ("generator0", "generator1", "router"):  # for a while nobody serves
            calls.append(asyncio.create_task(ai.chat.completions.create(model=MODEL, messages=say("12"))))
            os.kill(up.meshes[mesh].pids[0], signal.SIGKILL)
        for answer in await asyncio.gather(*calls):
            assert answer.choices[0].message.content == "12"
        os.kill(up.meshes["gateway"].pids[0], signal.SIGKILL)
        patient = ai.with_options(max_retries=50)  # a connection is refused until the gateway is back
        answer = await patient.chat.completions.create(model=MODEL, messages=say("34"))
        assert answer.choices[0].message.content == "34" and up.gateway.url == url


async def test_a_generator_that_dies_while_it_is_stopped_is_given_up_at_once():
    """Monarch asks a process every second how it is, and waits for that answer however long it takes."""
    async with served(generators=2) as up:
        ai = client(up)
        victims = up.meshes["generator0"].pids
        for stopped in victims:
            os.kill(stopped, signal.SIGSTOP)
        await asyncio.sleep(SEVERAL_QUESTIONS)
        calls = [
            asyncio.create_task(ai.chat.completions.create(model=MODEL, messages=say(str(number))))
            for number in range(4)
        ]
        await until_busy(up, 1)
        os.kill(victims[0], signal.SIGKILL)
        for number, answer in enumerate(await asyncio.wait_for(asyncio.gather(*calls), SOON)):
            assert answer.choices[0].message.content == str(number)


@pytest.mark.parametrize("mesh", [pytest.param("router", marks=pytest.mark.acceptance), "generator0"])
async def test_what_is_not_to_be_replaced_ends_the_service(mesh):
    with pytest.raises(ActorFailed, match=f"{mesh} failed 1 time"):
        async with served(generators=1, placement=PlacementConfig(restarts=0)) as up:
            [victim] = [
                pid for pid in children() if f"\0{mesh}\0".encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
            ]
            os.kill(victim, signal.SIGKILL)
            await asyncio.wait_for(up.run_end.watch(asyncio.Event().wait()), SOON)


def children() -> list[int]:
    """Of this process."""
    stats = {int(stat.parent.name): stat.read_text() for stat in Path("/proc").glob("[0-9]*/stat")}
    return [pid for pid, stat in stats.items() if int(stat.rpartition(")")[2].split()[1]) == os.getpid()]
