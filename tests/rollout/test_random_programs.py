"""Random programs' calls as rollouts, against a naive re-derivation (10 s)."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sessions import ADD, UNEXTENDABLE, Program, Renderer, prompt_of, user

from titan_rl.errors import RequestError, RolloutOver, TaskError
from titan_rl.rollout.samples import training_samples
from titan_rl.rollout.trajectory import Trajectory
from titan_rl.types import GenerationRequest, Message, SamplingParams, ToolSpec


def meaning(message: Message):
    return message.role, message.content, [(call.name, call.arguments) for call in message.tool_calls]


@dataclass
class Naive:
    """What was answered, as plain lists; a prompt is looked for among all of it."""

    renderer: Renderer
    answered: list[tuple[list[Message], tuple[ToolSpec, ...], list[int], list[int]]] = field(default_factory=list)

    def prompt(self, messages: list[Message], tools: tuple[ToolSpec, ...]) -> tuple[list[int], bool]:
        """The tokens, and whether they extend what was sampled."""
        for known, known_tools, before, sampled in reversed(self.answered):
            head, new = messages[: len(known)], messages[len(known) :]
            same = len(head) == len(known) and all(meaning(a) == meaning(b) for a, b in zip(head, known, strict=True))
            if same and known_tools == tools and all(message.role != "assistant" for message in new):
                try:
                    return [*before, *sampled, *self.renderer.extend(before, sampled, new, tools)], True
                except TaskError:
                    break
        return self.renderer.render(messages, tools), False


texts = st.sampled_from(["", "1", "+1"])
new_messages = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["user", "system", "tool", "assistant"]), texts).map(lambda said: Message(*said)),
        st.sampled_from([user(UNEXTENDABLE), user("<tool>1</tool>")]),  # forged: no token of it was sampled
    ),
    max_size=3,
)


def as_sent_back(message: Message, draw) -> Message:
    """Clients drop and make up what does not count."""
    calls = tuple(call._replace(id=draw(texts)) for call in message.tool_calls)
    return message._replace(tool_calls=calls, reasoning=draw(texts), name=draw(texts))


def next_conversation(histories: list[list[Message]], draw) -> list[Message]:
    messages = list(draw(st.sampled_from(histories))) if histories and draw(st.integers(0, 4)) else []
    messages = messages[: draw(st.integers(0, len(messages)))] if draw(st.integers(0, 4)) == 0 else messages
    if messages and draw(st.integers(0, 4)) == 0:
        place = draw(st.integers(0, len(messages) - 1))
        edit = draw(st.sampled_from([{"content": draw(texts)}, {"role": "user"}, {"role": "tool"}, {"tool_calls": ()}]))
        messages[place] = messages[place]._replace(**edit)
    messages = [as_sent_back(message, draw) for message in messages]
    return [*messages, *draw(new_messages)] or [user("1")]


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_every_sampled_token_of_any_program_is_trained_once_behind_what_it_was_sampled_behind(renderer, data):
    program, naive, draw = Program(renderer), Naive(renderer), data.draw
    (stop, call_end), one = renderer.stop_token_ids, renderer.encode("1")
    # Few, so that equal ones meet; several of them read alike.
    turns = [[stop], one, [*one, stop], [call_end], *map(renderer.encode, ("<tool>1</tool>", "<tool>+</tool>"))]
    histories: list[list[Message]] = []
    expected: list[tuple[list[int], list[int], list[float]]] = []
    answers: list[tuple[GenerationRequest, list[Message] | None, tuple[ToolSpec, ...]]] = []
    for _ in range(draw(st.integers(1, 8))):
        tools = draw(st.sampled_from([(), (ADD,)]))
        choices = draw(st.sampled_from([1, 1, 2]))
        if draw(st.integers(0, 5)) == 0:
            tokens = draw(st.lists(st.sampled_from([*one, stop, call_end]), min_size=1, max_size=4))
            asked = program.ask_tokens(tokens, choices=choices)
            assert prompt_of(asked) == tokens
            answers += [(each, None, ()) for each in asked]
        else:
            messages = next_conversation(histories, draw)
            prompt, _ = naive.prompt(messages, tools)
            if not prompt:
                with pytest.raises(RequestError, match="empty"):
                    program.ask(messages, tools, choices=choices)
                continue
            asked = program.ask(messages, tools, choices=choices)
            assert prompt_of(asked) == prompt
            answers += [(each, messages, tools) for each in asked]
        # Some calls stay open while others are made and answered.
        for _ in range(draw(st.integers(0, len(answers)))):
            each, asked_messages, tools = answers.pop(draw(st.integers(0, len(answers) - 1)))
            if draw(st.integers(0, 6)) == 0:
                program.trajectory.dropped([each.request_id])
                continue
            sampled = draw(st.sampled_from(turns))
            stopped = sampled[-1:] in ([call_end], [stop])
            first = next(program._logprobs)
            program._logprobs = itertools.chain([first], program._logprobs)
            answer = program.answer(each, sampled, tools, stopped=stopped)
            logprobs = [-float(first + place) for place in range(len(sampled))]
            expected.append((each.prompt_token_ids.tolist(), sampled, logprobs))
            if asked_messages is not None:
                histories.append([*asked_messages, answer])
                naive.answered.append((histories[-1], tools, *expected[-1][:2]))
    assert_trained_once(program.trajectory, expected)
    assert_trained_once(program.trajectory.close(), expected)


def assert_trained_once(played: Trajectory, expected: list[tuple[list[int], list[int], list[float]]]) -> None:
    trained = {}
    tree = pickle.loads(pickle.dumps(played)).tree  # as it comes from the gateway
    for branch in training_samples(0, [(0, 0.0, tree)], rollouts=1):
        assert branch.routes[:-1].ravel().tolist() == [*range(len(branch.token_ids) - 1)], "each is told by some turn"
        for place in np.flatnonzero(branch.loss_mask):
            logprob = float(branch.logprobs[place])
            assert logprob not in trained
            trained[logprob] = branch.token_ids[: place + 1].tolist()
    wanted = {
        logprob: [*prompt, *sampled[: place + 1]]
        for prompt, sampled, logprobs in expected
        for place, logprob in enumerate(logprobs)
    }
    assert trained == wanted


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_no_program_gets_more_than_its_turns_and_tokens(renderer, data):
    draw = data.draw
    turns, tokens = draw(st.integers(1, 6)), draw(st.integers(1, 30))
    program = Program(renderer, {"max_turns": turns, "max_sampled_tokens": tokens})
    asked_turns, sampled, open_calls = 0, 0, []
    for _ in range(12):
        choices, wanted = draw(st.integers(1, 3)), draw(st.integers(1, 20))
        promised = sum(each.sampling.max_new_tokens for each in open_calls)
        try:
            asked = program.ask([user("1")], choices=choices, wanted=SamplingParams(max_new_tokens=wanted))
        except RolloutOver:
            assert asked_turns + choices > turns or tokens - sampled - promised < choices
        else:
            asked_turns += choices
            open_calls += asked
            share = (tokens - sampled - promised) // choices
            assert {each.sampling.max_new_tokens for each in asked} == {min(wanted, share)}
        for _ in range(draw(st.integers(0, len(open_calls)))):
            each = open_calls.pop(draw(st.integers(0, len(open_calls) - 1)))
            if draw(st.booleans()):
                program.trajectory.dropped([each.request_id])
            else:
                said = draw(st.integers(0, each.sampling.max_new_tokens))
                program.answer(each, [renderer.encode("1")[0]] * said)
                sampled += said
        assert asked_turns <= turns and sampled <= tokens


# What extends, and what counts as rendered anew.
