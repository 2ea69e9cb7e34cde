"""What one process records: a main lane without a gap, spans beside it, and a file that survives everything."""

import asyncio
import json
import os
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.metrics.activity import Activities
from titan_rl.metrics.timeline import GRAIN_SECONDS, SPANS, MainLane, Span, Timeline, Uptime, timeline
from titan_rl.metrics.waits import WatchedEventLoops
from titan_rl.view.timelines import read_processes


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


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
    assert lane.uptime(now) == (pytest.approx(now), pytest.approx(waited))


@pytest.mark.parametrize(("age", "most"), [(0.0, 3 * 100), (100_000.0, 3)])
def test_pieces_shorter_than_a_grain_are_added_up_by_name_and_a_grain_grows_with_the_age(age: float, most: int):
    lane, short = MainLane(0.0, "start"), GRAIN_SECONDS / 10
    lane.turn(age, "decode", "")
    lane.cut(age)
    for tick in range(1, 1001):
        lane.turn(age + tick * short, *(("decode", ""), ("wait", "rollouts"))[tick % 2])
    assert len(lane.cut(age + 1000 * short)) <= most


def test_a_process_writes_its_life_and_its_spans(tmp_path):
    mine = Timeline()
    mine.doing("nobody asked")
    assert not mine.is_on and mine.uptime() == Uptime()
    mine.begin(tmp_path / SPANS, "generator3", rank=1, host="host2")
    activity = Activities(mine)
    mine.doing("decode")
    with activity("rollout", group=7), activity("trainer", waits_for=lambda: "2 groups"):
        mine.doing("wait", "rollouts")
    assert mine.uptime().seconds > mine.uptime().waited > 0
    mine.end()
    mine.doing("nothing any more")
    (process,) = read_processes(tmp_path)
    assert (process.mesh, process.rank) == ("generator3", 1)
    name = json.loads((tmp_path / SPANS / "generator3.1.jsonl").read_text().splitlines()[0])["args"]["name"]
    assert name == f"generator3.1 (host2, pid {os.getpid()})"
    assert process.main[0].name == "start" and {span.name for span in process.main} >= {"start", "decode", "wait"}
    assert sum(span.seconds for span in process.main) >= 0.99 * (process.ended - process.began)
    spans = {span.name: span for span in process.others}
    assert spans["rollout"].ids == {"group": 7} and not spans["rollout"].waits_for
    assert spans["trainer"].waits_for == "2 groups"


def test_any_name_can_be_read_again(tmp_path):
    mine, name = Timeline(), 'a "quoted" \\ name\n'
    mine.begin(tmp_path / SPANS, "router")
    mine.doing(name, name)
    with Activities(mine)(name, **{name: name}, version=object):
        pass
    mine.end()
    (process,) = read_processes(tmp_path)
    assert (name, name) in {(span.name, span.waits_for) for span in process.main}
    (span,) = process.others
    assert (span.name, span.ids) == (name, {name: name, "version": str(object)})


SPANS_OF_ONE_LANE = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=40)


@given(SPANS_OF_ONE_LANE)
def test_spans_that_overlap_are_in_threads_of_their_own_and_no_thread_is_made_in_vain(made):
    clock = Clock()
    mine = Timeline(clock)
    with TemporaryDirectory() as directory:
        mine.begin(Path(directory), "rollout0")
        moments = sorted(
            [(began, 1, number) for number, (began, _) in enumerate(made)]
            + [(began + seconds, 2 if not seconds else 0, number) for number, (began, seconds) in enumerate(made)]
        )
        spans: dict[int, Span] = {}
        at_once = most = 0
        for moment, kind, number in moments:
            clock.now = moment / 1000
            if kind == 1:
                spans[number] = Span("rollout", {}, clock.now)
                mine.on_span(spans[number], True)
                most = max(most, at_once := at_once + 1)
            else:
                mine.on_span(spans[number], False)
                at_once -= 1
        mine.end()
        lines = [json.loads(line) for line in (Path(directory) / "rollout0.0.jsonl").read_text().splitlines()]
    found = [event for event in lines if event["name"] == "rollout"]
    assert len(found) == len(made) and len({event["tid"] for event in found}) == most
    for one in found:
        for other in found:
            if one is not other and one["tid"] == other["tid"]:
                assert one["ts"] + one["dur"] <= other["ts"] or other["ts"] + other["dur"] <= one["ts"]


def test_a_process_in_the_place_of_a_killed_one_appends_to_its_file(tmp_path):
    for _ in range(2):
        mine = Timeline()
        mine.begin(tmp_path / SPANS, "router")
        mine.end()
        with open(tmp_path / SPANS / "router.0.jsonl", "a") as file:
            file.write('{"ph": "torn')
    assert [process.mesh for process in read_processes(tmp_path)] == ["router", "router"]


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
    (process,) = read_processes(tmp_path)
    assert {(span.name, span.waits_for) for span in process.main[1:]} == {("events", ""), ("wait", "generators")}
    assert sum(span.seconds for span in process.main if span.waits_for) >= 0.015
