"""schemathesis against the gateway's own OpenAPI description: no 5xx, and no work left behind (30 s)."""

from __future__ import annotations

import pytest
from support.fuzzing import fuzz
from support.gateway import MODEL, client, say, served, session_request

from titan_rl.actors.gateway import GatewayClient
from titan_rl.gateway.config import GatewayConfig

LENGTH = 64
"""Of prompt and completion: what a fuzzer asks for is soon answered."""


@pytest.mark.acceptance  # in CI: the next one, without the coverage of every bound
async def test_no_request_that_a_fuzzer_makes_up_is_a_server_error(tmp_path):
    async with served(generators=1, length=LENGTH) as up:
        await fuzz(up, tmp_path)
        answer = await client(up).chat.completions.create(model=MODEL, messages=say("1"))
        assert answer.choices[0].message.content == "1"


async def test_no_request_that_a_fuzzer_makes_up_in_a_session_is_a_server_error(tmp_path):
    async with served(generators=2, gateway=GatewayConfig(port=0, model=MODEL, rollout_keys=True)) as up:
        sessions = GatewayClient(up.gateway)
        endpoint = await sessions.open(session_request("fuzzed", tokens=8, max_turns=1 << 30))
        program = client(up, endpoint.api_key)
        await program.chat.completions.create(model=MODEL, messages=say("1"))
        await program.completions.create(model=MODEL, prompt="1")
        await fuzz(up, tmp_path, endpoint.api_key, phases="fuzzing")  # the bounds are those of the schema above
        record = await sessions.close("fuzzed")
        assert record.failure == ""
        assert record.turns
