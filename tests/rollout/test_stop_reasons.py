"""Every rollout says why it ended (6 s)."""

import asyncio

import pytest
from support.rollouts import TASKS, UNRULY, Lines, ScriptedPolicy, completion, request, runner

from titan_rl.errors import RequestError
from titan_rl.loop.records import _shares_of_stop_reasons
from titan_rl.rollout.report import report_of
from titan_rl.types import FinishReason, StopReason

CALLING = f"{TASKS / 'calling.py'}:Calling"
COUNTDOWN = f"{UNRULY}:Countdown"


async def reason_of(calling_path, policy, name, *, max_new_tokens=6, **options):
    async with runner(calling_path, name, **options) as group_runner:
        asked = request(4, samples=1, max_new_tokens=max_new_tokens)
        (rollout,) = report_of(asked, await group_runner.run_group(asked, policy), ()).rollouts
    return rollout.stop_reason


@pytest.mark.parametrize(
    ("name", "text", "options", "reason"),
    [
        ("copy", "7$", {}, StopReason.STOP),
        ("copy", "7777777", {}, StopReason.LENGTH),
        (COUNTDOWN, "7$", {}, StopReason.DONE),
        (COUNTDOWN, "7$", {"max_turns": 2}, StopReason.MAX_TURNS),
        (CALLING, "<tool>1</tool>", {"max_turns": 2}, StopReason.MAX_TURNS),
        (COUNTDOWN, "7$", {"max_sampled_tokens": 4}, StopReason.TOKEN_BUDGET),
        (COUNTDOWN, "7$", {"max_model_len": 6}, StopReason.CONTEXT_FULL),
        (COUNTDOWN, "7$", {"max_model_len": 2}, StopReason.CONTEXT_FULL),
        (COUNTDOWN, "7$", {"kwargs": {"behaviour": {"4": "raise"}}}, StopReason.ERROR),
        (f"{UNRULY}:Unruly", "7$", {"kwargs": {"behaviour": {"4": "hang"}}, "step_seconds": 0.5}, StopReason.TIMEOUT),
        (
            f"{UNRULY}:UnrulyAsync",
            "7$",
            {"kwargs": {"behaviour": {"4": "await for ever"}}, "step_seconds": 0.5},
            StopReason.TIMEOUT,
        ),
    ],
)
async def test_a_rollout_says_why_it_ended(calling_path, name, text, options, reason):
    assert await reason_of(calling_path, Lines(calling_path, *[text] * 4), name, **options) is reason


async def test_a_rollout_that_was_cut_from_outside_says_so(calling_path):
    async def aborted(a_request):
        return completion(a_request.request_id, [3], FinishReason.ABORT)

    async def never(a_request):
        await asyncio.Event().wait()

    refused = ScriptedPolicy(calling_path, lambda a_request: RequestError("no"))
    assert await reason_of(calling_path, aborted, "copy") is StopReason.ABORT
    assert await reason_of(calling_path, never, "copy", seconds=0.2) is StopReason.TIMEOUT
    assert await reason_of(calling_path, refused, "copy") is StopReason.ERROR


async def test_the_metrics_count_every_reason_as_a_share(calling_path):
    async with runner(calling_path) as group_runner:
        asked = request(4, samples=4, max_new_tokens=2)
        answers = iter(["7", "77", "7", "777"])
        result = await group_runner.run_group(asked, ScriptedPolicy(calling_path, lambda a_request: next(answers)))
    shares = _shares_of_stop_reasons(report_of(asked, result, ()).rollouts)
    assert shares[StopReason.STOP] == shares[StopReason.LENGTH] == 0.5
    assert set(shares) == set(StopReason) and sum(shares.values()) == 1.0
