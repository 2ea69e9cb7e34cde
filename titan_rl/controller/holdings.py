"""The end of a run as the sample stores see it: empty, however it ends.

A run that ends well has released everything itself, or fails with what was left. One that fails or is stopped lets go:
what is being played is stopped, what was reported is released, as far as the stores still answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from titan_rl.actors.rollouts import Rollouts
from titan_rl.data_plane.sample_batch import SampleBatch
from titan_rl.errors import SamplesLeaked, TitanError
from titan_rl.rollout.report import GroupReport

LET_GO_SECONDS = 2.0
"""A run that has failed waits no longer than this for its stores; their files go with the run in any case."""

_log = logging.getLogger(__name__)


async def check_nothing_is_held(rollouts: Rollouts) -> None:
    """Raises SamplesLeaked, with what is held where, unless all stores are empty."""
    if what := await _held(rollouts):
        raise SamplesLeaked(f"the run is over and samples are still held: {what}")


async def let_go(rollouts: Rollouts, reports: Iterable[GroupReport]) -> None:
    """Stop what is being played and release what was reported. Never raises a TitanError."""
    try:
        async with asyncio.timeout(LET_GO_SECONDS):
            await rollouts.stop_playing()
            await rollouts.release(SampleBatch.concat(report.samples for report in reports))
            if what := await _held(rollouts):
                _log.info("still on their way to their release when the run ended: %s", what)
    except (TitanError, TimeoutError) as error:
        _log.warning("the samples of the failed run were not released: %s", error or type(error).__name__)


async def _held(rollouts: Rollouts) -> str:
    return "; ".join(str(report) for report in await rollouts.held() if report.samples)
