"""Every rollout says why it ended, and what failed if something did (8 s)."""

import asyncio

import pytest
from support.rollouts import TASKS, UNRULY, Lines, ScriptedPolicy, completion, request, runner

from titan_rl.errors import RequestError, RequestLost, RequestTooLong
from titan_rl.loop.records import _shares
from titan_rl.rollout.report import report_of
from titan_rl.types import FailureKind, FinishReason, StopReason

CALLING = f"{TASKS / 'calling.py'}:Calling"
COUNTDOWN = f"{UNRULY}:Countdown"


async def end_of(calling_path, policy, name, *, max_new_tokens=6, **options):
    async with runner(calling_path, name, **options) as group_runner:
        asked = request(4, samples=1, max_new_tokens=max_new_tokens)
        (rollout,) = report_of(asked, await group_runner.run_group(asked, policy), ()).rollouts
    assert bool(rollout.error) == bool(rollout.failure)
    return rollout.stop_reason, rollout.failure


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
    ],
)
async def test_a_rollout_says_why_it_ended(calling_path, name, text, options, reason):
    assert await end_of(calling_path, Lines(calling_path, *[text] * 4), name, **options) == (reason, None)


@pytest.mark.parametrize(
    ("name", "how", "failure"),
    [
        (f"{UNRULY}:Unruly", "example raise", FailureKind.TASK),
        (COUNTDOWN, "raise", FailureKind.TASK),
        (f"{UNRULY}:Unruly", "raise", FailureKind.GRADER),
        (f"{UNRULY}:UnrulyAsync", "raise", FailureKind.GRADER),
        (f"{UNRULY}:Compared", "together raise", FailureKind.GRADER),
        (f"{UNRULY}:Unruly", "shout", FailureKind.GRADER),
        (f"{UNRULY}:Unruly", "crash", FailureKind.INFRASTRUCTURE),
        (COUNTDOWN, "crash", FailureKind.INFRASTRUCTURE),
        (f"{UNRULY}:Unruly", "hang", FailureKind.TIMEOUT),
        (f"{UNRULY}:UnrulyAsync", "await for ever", FailureKind.TIMEOUT),
    ],
)
async def test_a_rollout_says_what_failed(calling_path, name, how, failure):
    options = {"kwargs": {"behaviour": {"4": how}}, "step_seconds": 0.5 if failure is FailureKind.TIMEOUT else 20.0}
    reason = StopReason.TIMEOUT if failure is FailureKind.TIMEOUT else StopReason.ERROR
    assert await end_of(calling_path, Lines(calling_path, *["7$"] * 4), name, **options) == (reason, failure)


async def test_a_tool_that_fails_is_told_from_a_wrong_call(calling_path):
    failed = (StopReason.ERROR, FailureKind.TOOL)
    said = Lines(calling_path, "<tool>2</tool>")
    assert await end_of(calling_path, said, CALLING, max_new_tokens=20) == failed
    said = Lines(calling_path, "<tool>1</tool>", "7$")
    assert await end_of(calling_path, said, CALLING, max_new_tokens=20) == (StopReason.STOP, None)


async def test_a_rollout_that_was_cut_from_outside_says_so(calling_path):
    async def aborted(a_request):
        return completion(a_request.request_id, [3], FinishReason.ABORT)

    async def never(a_request):
        await asyncio.Event().wait()

    def refusing(error):
        return ScriptedPolicy(calling_path, lambda a_request: error("no"))

    for policy, options, end in (
        (aborted, {}, (StopReason.ABORT, FailureKind.INFRASTRUCTURE)),
        (never, {"seconds": 0.2}, (StopReason.TIMEOUT, FailureKind.TIMEOUT)),
        (refusing(RequestError), {}, (StopReason.ERROR, FailureKind.REQUEST)),
        (refusing(RequestTooLong), {}, (StopReason.CONTEXT_FULL, FailureKind.REQUEST)),
        (refusing(RequestLost), {}, (StopReason.ERROR, FailureKind.INFRASTRUCTURE)),
    ):
        assert await end_of(calling_path, policy, "copy", **options) == end
    end = (StopReason.CONTEXT_FULL, FailureKind.REQUEST)
    assert await end_of(calling_path, Lines(calling_path), COUNTDOWN, max_model_len=2) == end  # not even the prompt


async def test_the_metrics_count_every_reason_as_a_share(calling_path):
    async with runner(calling_path) as group_runner:
        asked = request(4, samples=4, max_new_tokens=2)
        answers = iter(["7", "77", "7", "777"])
        result = await group_runner.run_group(asked, ScriptedPolicy(calling_path, lambda a_request: next(answers)))
    shares = _shares("stop", StopReason, [each.stop_reason for each in report_of(asked, result, ()).rollouts])
    assert shares["stop_stop"] == shares["stop_length"] == 0.5
    assert len(shares) == len(StopReason) and sum(shares.values()) == 1.0
