"""What one process records: a main lane without a gap, spans beside it, and a file that survives everything."""

import asyncio
import json
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.observability.activity import Activities
from titan_rl.observability.spans import read_spans
from titan_rl.observability.timeline import GRAIN_SECONDS, SPANS, Lived, MainLane, Timeline, timeline
from titan_rl.observability.waits import WatchedEventLoops

TURNS = st.lists(
    st.tuples(
        st.floats(0, 0.02),
        st.sampled_from([("decode", ""), ("wait", "rollouts"), ("wait", "weights"), ("settle", "")]),
        st.booleans(),
    ),
    max_size=60,
)


@given(TURNS)
def test_the_main_lane_has_no_gap_and_sums_are_exact_however_short_its_pieces_are(turns):
    lane, now, doing = MainLane(0.0, "start"), 0.0, ("start", "")
    expected: dict[tuple[str, str], float] = {}
    pieces = []
    for seconds, what, written in turns:
        now += seconds
        expected[doing] = expected.get(doing, 0.0) + seconds
        lane.turn(now, *what)
        doing = what
        if written:
            pieces += lane.cut(now)
    pieces += lane.cut(now)
    end = 0.0
    for piece in pieces:
        assert piece.began == pytest.approx(end) and piece.seconds > 0
        end = piece.began + piece.seconds
    assert end == pytest.approx(now)
    for key, seconds in expected.items():
        assert sum(each.seconds for each in pieces if (each.name, each.waits_for) == key) == pytest.approx(seconds)
    waited = sum(seconds for (_, waits_for), seconds in expected.items() if waits_for)
    assert lane.lived(now) == (pytest.approx(now), pytest.approx(waited))


def test_pieces_shorter_than_a_grain_are_added_up_by_name():
    lane = MainLane(0.0, "start")
    for tick in range(1, 1001):
        lane.turn(tick * GRAIN_SECONDS / 10, *(("decode", ""), ("wait", "rollouts"))[tick % 2])
    assert len(lane.cut(1000 * GRAIN_SECONDS / 10)) <= 3 * 100


def test_a_file_grows_with_the_logarithm_of_the_age_of_its_process():
    lane, ticks = MainLane(0.0, "start"), 20_000
    for tick in range(1, ticks):
        lane.turn(tick * 10.0, *(("decode", ""), ("wait", "rollouts"))[tick % 2])
    assert len(lane.cut(ticks * 10.0)) <= ticks
    old = MainLane(0.0, "start")
    old.turn(100_000.0, "decode", "")
    for tick in range(1000):
        old.turn(100_000.0 + tick * 0.01, *(("decode", ""), ("wait", "rollouts"))[tick % 2])
    assert len(old.cut(100_010.0)) < 50


def test_a_process_writes_its_life_and_its_spans(tmp_path):
    mine = Timeline()
    mine.doing("nobody asked")
    assert not mine.is_on and mine.lived() == Lived()
    mine.begin(tmp_path / SPANS, "generator3", rank=1, host="host2")
    activity = Activities(mine)
    mine.doing("decode")
    with activity("rollout", group=7), activity("trainer", waits_for=lambda: "2 groups"):
        mine.doing("wait", "rollouts")
    assert mine.lived().seconds > mine.lived().waited > 0
    mine.end()
    mine.doing("nothing any more")
    (life,) = read_spans(tmp_path)
    assert (life.process, life.mesh, life.rank, life.host, life.pid) == (
        *("generator3.1", "generator3", 1, "host2"),
        os.getpid(),
    )
    assert life.main[0].name == "start" and {span.name for span in life.main} >= {"start", "decode", "wait"}
    assert life.named_share >= 0.99
    spans = {span.lane: span for span in life.others}
    assert spans["rollout"].ids == {"group": 7} and not spans["rollout"].waits_for
    assert spans["trainer"].waits_for == "2 groups"


def test_any_name_can_be_read_again(tmp_path):
    mine, name = Timeline(), 'a "quoted" \\ name\n'
    mine.begin(tmp_path / SPANS, "router")
    mine.doing(name, name)
    with Activities(mine)(name, **{name: name}):
        pass
    mine.end()
    (life,) = read_spans(tmp_path)
    assert (name, name) in {(span.name, span.waits_for) for span in life.main}
    assert [(span.lane, span.ids) for span in life.others] == [(name, {name: name})]


def test_a_process_in_the_place_of_a_killed_one_appends_to_its_file(tmp_path):
    for _ in range(2):
        mine = Timeline()
        mine.begin(tmp_path / SPANS, "router")
        mine.end()
        with open(tmp_path / SPANS / "router.0.jsonl", "a") as file:
            file.write('{"n": "torn')
    assert [life.process for life in read_spans(tmp_path)] == ["router.0", "router.0"]


def test_a_full_disk_loses_spans_and_says_so_once(tmp_path, caplog):
    (tmp_path / "router.0.jsonl").symlink_to("/dev/full")
    mine = Timeline()
    mine.begin(tmp_path, "router")
    mine.doing("events")
    mine.write()
    mine.end()
    assert len([record for record in caplog.records if "cannot be written" in record.message]) == 1


def test_a_directory_that_cannot_be_made_leaves_the_process_without_a_timeline(tmp_path):
    (tmp_path / "spans").write_text("")
    mine = Timeline()
    mine.begin(tmp_path / "spans", "router")
    assert not mine.is_on
    mine.end()


def test_an_event_loop_works_or_waits_for_whom_its_actor_says(tmp_path: Path):
    ready = threading.Event()

    async def serve() -> None:
        timeline.begin(tmp_path / SPANS, "router")
        timeline.follow(lambda: "generators")
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        threading.Thread(target=lambda: (ready.wait(), loop.call_soon_threadsafe(done.set))).start()
        loop.call_later(0.02, ready.set)
        await done.wait()
        timeline.end()

    loop = WatchedEventLoops().new_event_loop()
    loop.run_until_complete(serve())
    loop.close()
    (life,) = read_spans(tmp_path)
    assert {(span.name, span.waits_for) for span in life.main[1:]} == {("events", ""), ("wait", "generators")}
    assert sum(span.seconds for span in life.main if span.waits_for) >= 0.015


def test_every_line_is_json(tmp_path):
    mine = Timeline()
    mine.begin(tmp_path, "trainer")
    with Activities(mine)("publish", version=object(), of='a "quoted" one'):
        mine.doing("wait", "rollouts")
    mine.end()
    lines = [json.loads(line) for line in (tmp_path / "trainer.0.jsonl").read_text().splitlines()]
    assert lines[0].keys() == {"process", "mesh", "rank", "host", "pid", "epoch"}
    assert all({"n", "t", "d", "l"} <= line.keys() for line in lines[1:])
