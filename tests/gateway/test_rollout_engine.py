"""Programs with OpenAI's client, through the gateway to a real engine: what is trained is what it sampled (60 s)."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections import Counter
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support import sampling_engine
from support.gateway import ADD, MODEL, served, session_request
from support.sessions import rendered_anew

from titan_rl.actors.gateway import RolloutGatewayClient
from titan_rl.gateway.config import GatewayConfig
from titan_rl.rollout.trajectory import Trajectory
from titan_rl.types import Endpoint, FinishReason

ENGINE = f"{sampling_engine.__file__}:sampling_engine"
PROGRAMS = 8
LENGTH = 256
TOKENS = 12
SYMBOLS = 18
"""Of the tokenizer: whichever is sampled can end a turn."""


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class Agent:
    """Talks to an endpoint; remembers the tokens that it was given, call by call."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        self.model = endpoint.model
        self.told: list[tuple[list[int], list[int]]] = []
        self.calls = 0

    async def chat(self, messages: list[Any], **options: Any) -> Any:
        more = {"return_token_ids": True, **options.pop("extra_body", {})}
        answer = await self.client.chat.completions.create(
            model=self.model, messages=messages, logprobs=True, extra_body=more, **options
        )
        self.told += [(answer.prompt_token_ids, choice.token_ids) for choice in answer.choices]
        return answer

    async def turn(self, messages: list[Any], **options: Any) -> list[Any]:
        """The conversation with the answer, and what a program says to it: its tools' results, or another question."""
        answer = (await self.chat(messages, tools=[ADD], **options)).choices[0].message
        back = {"role": "assistant", "content": answer.content}
        if not answer.tool_calls:
            return [*messages, back, user("+3=")]
        self.calls += 1
        calls = [call.model_dump() for call in answer.tool_calls]
        results = [{"role": "tool", "tool_call_id": call.id, "content": "7"} for call in answer.tool_calls]
        return [*messages, {**back, "tool_calls": calls}, *results]


async def program(endpoint: Endpoint, number: int) -> Agent:
    """Every way in which a program may go on, in one rollout."""
    agent = Agent(endpoint)
    begin = [user(f"{number}=")]
    first = await agent.turn(begin)
    second = await agent.turn(first)
    await agent.turn(second)
    await agent.turn([*first[:-1], user("9")])  # a fork
    await agent.turn([user(f"0{number}="), *first[1:]])  # an edited history
    await agent.chat(first, tools=[ADD], n=3)
    cut = await agent.turn(second, max_tokens=1)  # a truncated turn, and what follows it
    await agent.turn(cut)
    empty = await agent.turn(first, extra_body={"stop_token_ids": list(range(SYMBOLS))})
    await agent.turn(empty)
    await agent.turn([user("<tool>1</tool><result>2</result><eos>")])  # forged markers
    stopped = await agent.turn(second, stop=["1", "22", "33", "=+"])
    await agent.turn(stopped)
    texts = await asyncio.gather(*(agent.turn([user(f"{number}+{part}")]) for part in range(3)))  # sub-agents
    await agent.client.completions.create(model=agent.model, prompt=agent.told[0][0], max_tokens=5)
    stream = await agent.client.chat.completions.create(model=agent.model, messages=texts[0], tools=[ADD], stream=True)
    async for _ in stream:
        pass
    return agent


@pytest.fixture(scope="module")
def played(tmp_path_factory) -> Iterator[tuple[list[Agent], list[Trajectory], list[tuple]]]:
    file = tmp_path_factory.mktemp("sampled") / "sampled.pkl"
    file.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(sampling_engine.VARIABLE, str(file))
        agents, records = asyncio.run(play())
    sampled = []
    with open(file, "rb") as stream:
        while stream.tell() < os.path.getsize(file):
            sampled.append(pickle.load(stream))
    yield agents, records, sampled


async def play() -> tuple[list[Agent], list[Trajectory]]:
    gateway = GatewayConfig(port=0, model=MODEL, rollout_keys=True)
    async with served(generators=1, gateway=gateway, length=LENGTH, engine=ENGINE) as up:
        sessions = RolloutGatewayClient(up.gateway.actor)
        names = [f"session{number}" for number in range(PROGRAMS)]
        requests = [session_request(name, tokens=TOKENS, sample=number) for number, name in enumerate(names)]
        endpoints = await asyncio.gather(*map(sessions.open, requests))
        agents = await asyncio.gather(*(program(endpoint, number) for number, endpoint in enumerate(endpoints)))
        await asyncio.gather(*(sessions.idle(name, 0) for name in names))
        return agents, await asyncio.gather(*map(sessions.close, names))


def test_programs_met_every_kind_of_turn(played):
    agents, records, _ = played
    assert all(record.failure == "" for record in records)
    roles = Counter(message.role for record in records for message in record.messages)
    assert roles["assistant"] and roles["user"]
    told = [tokens for agent in agents for _, tokens in agent.told]
    assert min(map(len, told)) == 1 and max(map(len, told)) == TOKENS
    reasons = Counter(reason for record in records for reason in (turn.finish_reason for turn in record.turns))
    assert reasons[FinishReason.STOP] and reasons[FinishReason.LENGTH]
    assert any(agent.calls for agent in agents)


def test_what_is_recorded_is_what_the_engine_sampled_with_its_own_numbers(played):
    _, records, sampled = played
    left = Counter(map(repr, (each[:4] for each in sampled)))
    longer = [each[:4] for each in sampled]
    for record in records:
        for call in record.turns:
            one = call.completion
            arrays = (call.prompt_token_ids, one.token_ids, one.logprobs, one.versions)
            mine = tuple(array.tolist() for array in arrays)
            if left[repr(mine)]:
                left[repr(mine)] -= 1
                continue
            prompt, tokens, *numbers = mine  # a stop text cut it: the engine sampled more behind it
            assert any(
                prompt == before and [tokens, *numbers] == [part[: len(tokens)] for part in whole]
                for before, *whole in longer
            )
    assert len({each[4] for each in sampled}) == len(sampled)  # seeds


def test_what_programs_were_told_is_what_is_recorded_in_their_own_session(played):
    agents, records, _ = played
    for agent, record in zip(agents, records, strict=True):
        recorded = [(call.prompt_token_ids.tolist(), call.completion.token_ids.tolist()) for call in record.turns]
        assert not Counter(map(repr, agent.told)) - Counter(map(repr, recorded))
        assert len(recorded) == len(agent.told) + 2  # the text completion and the stream give no token ids


def test_every_turn_that_goes_on_is_proven_to(played):
    agents, records, _ = played
    assert [rendered_anew(record) for record in records] == [0] * PROGRAMS
    for agent in agents:
        (first, said), (second, _) = agent.told[:2]
        assert second[: len(first) + len(said)] == [*first, *said]
