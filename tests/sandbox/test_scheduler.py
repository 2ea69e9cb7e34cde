"""Which worker runs which call: driven step by step, without processes or a clock (1 s)."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.sandbox.scheduler import MAX_PROCESSES, SLACK_SECONDS, Scheduler, State
from titan_rl.sandbox.wire import Call, CallKind
from titan_rl.types import Purpose


@dataclass(eq=False)
class Job:
    prompt: int = 0
    kind: CallKind = CallKind.SCORE
    over: bool = False
    call: Call = field(init=False)

    def __post_init__(self):
        self.call = Call(self.kind, Purpose.TRAIN, self.prompt)


def scheduler(*asynchronous):
    return Scheduler(asynchronous, slow_seconds=1.0, step_seconds=10.0)


def submit(schedule, *jobs):
    for job in jobs:
        schedule.submit(job)


def first_worker(schedule, *jobs):
    """A started worker with these jobs."""
    submit(schedule, *jobs)
    lists, (worker,) = schedule.plan()
    assert lists == [] and worker.state is State.STARTING
    schedule.started(worker)
    (given_to, numbered), *others = schedule.plan()[0]
    assert given_to is worker and list(numbered.values()) == list(jobs) and not others
    return worker, list(numbered)


def test_a_free_worker_takes_all_calls_and_is_free_again_when_they_are_answered():
    schedule, jobs = scheduler(), [Job(n) for n in range(3)]
    worker, numbers = first_worker(schedule, *jobs)
    assert worker.state is State.BUSY and schedule.limit(worker) == 1.0
    assert [schedule.answered(worker, number) for number in numbers] == jobs
    schedule.list_done(worker)
    assert worker.state is State.FREE and schedule.limit(worker) is None


def test_calls_behind_a_slow_one_go_to_another_worker_and_those_of_its_prompt_come_last():
    schedule = scheduler()
    slow, same, other = Job(0), Job(0), Job(1)
    worker, (number, *_) = first_worker(schedule, slow, same, other)
    assert not schedule.limit_passed(worker)
    assert worker.state is State.STUCK and worker.jobs == {number: slow} and schedule.limit(worker) == 9.0
    lists, (second,) = schedule.plan()
    assert lists == []
    schedule.started(second)
    assert second.state is State.WARY
    ((_, taken),) = schedule.plan()[0]
    assert list(taken.values()) == [other] and second.state is State.TRYING  # one call at a time


def test_a_list_that_ends_before_a_call_of_it_was_begun_puts_the_call_back():
    """The process hears that the call is slow between two calls: before it begins that call."""
    schedule, jobs = scheduler(), [Job(0), Job(1)]
    worker, (first, second) = first_worker(schedule, *jobs)
    schedule.answered(worker, first)
    assert not schedule.limit_passed(worker) and worker.jobs == {second: jobs[1]}
    schedule.list_done(worker)
    assert worker.state is State.WARY and worker.jobs == {}
    ((given_to, numbered),), _ = schedule.plan()
    assert given_to is worker and list(numbered.values()) == [jobs[1]]


def test_no_more_than_the_most_processes_are_started_and_one_at_a_time():
    schedule = scheduler()
    worker, _ = first_worker(schedule, *(Job(n) for n in range(20)))
    schedule.limit_passed(worker)
    for _ in range(1, MAX_PROCESSES):
        (worker,) = schedule.plan()[1]
        assert schedule.plan() == ([], [])
        schedule.started(worker)
    assert [each.state for each, _ in schedule.plan()[0]] == [State.TRYING]
    assert schedule.plan() == ([], [])


def test_a_slow_call_that_is_answered_leaves_a_wary_worker_that_one_quick_call_frees():
    schedule = scheduler()
    worker, (number,) = first_worker(schedule, Job())
    schedule.limit_passed(worker)
    schedule.answered(worker, number)
    schedule.list_done(worker)
    assert worker.state is State.WARY
    submit(schedule, Job(1), Job(2))
    ((_, numbered),), (_second,) = schedule.plan()
    assert worker.state is State.TRYING and len(numbered) == 1
    schedule.answered(worker, *numbered)
    schedule.list_done(worker)
    assert worker.state is State.FREE


def test_a_late_call_kills_its_worker_and_is_the_only_one_to_blame():
    schedule, jobs = scheduler(), [Job(0), Job(1)]
    worker, _ = first_worker(schedule, *jobs)
    assert not schedule.limit_passed(worker) and schedule.limit_passed(worker)
    assert worker.state is State.KILLED and schedule.limit(worker) is None
    assert schedule.worker_ended(worker) == ([jobs[0]], True)


def test_a_process_that_goes_on_with_calls_that_were_taken_from_it_is_still_watched():
    """It may have begun the next call just before it heard that the one before was slow."""
    schedule = scheduler()
    worker, (number, *_) = first_worker(schedule, Job(0), Job(1))
    schedule.limit_passed(worker)
    assert schedule.answered(worker, number) is not None and not worker.jobs
    assert schedule.limit(worker) == 9.0 and schedule.limit_passed(worker)
    assert schedule.worker_ended(worker) == ([], True)


def test_a_worker_that_dies_leaves_its_first_call_to_be_tried_alone_and_the_rest_waiting():
    schedule, jobs = scheduler(), [Job(0), Job(1), Job(0)]
    worker, _ = first_worker(schedule, *jobs)
    assert schedule.worker_ended(worker) == ([jobs[0]], False)
    (second,) = schedule.plan()[1]
    schedule.started(second)
    assert list(schedule.plan()[0][0][1].values()) == [jobs[1], jobs[2]]


def test_calls_whose_caller_left_are_not_sent():
    schedule, gone = scheduler(), Job(over=True)
    submit(schedule, gone)
    assert schedule.plan() == ([], [])


def test_a_concurrent_worker_takes_calls_as_they_come_and_all_are_suspects_when_it_dies():
    schedule = scheduler(CallKind.SCORE)
    first, second = Job(0), Job(1)
    worker, _ = first_worker(schedule, first)
    submit(schedule, second)
    assert len(schedule.plan()[0]) == 1 and worker.concurrent
    assert schedule.limit(worker) == 10.0 + SLACK_SECONDS
    assert schedule.limit_passed(worker)
    assert schedule.worker_ended(worker) == ([first, second], False)


def test_when_a_process_cannot_be_started_its_calls_are_given_up_unless_another_takes_them():
    schedule, plain, asynchronous = scheduler(CallKind.SCORE), Job(kind=CallKind.RESPOND), Job()
    submit(schedule, plain, asynchronous)
    _, (one, other) = schedule.plan()
    assert schedule.not_started(one) == [plain]  # although there is a worker for the other kind
    assert schedule.not_started(other) == [asynchronous]
    schedule = scheduler()
    worker, _ = first_worker(schedule, Job(0), Job(1))
    schedule.limit_passed(worker)
    (second,) = schedule.plan()[1]
    assert schedule.not_started(second) == []


def test_waiting_calls_of_a_kind_are_given_up_when_so_many_prompts_were_late_and_none_ever_in_time():
    schedule, waiting, other = scheduler(), Job(), Job(kind=CallKind.RESPOND)
    submit(schedule, waiting, other)
    for prompt in range(1, MAX_PROCESSES):
        for _sample in range(MAX_PROCESSES):
            assert schedule.late(Job(prompt).call) == [] and not schedule.hopeless(CallKind.SCORE)
    assert schedule.late(Job(MAX_PROCESSES).call) == [waiting] and schedule.hopeless(CallKind.SCORE)
    schedule.in_time(waiting.call)
    assert schedule.late(Job(MAX_PROCESSES + 1).call) == [] and not schedule.hopeless(CallKind.SCORE)


def test_calls_about_a_prompt_that_was_late_come_last():
    schedule, same, other = scheduler(), Job(0), Job(1)
    schedule.late(same.call)
    submit(schedule, same, other)
    (worker,) = schedule.plan()[1]
    schedule.started(worker)
    assert list(schedule.plan()[0][0][1].values()) == [other, same]


def test_a_list_that_could_not_be_sent_waits_again():
    schedule, job = scheduler(), Job()
    worker, numbers = first_worker(schedule, job)
    schedule.not_sent(worker, numbers)
    assert list(schedule.plan()[0][0][1].values()) == [job]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_call_is_answered_or_handed_back_whatever_happens(data):
    schedule = scheduler(CallKind.RESPOND)
    kinds = st.sampled_from([CallKind.SCORE, CallKind.RESPOND])
    left = {Job(data.draw(st.integers(0, 3)), data.draw(kinds)) for _ in range(data.draw(st.integers(1, 12)))}
    submit(schedule, *left)
    alive = []
    for _ in range(500):
        _, to_start = schedule.plan()
        for worker in to_start:
            schedule.started(worker)
        alive += to_start
        if not left:
            return
        busy = [each for each in alive if each.jobs or each.state in (State.BUSY, State.TRYING, State.STUCK)]
        if not busy:
            continue
        worker = data.draw(st.sampled_from(busy))
        event = data.draw(st.sampled_from(["answer", "limit", "die"]))
        if event == "answer":
            for number in list(worker.jobs)[: data.draw(st.integers(1, 3))]:
                left.discard(schedule.answered(worker, number))
            if not worker.concurrent and (not worker.jobs or data.draw(st.booleans())):
                schedule.list_done(worker)
        elif schedule.limit(worker) is None or event == "die" or schedule.limit_passed(worker):
            alive.remove(worker)
            left -= set(schedule.worker_ended(worker)[0])
    pytest.fail(f"{len(left)} calls wait for ever")
