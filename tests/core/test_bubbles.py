"""Merged timelines: who waited for whom, the idle shares, and the trace. On timelines that the tests make up."""

import gzip
import json
from collections import Counter
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.controller.looks import idle_shares, memory_of
from titan_rl.observability.bubbles import Account, accounts, find_bubbles
from titan_rl.observability.memory import Memory, memory
from titan_rl.observability.spans import Life, Recorded, read_spans
from titan_rl.observability.timeline import MAIN, Lived, Pulse
from titan_rl.observability.trace import events, rows, write_trace

LABELS = ["", "", "rollouts", "slots", "generators", "rank 0", "environment"]


def life(mesh: str, *pieces: tuple[float, str], rank: int = 0, others: tuple[Recorded, ...] = ()) -> Life:
    """A process that begins at 0 and does these things one after the other: seconds, and for whom it waits."""
    found = Life(f"{mesh}.{rank}", mesh, rank, "host0", 1, 0.0)
    at = 0.0
    for seconds, waits_for in pieces:
        found.main.append(Recorded("wait" if waits_for else "work", MAIN, at, seconds, waits_for))
        at += seconds
    found.others += others
    return found


def step(began: float, seconds: float) -> Recorded:
    return Recorded("train", "train", began, seconds)


PIECES = st.lists(st.tuples(st.floats(0.01, 3), st.sampled_from(LABELS)), max_size=12)


@given(
    st.lists(
        st.tuples(st.sampled_from(["trainer", "generator0", "rollout0", "router"]), PIECES), min_size=1, max_size=6
    )
)
def test_the_shares_of_every_mesh_add_up_to_the_whole_window(made):
    ranks: Counter[str] = Counter()
    lives = []
    for mesh, pieces in made:
        lives.append(life(mesh, *pieces, rank=ranks[mesh]))
        ranks[mesh] += 1
    for each in accounts(lives, (1.0, 9.0)):
        assert each.ranks == ranks[each.mesh]
        assert each.busy + each.idle == pytest.approx(1.0)
        direct = [
            max(0.0, min(span.ended, 9.0) - max(span.began, 1.0))
            for one in lives
            if one.mesh == each.mesh
            for span in one.main
            if not span.waits_for
        ]
        assert each.busy == pytest.approx(sum(direct) / 8.0 / each.ranks, abs=1e-4), "who works is never idle"


def test_a_generator_without_requests_waits_for_what_the_rollout_workers_wait_for():
    lives = [
        life("generator0", (10, "rollouts")),
        life("generator0", (10, "rank 0"), rank=1),
        life("rollout0", (4, ""), (3, "slots"), (3, "environment")),
        life("rollout1", (5, "slots"), (5, "slots")),
    ]
    generator, *_ = accounts(lives, (0.0, 10.0))
    assert generator == Account(
        "generator0", 2, 0.0, pytest.approx({"rollouts": 0.4, "slots": 0.3, "environment": 0.3})
    )


def test_the_time_without_a_process_is_none_of_work():
    trainer, _ = accounts([life("trainer", (4, "")), life("router", (10, ""))], (0.0, 10.0))
    assert trainer.waits == pytest.approx({"its restart": 0.6})


def test_the_time_between_a_run_and_its_resumption_is_not_counted():
    before = [life("trainer", (10, "")), life("controller", (10, ""), others=(step(2, 8),))]
    later = [life("trainer", (105, "rollouts")), life("controller", (105, ""), others=(step(100, 4),))]
    for each in later:
        each.main[0] = each.main[0]._replace(began=95.0, seconds=10.0)
    found = find_bubbles(before + later)
    (trainer,) = (each for each in found if each.mesh == "trainer")
    assert trainer.waits == pytest.approx({"rollouts": 4 / 12})
    assert find_bubbles(before[:1]) == [], "there is no step"


def test_idle_shares_are_those_of_the_time_between_two_looks():
    def look(**ranks):
        return {mesh: [Pulse(1, Lived(*each)) for each in lived] for mesh, lived in ranks.items()}

    before = look(trainer=[(10, 1), (10, 2)], router=[(50, 5)], rollout0=[()])
    after = look(trainer=[(20, 6), (20, 2)], router=[(1, 1)], new=[(1, 1)], rollout0=[()])
    assert idle_shares(before, after) == {"idle/trainer": 0.25}, "the router was replaced"


def test_the_memory_of_a_mesh_is_that_of_all_its_processes():
    look = {"trainer": [Pulse(1, memory=Memory(10, 3)), Pulse(1, memory=Memory(20, 4))], "router": [Pulse(1)]}
    assert memory_of(look) == {
        **{"memory/trainer/resident": 30, "memory/trainer/device": 7},
        "memory/router/resident": 0,
    }
    held = memory()
    kept = bytearray(b"x") * (64 << 20)
    assert memory().resident - held.resident > len(kept) // 2 and held.device == 0


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 5)), max_size=40))
def test_no_two_spans_of_a_row_overlap(made):
    spans = [Recorded("rollout", "rollout", began, seconds) for began, seconds in made]
    found = rows(spans)
    assert sorted(span for row in found for span in row) == sorted(spans)
    for row in found:
        for one, after in zip(row, row[1:], strict=False):
            assert one.ended <= after.began + 1e-5
    at_once = max((sum(s.began <= t < s.ended - 1e-5 for s in spans) for t, _ in made), default=0)
    assert len(found) >= at_once


def test_a_trace_names_processes_lanes_and_for_whom_they_wait():
    one = life("generator0", (1, ""), (2, "rollouts"), others=(Recorded("drain", "drain", 0.5, 1, "", {"to": 3}),))
    found = list(events([one]))
    assert [event["args"]["name"] for event in found if event["name"] == "process_name"] == [
        "generator0.0 (host0, pid 1)"
    ]
    assert [event["args"]["name"] for event in found if event["name"] == "thread_name"] == [MAIN, "drain"]
    spans = [event for event in found if event["ph"] == "X"]
    assert [(event["cat"], event["ts"], event.get("args")) for event in spans] == [
        ("work", 0, None),
        ("wait", 1e6, {"waits for": "rollouts"}),
        ("work", 0.5e6, {"to": 3}),
    ]


def write_run(run, epoch=100.0):
    (run / "spans").mkdir()
    header = {"rank": 0, "host": "host0", "pid": 1, "epoch": epoch}
    waits = {"n": "wait", "t": 1.0, "d": 3.0, "l": MAIN, "w": "rollouts"}
    for mesh, lines in {
        "trainer": [waits],
        "controller": [
            {**waits, "w": "the meshes"},
            {"n": "train", "t": 2.0, "d": 1.0, "l": "train", "a": {"step": 1}},
        ],
    }.items():
        whole = [{"process": f"{mesh}.0", "mesh": mesh, **header}, *lines]
        text = "".join(json.dumps(line) + "\n" for line in whole)
        (run / "spans" / f"{mesh}.0.jsonl").write_text(text + '{"n": "torn')


def test_a_process_that_was_killed_before_its_first_write_is_not_in_the_trace(tmp_path):
    write_run(tmp_path)
    killed = {"process": "router.0", "mesh": "router", "rank": 0, "host": "host0", "pid": 2, "epoch": 100.0}
    (tmp_path / "spans" / "router.0.jsonl").write_text(json.dumps(killed) + "\n")
    write_trace(tmp_path)
    assert max(event.get("ts", 0.0) for event in read_trace(tmp_path)) == 1e6


def read_trace(run):
    return json.loads(gzip.decompress((run / "trace.json.gz").read_bytes()))["traceEvents"]


def test_hosts_are_aligned_by_their_time_of_day_and_processes_of_one_host_by_its_clock(tmp_path):
    write_run(tmp_path)
    file = tmp_path / "spans" / "trainer.0.jsonl"
    file.write_text(file.read_text().replace('"epoch": 100.0', '"epoch": 100.001'))
    assert {each.main[0].began for each in read_spans(tmp_path)} == {101.0}
    file.write_text(file.read_text().replace('"host": "host0"', '"host": "host1"').replace("100.001", "200.5"))
    assert {each.main[0].began for each in read_spans(tmp_path)} == {101.0, 201.5}


def test_a_trace_that_cannot_be_written_stops_nothing(tmp_path):
    write_run(tmp_path)
    (tmp_path / ".trace.json.gz").mkdir()
    assert write_trace(tmp_path) is None
    (tmp_path / ".trace.json.gz").rmdir()
    with patch("titan_rl.observability.trace.read_spans", side_effect=OSError("full")):
        assert write_trace(tmp_path) is None
    assert [*tmp_path.iterdir()] == [tmp_path / "spans"]
