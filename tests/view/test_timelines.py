"""Timelines of a run: who waited for whom, and the idle shares. On timelines that the tests make up."""

import mmap
import os
import socket
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import make_run

from titan_rl.loop.records import idle_shares, memory_of
from titan_rl.metrics.timeline import Memory, MemoryGauge, Pulse, Uptime
from titan_rl.view.timelines import Account, Process, RecordedSpan, accounts, idle_accounts, read_processes

LABELS = ["", "", "rollouts", "slots", "generators", "rank 0", "environment"]


def process(mesh: str, *pieces: tuple[float, str], rank: int = 0, others: tuple[RecordedSpan, ...] = ()) -> Process:
    """A process that begins at 0 and does these things one after the other: seconds, and for whom it waits."""
    found = Process(mesh, rank)
    at = 0.0
    for seconds, waits_for in pieces:
        found.main.append(RecordedSpan("wait" if waits_for else "work", at, seconds, waits_for))
        at += seconds
    found.others += others
    return found


def step(began: float, seconds: float) -> RecordedSpan:
    return RecordedSpan("train", began, seconds)


PIECES = st.lists(st.tuples(st.floats(0.01, 3), st.sampled_from(LABELS)), max_size=12)


@given(
    st.lists(
        st.tuples(st.sampled_from(["trainer", "generator0", "rollout0", "router"]), PIECES), min_size=1, max_size=6
    )
)
def test_the_shares_of_every_mesh_add_up_to_the_whole_window(made):
    ranks: Counter[str] = Counter()
    processes = []
    for mesh, pieces in made:
        processes.append(process(mesh, *pieces, rank=ranks[mesh]))
        ranks[mesh] += 1
    for each in accounts(processes, (1.0, 9.0)):
        assert each.ranks == ranks[each.mesh]
        assert each.busy + each.idle == pytest.approx(1.0)
        direct = [
            max(0.0, min(span.ended, 9.0) - max(span.began, 1.0))
            for one in processes
            if one.mesh == each.mesh
            for span in one.main
            if not span.waits_for
        ]
        assert each.busy == pytest.approx(sum(direct) / 8.0 / each.ranks, abs=1e-4), "who works is never idle"


def test_a_generator_without_requests_waits_for_what_the_rollout_workers_wait_for():
    processes = [
        process("generator0", (10, "rollouts")),
        process("generator0", (10, "rank 0"), rank=1),
        process("rollout0", (4, ""), (3, "slots"), (3, "environment")),
        process("rollout1", (5, "slots"), (5, "slots")),
    ]
    generator, *_ = accounts(processes, (0.0, 10.0))
    assert generator == Account(
        "generator0", 2, 0.0, pytest.approx({"rollouts": 0.4, "slots": 0.3, "environment": 0.3})
    )


def test_the_time_without_a_process_is_none_of_work():
    trainer, _ = accounts([process("trainer", (4, "")), process("router", (10, ""))], (0.0, 10.0))
    assert trainer.waits == pytest.approx({"its restart": 0.6})


def test_the_time_between_a_run_and_its_resumption_is_not_counted():
    before = [process("trainer", (10, "")), process("controller", (10, ""), others=(step(2, 8),))]
    later = [process("trainer", (105, "rollouts")), process("controller", (105, ""), others=(step(100, 4),))]
    for each in later:
        each.main[0] = each.main[0]._replace(began=95.0, seconds=10.0)
    found = idle_accounts(before + later)
    (trainer,) = (each for each in found if each.mesh == "trainer")
    assert trainer.waits == pytest.approx({"rollouts": 4 / 12})
    assert idle_accounts(before[:1]) == [], "there is no step"


def test_idle_shares_are_those_of_the_time_between_two_polls():
    def look(**ranks):
        return {mesh: [Pulse(1, Uptime(*each)) for each in lived] for mesh, lived in ranks.items()}

    before = look(trainer=[(10, 1), (10, 2)], router=[(50, 5)], rollout0=[()])
    after = look(trainer=[(20, 6), (20, 2)], router=[(1, 1)], new=[(1, 1)], rollout0=[()])
    assert idle_shares(before, after) == {"idle/trainer": 0.25}, "the router was replaced"


def test_the_memory_of_a_mesh_is_that_of_all_its_processes():
    look = {"trainer": [Pulse(1, memory=Memory(10, 3)), Pulse(1, memory=Memory(20, 4))], "router": [Pulse(1)]}
    assert memory_of(look) == {
        **{"memory/trainer/resident": 30, "memory/trainer/device": 7},
        "memory/router/resident": 0,
    }


def test_what_processes_share_is_a_part_of_each_and_a_look_at_memory_takes_little_of_the_time():
    times = iter([0.0, 0.01, 9.9, 10.0, 10.01, 30.0, 30.01])  # a look takes 10 ms
    gauge = MemoryGauge(lambda: next(times))
    before = gauge().resident
    shared = mmap.mmap(-1, size := 64 << 20)
    shared.write(b"x" * size)
    assert gauge().resident == before, "9.9 s later it was not looked again"
    alone = gauge().resident
    assert alone - before > size * 3 // 4
    ours, childs = socket.socketpair()
    if (child := os.fork()) == 0:
        ours.close()
        childs.send(shared[::4096][:1])  # it has read every page
        os._exit(len(childs.recv(1)))  # the parent has looked
    childs.close()
    ours.recv(1)
    assert alone - gauge().resident > size // 4
    ours.close()
    assert os.waitpid(child, 0)[1] == 0


def test_timelines_are_read_as_far_as_they_are_whole_and_those_of_earlier_versions_are_left_out(tmp_path):
    run = make_run(tmp_path / "run", steps=3)
    (run / "spans" / "router.jsonl").write_text('{"process": "router.0", "mesh": "router"}\n{"n": "wait", "t": 1.0}\n')
    with open(run / "spans" / "trainer.jsonl", "a") as file:
        file.write('{"ph": "X", "na')
    processes = read_processes(run)
    assert {process.mesh for process in processes} == {"controller", "trainer", "generator0", "generator1", "rollout0"}
