"""Part (d) of router.py: throughput of a fleet while one of its generators is killed with SIGKILL and replaced.

Real generator actors with simulated engines whose pace is known, behind a real router. More clients than the engines
can run at once keep them busy. The windows follow each other without a gap: all serve; one is dead; its replacement
starts; all serve again. What the dead generator had sampled is lost and sampled again, so it is missing from the second
window.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

from parts.fleet import Fleet, fleet, make_request

from titan_rl.actors.router import GeneratorRouter
from titan_rl.actors.router_client import RouterClient
from titan_rl.generation.config import GeneratorConfig
from titan_rl.routing.health import GeneratorStatus

GENERATORS, BATCH = 4, 16
FEWEST_TOKENS, MOST_TOKENS = 8, 40
CLIENTS = GENERATORS * BATCH * 3 // 2
VICTIM = "generator1"


class Load:
    """Clients that ask for one completion after the other."""

    def __init__(self, router: RouterClient) -> None:
        self._router = router
        self._numbers = itertools.count()
        self.tokens = 0
        self.answers = 0

    async def client(self) -> None:
        while True:
            number = next(self._numbers)
            tokens = FEWEST_TOKENS + number * 7 % (MOST_TOKENS - FEWEST_TOKENS + 1)  # so that not all end at once
            completion = await self._router.generate(make_request(f"r{number}", new_tokens=tokens, seed=(number,)))
            if len(completion.token_ids) != tokens:
                raise RuntimeError(f"{completion.request_id}: {len(completion.token_ids)} tokens instead of {tokens}")
            self.tokens += tokens
            self.answers += 1


async def measure_replacement(window: float) -> tuple[list[list[Any]], dict[str, Any]]:
    """Rows for people (generators, tokens/s, seconds, ratio to what they should do) and figures; a window has so many
    seconds."""
    config = GeneratorConfig(
        count=GENERATORS,
        engine=f"{Path(__file__).parent / 'simulated.py'}:steady",
        max_model_len=64,
        max_num_seqs=BATCH,
    )
    async with fleet(config) as up:
        router = up.router("router", up.config.router)
        await router.pull_model_state_dict(up.checkpoint.publish())
        load = Load(router)
        async with asyncio.TaskGroup() as tasks:  # the first request that fails ends it
            clients = [tasks.create_task(load.client()) for _ in range(CLIENTS)]
            found = await _windows(up, router, load, window)
            for client in clients:
                client.cancel()
        rows, figures = found
        return rows, figures | {"seconds_until_a_spare_serves": round(await _spare(up), 3)}


async def _spare(up: Fleet) -> float:
    """Seconds from a SIGKILL until a spare serves in the place of the killed generator."""
    router = up.router("router-with-a-spare", up.config.router, serving=GENERATORS - 1)
    await router.pull_model_state_dict(up.checkpoint.publish())
    killed = await _kill(up, router)
    while sum(each.state == "serving" for each in await router.fleet_status()) < GENERATORS - 1:
        pass  # each look is a round trip
    return time.monotonic() - killed


async def _kill(up: Fleet, router: RouterClient) -> float:
    """Returns when it was killed; the router has heard of it by then."""
    heard = asyncio.Event()
    event_loop = asyncio.get_running_loop()
    up.on_fault = lambda fault: event_loop.call_soon_threadsafe(heard.set)
    killed = time.monotonic()
    os.kill(up.pids[VICTIM][0], signal.SIGKILL)
    await heard.wait()
    await router.call(GeneratorRouter.generator_lost, VICTIM, "it was killed")
    return killed


async def _windows(
    up: Fleet, router: RouterClient, load: Load, window: float
) -> tuple[list[list[Any]], dict[str, Any]]:
    rows: list[list[Any]] = []
    began, tokens = time.monotonic(), 0

    def begin() -> None:
        nonlocal began, tokens
        began, tokens = time.monotonic(), load.tokens

    def end(generators: int, doing: str) -> float:
        seconds = time.monotonic() - began
        speed = (load.tokens - tokens) / seconds
        expected = rows[0][1] * generators / GENERATORS if rows else speed
        rows.append([f"{generators} of {GENERATORS}{doing}", speed, seconds, speed / expected])
        begin()
        return speed / expected

    await asyncio.sleep(window / 4)  # until every engine is full
    begin()
    await asyncio.sleep(window)
    end(GENERATORS, "")

    killed = await _kill(up, router)
    noticed = time.monotonic() - killed
    before = await _status(router)
    await asyncio.sleep(window)
    with_three = end(GENERATORS - 1, "")
    starts = time.monotonic()
    await up.start(VICTIM)
    after = await _status(router)
    to_the_dead = after.in_flight + after.served + after.failed - before.in_flight - before.served - before.failed
    await router.call(GeneratorRouter.generator_joined, VICTIM, up.generators[VICTIM])
    while (await _status(router)).state != "serving":
        pass  # each look is a round trip
    serves_again = time.monotonic() - starts
    starting = end(GENERATORS - 1, ", one starts")
    await asyncio.sleep(window)
    again = end(GENERATORS, " again")
    return rows, {
        "tokens_per_second_before": round(rows[0][1], 1),
        "ratio_to_three_quarters_while_dead": round(with_three, 3),
        "ratio_to_before_once_replaced": round(again, 3),
        "requests_to_the_dead": to_the_dead + before.in_flight,
        "seconds_to_notice": round(noticed, 3),
        "ratio_to_three_quarters_while_it_starts": round(starting, 3),
        "seconds_from_start_to_serving": round(serves_again, 2),
        "requests_answered": load.answers,
    }


async def _status(router: RouterClient) -> GeneratorStatus:
    (status,) = [each for each in await router.fleet_status() if each.name == VICTIM]
    return status
