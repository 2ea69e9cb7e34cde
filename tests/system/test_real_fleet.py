"""The router over two real vLLM generators: rolling drains, hot swaps, damaged weights, a killed process.

Two fleets of one-rank generators are brought up, one after the other (about 20 s each on busy cores), and for the
acceptance list two of two ranks.
"""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from real_fleet import RealFleet, real_fleet, request

from titan_rl.errors import WeightsError
from titan_rl.routing.config import RouterConfig
from titan_rl.types import Completion, FinishReason, PolicyVersion
from titan_rl.weights.segment_files import segment_at

RANKS = [1, pytest.param(2, marks=pytest.mark.acceptance)]
TOKENS = 1800  # of a completion that is to be under way when something happens: about two seconds


def versions_of(completion: Completion) -> list[int]:
    """Steps of the versions that sampled it, in order, each once."""
    return [PolicyVersion.decode(code).step for code in dict.fromkeys(completion.versions.tolist())]


async def load(fleet: RealFleet, name: str, count: int, *, tokens: int, step: int = 0) -> list[Completion]:
    return list(
        await asyncio.gather(
            *(
                fleet.router.generate(request(f"{name}-{index}", tokens=tokens, prompt=index, step=step))
                for index in range(count)
            )
        )
    )


@pytest.mark.parametrize("tensor_parallel", RANKS)
async def test_a_rolling_drain_keeps_the_service_up_and_versions_apart(tensor_parallel: int) -> None:
    async with real_fleet(RouterConfig(max_syncing=1), tensor_parallel=tensor_parallel) as fleet:
        busy = asyncio.create_task(load(fleet, "busy", 16, tokens=TOKENS))
        while not all(status.in_flight for status in await fleet.router.fleet_status()):
            pass
        pull = asyncio.create_task(fleet.pull(1))
        seen: set[tuple[str, ...]] = set()
        while not pull.done():
            seen.add(tuple(status.state for status in await fleet.router.fleet_status()))
        assert ("syncing", "serving") in seen or ("serving", "syncing") in seen
        assert ("syncing", "syncing") not in seen
        assert set((await pull).reports) == {"generator0", "generator1"}
        assert all(versions_of(completion) in ([0], [1]) for completion in await busy)
        after = await load(fleet, "after", 8, tokens=20, step=1)
        assert all(versions_of(completion) == [1] for completion in after)
        assert {completion.generator for completion in after} == {"generator0", "generator1"}

        # Damaged weights are never served, and what runs meanwhile is not disturbed.
        publication = fleet.publish(2)
        entry = publication.manifest.entries[len(publication.manifest.entries) // 2]
        with open(segment_at(publication.location), "r+b") as segment:
            segment.seek(entry.offset + 1)
            byte = segment.read(1)
            segment.seek(entry.offset + 1)
            segment.write(bytes([byte[0] ^ 4]))
        with pytest.raises(WeightsError, match=f"v2 is served by nobody.*{entry.name} is not what was published"):
            await fleet.router.pull_model_state_dict(publication)
        assert [status.state for status in await fleet.router.fleet_status()] == ["stale", "stale"]
        waiting = asyncio.create_task(load(fleet, "waiting", 4, tokens=10))
        await fleet.pull(3)
        assert all(versions_of(completion) == [3] for completion in await waiting)


@pytest.mark.parametrize("tensor_parallel", RANKS)
async def test_hot_swaps_under_load_and_a_killed_generator_cost_nobody_an_answer(tensor_parallel: int) -> None:
    async with real_fleet(RouterConfig(weight_sync="hot_swap"), tensor_parallel=tensor_parallel) as fleet:
        busy = asyncio.create_task(load(fleet, "busy", 16, tokens=TOKENS))
        for step in (1, 2):
            while not all(status.in_flight for status in await fleet.router.fleet_status()):
                pass
            pull = await fleet.pull(step)
            assert all(report.requests_in_flight > 0 for report in pull.reports.values())
            assert [status.state for status in await fleet.router.fleet_status()] == ["serving", "serving"]
        completions = await busy
        assert any(len(versions_of(completion)) > 1 for completion in completions)
        for completion in completions:
            assert versions_of(completion) == sorted(versions_of(completion))
            assert len(completion.token_ids) == len(completion.logprobs) == TOKENS
            assert completion.finish_reason is FinishReason.LENGTH

        doomed = asyncio.create_task(load(fleet, "doomed", 16, tokens=TOKENS))
        while not all(status.in_flight for status in await fleet.router.fleet_status()):
            pass
        os.kill(fleet.pids["generator1"][-1], signal.SIGKILL)
        survivors = await doomed
        assert all(len(completion.token_ids) == TOKENS for completion in survivors)
        statuses = {status.name: status for status in await fleet.router.fleet_status()}
        assert statuses["generator1"].state == "dead"
        assert statuses["generator0"].state == "serving"
        assert set((await fleet.pull(3)).reports) == {"generator0"}
