"""Chat formats of the library `renderers`, each over a tokenizer of bytes and the format's own marks: no token that was
sampled is ever rendered again, whatever the policy says (10 s; `-m acceptance`: 10,000 conversations)."""

from __future__ import annotations

import numpy as np
import pytest
from support.formats import FORMATS, TOOLS, format_over_bytes
from support.rollouts import request

from titan_rl.chat.chat_renderer import ChatRenderer
from titan_rl.rollout.trajectory import RolloutRequest, Trajectory, first_prompt
from titan_rl.types import Completion, FinishReason, Message, SamplingParams, ToolCall

TURNS = 4


@pytest.fixture(scope="module", params=FORMATS)
def chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return format_over_bytes(request.param, lambda: tmp_path_factory.mktemp("marked"))


def sampled(chat: ChatRenderer, chance: np.random.Generator) -> tuple[list[int], FinishReason]:
    """What a policy may say: any tokens, or a call as the format has it, whole or cut."""
    said = chance.integers(0, chat.vocab_size, chance.integers(1, 12)).tolist()
    if chance.random() < 0.4:
        call = ToolCall("add", {"terms": chance.integers(0, 9, 2).tolist()}, id="call-1")
        try:
            said = chat.say(Message("assistant", "", (call,)))
        except Exception:  # not every format writes a call in one turn
            said = chat.encode("12 and 5")
        said = said[: chance.integers(1, len(said) + 1)]
    said = [token for token in said if token not in chat.stop_token_ids]
    stops = chance.random() < 0.7
    said += [int(chance.choice(chat.stop_token_ids))] * stops or [0] * (not said)
    return said, FinishReason.STOP if stops else FinishReason.LENGTH


def play(chat: ChatRenderer, chance: np.random.Generator) -> None:
    group = request(samples=1)
    rollout = RolloutRequest(session_id="s", group=group, sample=0, max_turns=99, max_sampled_tokens=0)
    trajectory = Trajectory(rollout, chat, run_seed=0, max_model_len=0)
    tools = TOOLS[: chance.integers(0, 3)]
    system = [Message("system", "Be brief.")] if chance.random() < 0.3 else []
    messages = [*system, Message("user", "".join(map(chr, chance.integers(32, 0x3FF, 5))))]
    prompt = first_prompt(chat, messages, tools)
    trail: list[int] = []
    for number in range(TURNS):
        assert prompt.token_ids[: len(trail)].tolist() == trail
        (asked,) = trajectory.ask(f"c{number}", [(prompt, SamplingParams(max_new_tokens=64))], choices=1)
        tokens, reason = sampled(chat, chance)
        message = chat.parse(tokens, reason, prompt.token_ids, tools)
        completion = Completion(
            request_id=asked.request_id,
            token_ids=np.array(tokens, np.int32),
            logprobs=np.zeros(len(tokens), np.float32),
            versions=np.zeros(len(tokens), np.int64),
            finish_reason=reason,
        )
        turn = trajectory.answered(completion, message, stopped=reason is FinishReason.STOP)
        assert not turn.rendered_anew
        trail = [*prompt.token_ids.tolist(), *tokens]
        answers = [Message("tool", "7", tool_call_id=call.id or "x", name=call.name) for call in message.tool_calls]
        messages = [*messages, message, *(answers or [Message("user", "go on")])]
        prompt = trajectory.prompt_of_chat(messages, tools)
    assert prompt.token_ids[: len(trail)].tolist() == trail
    assert trajectory.tree.leaves == 1


def test_what_was_sampled_is_never_rendered_again(chat: ChatRenderer) -> None:
    for seed in range(20):
        play(chat, np.random.default_rng(seed))


@pytest.mark.acceptance
@pytest.mark.timeout(1200)
def test_what_was_sampled_is_never_rendered_again_in_ten_thousand_conversations(chat: ChatRenderer) -> None:
    for seed in range(-(-10_000 // len(FORMATS))):
        play(chat, np.random.default_rng(seed + 1000))
