"""A program's calls as one rollout: what each rule says."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from support.sessions import (
    ADD,
    LENGTH,
    RUN_SEED,
    UNEXTENDABLE,
    VERSION,
    Program,
    prompt_of,
    rendered_anew,
    request,
    user,
)

from titan_rl.errors import RequestError, RolloutOver
from titan_rl.metrics.rollout_record import RolloutRecord
from titan_rl.rollout.report import with_numbers
from titan_rl.seeding import prompt_digest, request_seed
from titan_rl.types import FinishReason, Message, Purpose, SamplingParams


def test_an_answer_that_goes_on_is_the_tokens_before_it_and_not_rendered_again(renderer):
    program = Program(renderer)
    (asked,) = program.ask([user("1+1=")])
    # the same text in other tokens than the renderer would write: nothing can be mistaken for a rendering
    sampled = [*renderer.encode("<tool>"), *renderer.encode("2"), renderer.stop_token_ids[0]]
    answer = program.answer(asked, sampled)
    follow = program.ask([user("1+1="), answer, user("+1=")])
    assert prompt_of(follow) == [*renderer.encode("1+1="), *sampled, *renderer.encode("+1=")]
    assert rendered_anew(program.trajectory.close()) == 0


@pytest.mark.parametrize(
    ("change", "counted"),
    [
        (lambda messages: [messages[0], messages[1]._replace(content="3"), user("=")], 1),  # the answer is changed
        (lambda messages: [*messages, user("="), Message("assistant", "1"), user("=")], 1),  # the program's own words
        (lambda messages: [*messages, user(UNEXTENDABLE)], 1),  # the chat format cannot be extended
        (lambda messages: [user("2+2="), messages[1], user("=")], 0),  # an edited history
        (lambda messages: [user("2+2=")], 0),  # another conversation
        (lambda messages: [messages[0]], 0),  # the same again
        (lambda messages: [user("0"), Message("assistant", "1"), user("=")], 0),  # an example of how to answer
        (lambda messages: [*messages, user("=")], 0),  # it goes on
    ],
)
def test_counted_are_bridges_that_could_not_be_proven(renderer, change, counted):
    program = Program(renderer)
    program.says(change(program.says([user("1+1=")], "2")), "1")
    assert rendered_anew(program.trajectory.close()) == counted


def test_the_choices_of_one_prompt_count_once(renderer):
    program = Program(renderer)
    messages = [*program.says([user("1")], "2"), user(UNEXTENDABLE)]
    for asked in program.ask(messages, choices=3):
        program.answer(asked, renderer.encode("1"))
    record = program.trajectory.close()
    assert rendered_anew(record) == 1
    assert len(record.turns) == 4


# What is asked of the engines, and what is recorded.


def test_the_run_decides_how_the_policy_samples_and_the_program_where_it_ends(renderer):
    program = Program(renderer)
    wanted = SamplingParams(
        max_new_tokens=9, temperature=0.1, top_p=0.5, top_k=3, min_new_tokens=2, presence_penalty=1, stop_token_ids=(4,)
    )
    program.ask([user("1")])
    first, second = program.ask([user("1")], choices=2, wanted=wanted)
    assert first.sampling == SamplingParams(max_new_tokens=9, temperature=0.7, stop_token_ids=(4,), routes=True)
    one = prompt_digest(renderer.encode("1"))
    assert [each.seed for each in (first, second)] == [
        request_seed(RUN_SEED, Purpose.TRAIN, 7, 2, one, repeat) for repeat in (1, 2)
    ]
    assert {(each.session_id, each.min_version, each.exact_version) for each in (first, second)} == {
        ("s", VERSION, VERSION)
    }
    assert first.request_id != second.request_id


@pytest.mark.parametrize("purpose", Purpose)
@pytest.mark.parametrize("option", [{}, {"top_p": 0.9}, {"top_k": 4}, {"min_p": 0.1}, {"min_new_tokens": 1}])
def test_what_tokens_are_drawn_from_is_recorded_where_it_may_be_less_than_all_and_is_trained(renderer, purpose, option):
    group = request().group
    group = replace(group, purpose=purpose, sampling=replace(group.sampling, **option))
    (asked,) = Program(renderer, {"group": group}).ask([user("1")])
    assert asked.sampling.support == (purpose is Purpose.TRAIN and option != {})
    assert replace(asked.sampling, max_new_tokens=50, support=False) == group.sampling


def test_the_order_of_calls_that_are_open_at_once_decides_no_seed(renderer):
    def seeds(*texts: str) -> dict[str, list[int]]:
        program, found = Program(renderer), {}
        for text in texts:
            found.setdefault(text, []).append(program.ask([user(text)])[0].seed)
        return found

    one = seeds("1", "2", "1", "3")
    assert one == seeds("3", "1", "1", "2")
    assert len({seed for its in one.values() for seed in its}) == 4


def test_a_prompt_that_leaves_no_room_is_refused_and_takes_no_turn(renderer):
    program = Program(renderer, {"max_turns": 1})
    with pytest.raises(RequestError, match="max_model_len") as refused:
        program.ask_tokens([1] * LENGTH)
    assert not isinstance(refused.value, RolloutOver)
    (asked,) = program.ask_tokens([1] * (LENGTH - 3))
    assert asked.sampling.max_new_tokens == 3


def test_the_record_has_the_conversation_of_the_last_answer_and_of_several_choices_the_first(renderer):
    program = Program(renderer)
    for stopped in (renderer.encode("2"), renderer.say(Message("assistant", "2"))):
        program = Program(renderer)
        first, second = program.ask([user("1")], choices=2)
        (other,) = program.ask([user("5")])
        program.answer(other, renderer.encode("6"))
        answer = program.answer(first, stopped)
        program.answer(second, renderer.encode("3"))
        record = pickle.loads(pickle.dumps(program.trajectory.close()))
        assert len(record.turns) == 3 and record.messages == [user("1"), answer]
        reason = FinishReason.LENGTH if len(stopped) == 1 else FinishReason.STOP
        reasons = [turn.finish_reason for turn in record.graded_last]
        assert reasons == [FinishReason.LENGTH, FinishReason.LENGTH, reason], "the graded one is the last"
        assert with_numbers(RolloutRecord(purpose=Purpose.TRAIN, group=0, attempt=0, sample=0), record).truncated == (
            reason is FinishReason.LENGTH
        )


def test_the_record_has_every_conversation_that_no_later_one_extends(renderer):
    program = Program(renderer)

    def said(*messages, answer):
        (asked,) = program.ask([*messages])
        return (*messages, program.answer(asked, renderer.encode(answer)))

    first = said(user("1"), answer="2")
    edited = said(user("3"), answer="4")
    longer = said(*first, user("5"), answer="6")
    record = program.trajectory.close()
    assert (record.side_conversations, record.messages) == ([edited], [*longer])


def test_tokens_without_messages_are_recorded_as_what_they_say(renderer):
    program = Program(renderer)
    (asked,) = program.ask_tokens(renderer.encode("1+1="))
    program.answer(asked, [*renderer.encode("2"), renderer.stop_token_ids[0]])
    assert program.trajectory.close().messages == [user("1+1="), Message("assistant", "2")]


def test_the_first_failure_is_recorded(renderer):
    program = Program(renderer)
    program.trajectory.record_failure("generator0 died")
    program.trajectory.record_failure("generator1 died")
    assert program.trajectory.close().failure == "generator0 died"


def test_a_closed_session_takes_nothing_more(renderer):
    program = Program(renderer)
    (asked,) = program.ask([user("1")])
    record = program.trajectory.close()
    with pytest.raises(RolloutOver):
        program.ask([user("1")])
    with pytest.raises(RolloutOver):
        program.answer(asked, renderer.encode("2"))
    program.trajectory.record_failure("later")
    assert (record.turns, record.failure) == ([], "")


def test_other_tools_than_before_are_rendered_and_counted(renderer):
    program = Program(renderer)
    messages = program.says([user("1+1=")], "2", (ADD,))
    program.says([*messages, user("=")], "1")
    assert rendered_anew(program.trajectory.close()) == 1
