"""What a run writes and shows."""

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.errors import StorageError
from titan_rl.metrics import writer as module
from titan_rl.metrics.writer import Backend, MetricsWriter
from titan_rl.one_line import one_line


def test_every_finished_step_is_one_line_at_once(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(1, {"train/loss": 0.5})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "train/loss": 0.5}
    writer.write(2, {"train/loss": float("nan")})
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1])["train/loss"] is None
    writer.write(3, {"train/loss": 0.5}, groups=(4, 7))
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[2])["groups"] == [4, 7]
    writer.close()


def write_steps(directory: Path, *steps: int, **resumed: Any) -> int:
    """Returns the bytes of all steps."""
    writer = MetricsWriter(directory, tensorboard=False, **resumed)
    for step in steps:
        writer.write(step, {"train/loss": 0.5})
    writer.close()
    return (directory / "metrics.jsonl").stat().st_size


def steps_in(directory: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_a_run_that_goes_on_drops_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    until_2 = write_steps(tmp_path, 1, 2)
    write_steps(tmp_path, 3, 4, keep_bytes=until_2, warn=pytest.fail)
    write_steps(tmp_path, 3, keep_bytes=until_2, warn=pytest.fail)
    assert steps_in(tmp_path) == [1, 2, 3]
    write_steps(tmp_path, 1)
    assert steps_in(tmp_path) == [1]


@pytest.mark.parametrize(("left", "kept"), [("cut", [1]), ("gone", [])])
def test_numbers_that_somebody_removed_are_missed_and_the_rest_stays_readable(
    tmp_path: Path, left: str, kept: list[int]
) -> None:
    until_2 = write_steps(tmp_path, 1, 2)
    if left == "cut":
        os.truncate(tmp_path / "metrics.jsonl", until_2 - 5)
    else:
        (tmp_path / "metrics.jsonl").unlink()
    said: list[str] = []
    write_steps(tmp_path, 3, keep_bytes=until_2, warn=said.append)
    assert steps_in(tmp_path) == [*kept, 3]
    assert len(said) == 1 and "metrics.jsonl was changed" in said[0]


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    writer = MetricsWriter(tmp_path, tensorboard=True)
    writer.write(3, {"train/loss": 0.25})
    writer.write(4, {"train/loss": float("inf"), "reward/late": -1e-3})
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    numbers = {
        tag: [(event.step, tensor_util.make_ndarray(event.tensor_proto).item()) for event in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }
    assert numbers == {"train/loss": [(3, 0.25), (4, float("inf"))], "reward/late": [(4, np.float32(-1e-3).item())]}
    assert {events.SummaryMetadata(tag).plugin_data.plugin_name for tag in numbers} == {"scalars"}
    assert events.SummaryMetadata("train/loss").summary_description.startswith("mean loss")


def test_a_line_that_is_damaged_does_not_keep_a_run_from_going_on(tmp_path: Path) -> None:
    until_2 = write_steps(tmp_path, 1, 2)
    first, second = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    (tmp_path / "metrics.jsonl").write_bytes(first + b"\n" + bytes(len(second)) + b"\n")
    said: list[str] = []
    MetricsWriter(tmp_path, tensorboard=True, keep_bytes=until_2, warn=said.append).close()
    assert said == []


@pytest.mark.parametrize("breaks", ["when it is made", "when it is written", "when it is closed"])
def test_a_failing_tensorboard_never_ends_a_run_and_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: str
) -> None:
    from tensorboard.summary.writer import event_file_writer

    class Writer:
        def __init__(self, directory: str) -> None:
            self.at("when it is made")

        def add_event(self, _: object) -> None:
            self.at("when it is written")

        def close(self) -> None:
            self.at("when it is closed")

        def at(self, moment: str) -> None:
            if moment == breaks:
                raise OSError(28, "No space left on device")

    monkeypatch.setattr(event_file_writer, "EventFileWriter", Writer)
    said: list[str] = []
    writer = MetricsWriter(tmp_path, tensorboard=True, warn=said.append)
    for step in (1, 2):
        writer.write(step, {"train/loss": 0.5})
    writer.close()
    assert len(said) == 1 and said[0].startswith("TensorBoard failed") and "No space left" in said[0]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(("hangs", "said"), [("show", "is 2 steps behind"), ("close", "did not close within 0.1 s")])
def test_a_backend_that_hangs_holds_up_nobody(hangs: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 2)
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.1)
    reached, let_go, told = threading.Event(), threading.Event(), []

    class Library:
        def show(self, *_: object) -> None:
            self.at("show")

        def close(self) -> None:
            self.at("close")

        def at(self, moment: str) -> None:
            if moment == hangs:
                reached.set()
                let_go.wait()

    backend = Backend("library", Library, told.append)
    backend.put((1, {}))
    if hangs == "show":
        reached.wait()
        for step in range(2, 10):
            backend.put((step, {}))
    backend.put(None)
    backend.wait()
    let_go.set()
    backend.join()
    assert told == [f"library {said}; it is told no more, and the run goes on"]


def test_wandb_keeps_the_numbers_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="pip install 'titan-rl[wandb]'")
    from wandb.proto.wandb_internal_pb2 import Record

    script = """
import sys
from pathlib import Path
from titan_rl.metrics import writer as module
from titan_rl.metrics.writer import MetricsWriter
module.CLOSE_SECONDS = 250  # on busy cores wandb takes longer to start than a run waits for it
writer = MetricsWriter(
    Path(sys.argv[1]), tensorboard=False, wandb_project="p", config={"seed": 7}, warn=print
)
for step in (1, 2):
    writer.write(step, {"train/loss": 1.0 / step, "train/nan": float("nan")}, groups=(1,))
writer.close()
"""
    # a host so busy that W&B would not wait for its own process
    environment = {**os.environ, "WANDB_MODE": "offline", "HOME": str(tmp_path), "WANDB_X_SERVICE_WAIT": "0.001"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "mine")],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    (path,) = tmp_path.glob("mine/wandb/offline-run-*/run-mine.wandb")  # whole when W&B's own process has ended
    data = path.read_bytes()[7:]  # LevelDB's log: checksum, length and type of each record; all are in the first block
    rows = []
    while data:
        length = int.from_bytes(data[4:6], "little")
        (record := Record()).ParseFromString(data[7 : 7 + length])
        data = data[7 + length :]
        if record.WhichOneof("record_type") == "history":
            rows.append({item.key or item.nested_key[0]: item.value_json for item in record.history.item})
    assert [(int(row["_step"]), float(row["train/loss"])) for row in rows] == [(1, 1.0), (2, 0.5)]
    assert all(row["train/nan"] == "NaN" and "groups" not in row for row in rows)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's own thread
def test_tensorboard_on_a_directory_that_was_removed_does_not_raise(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "run", tensorboard=True)
    shutil.rmtree(tmp_path / "run")
    writer.write(1, {"train/loss": 0.5})
    with pytest.raises(StorageError, match="1 lines of numbers cannot be written: .*No such file or directory"):
        writer.sync()
    writer.close()


def test_a_full_disk_is_a_sentence_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write(1, {"train/loss": 0.5})
    with pytest.raises(StorageError, match=r"metrics\.jsonl: 1 lines of numbers cannot be .*No space left on device"):
        writer.sync()
    writer.close()


@pytest.mark.skipif(
    subprocess.run(["sh", "-c", "unshare -m true"], stderr=subprocess.DEVNULL).returncode != 0,
    reason="may not mount a small disk",
)
def test_the_numbers_of_a_full_disk_are_written_when_it_has_room_again(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from titan_rl.errors import StorageError
from titan_rl.metrics.writer import MetricsWriter
run = Path(sys.argv[1])
writer = MetricsWriter(run, tensorboard=False, warn=print)
writer.write(1, {"reward": 0.5})
with open(run / "filler", "wb", buffering=0) as filler:
    while (left := os.statvfs(run).f_bavail):
        filler.write(bytes(left * 4096))
for step in range(2, 302):
    writer.write(step, {"reward": 0.5})
print(all(line.endswith(b"}") for line in (run / "metrics.jsonl").read_bytes().splitlines()))
try:
    writer.sync()
except StorageError as error:
    print(error)
(run / "filler").unlink()
writer.write(302, {"reward": 0.5})
writer.sync()
print((run / "metrics.jsonl").read_text().count("reward"))
"""
    mounted = 'mount -t tmpfs -o size=256k tmpfs "$0" && exec "$@"'
    run = subprocess.run(
        ["unshare", "-m", "sh", "-c", mounted, str(tmp_path), sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    full, whole, refused, again, lines = run.stdout.splitlines()
    assert "cannot be written: [Errno 28] No space left on device; the run goes on" in full
    assert whole == "True" and "lines of numbers cannot be written" in refused
    assert again.endswith("the numbers that were kept are written") and lines == "302"


@given(st.text(), st.integers(2, 300))
def test_one_line_is_printable_and_no_text_that_fits_is_cut(text: str, longest: int) -> None:
    line = one_line(text, longest)
    assert line.isprintable()
    if text.isprintable():
        assert len(line) <= longest + 1
    assert line == text or len(text) > longest or not text.isprintable()


def test_a_process_sends_everything_it_prints_to_its_own_file(tmp_path: Path) -> None:
    program = f"""
import os
from pathlib import Path
from titan_rl.supervision.process import redirect_output
redirect_output(Path({str(tmp_path / "a" / "trainer.log")!r}))
print("from python", flush=True)
os.system("echo from a child")
import logging
logging.getLogger("x").info("from logging")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "" and done.stderr == ""
    content = (tmp_path / "a" / "trainer.log").read_text()
    assert all(text in content for text in ("from python", "from a child", "from logging"))
    assert logging.getLogger("x").level == logging.NOTSET
