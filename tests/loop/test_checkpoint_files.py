"""A checkpoint is whole and as it was written, or named with what is wrong; the one before it stays."""

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.errors import CheckpointError, StorageError
from titan_rl.loop.checkpoint_files import CHECKPOINTS, FORMAT, MANIFEST, check, checkpoints, commit, new_draft, prune
from titan_rl.run.runs import Resume

FILES = {
    "ledger.msgpack": b"{}",
    "trainer/__0_0.distcp": bytes(range(256)) * 9,
    "trainer/.metadata": b"m",
    "empty": b"",
}


def write(run: Path, step: int) -> Path:
    draft = new_draft(run, step)
    for name, content in FILES.items():
        (draft / name).parent.mkdir(exist_ok=True)
        (draft / name).write_bytes(content + (str(step).encode() if content else b""))
    return commit(draft)


def test_a_checkpoint_is_found_and_sound(tmp_path: Path) -> None:
    for step in (2, 10, 9):
        write(tmp_path, step)
    newest = Resume(tmp_path).checkpoint(pytest.fail)
    assert newest is not None
    assert newest.step == 10
    assert (newest.directory / "ledger.msgpack").read_bytes() == b"{}10"
    prune(tmp_path, keep=2, newest=10)
    assert [each.name for each in checkpoints(tmp_path)] == ["step-00000009", "step-00000010"]


def test_a_trainer_that_is_cut_off_writes_into_no_later_attempt(tmp_path: Path) -> None:
    given_up = new_draft(tmp_path, 4)
    draft = new_draft(tmp_path, 4)
    assert checkpoints(tmp_path) == [], "a draft is no checkpoint"
    (given_up / "trainer").mkdir(parents=True)  # it has not heard of its loss, and makes its directory again
    (draft / "ledger.msgpack").write_bytes(b"{}")
    assert {each.name for each in commit(draft).iterdir()} == {"ledger.msgpack", MANIFEST}
    prune(tmp_path, keep=2, newest=4)
    assert [each.name for each in (tmp_path / CHECKPOINTS).iterdir()] == ["step-00000004"]


def test_a_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    first = write(tmp_path, 4)
    (draft := new_draft(tmp_path, 4)).joinpath("other").write_bytes(b"1")
    with pytest.raises(StorageError, match="could not be written"):
        commit(draft)
    assert check(first).step == 4


DAMAGES = {
    "truncated": (lambda file: os.truncate(file, 5), r"trainer/__0_0\.distcp has 5 bytes, 2306 were written"),
    "one byte": (
        lambda file: file.write_bytes(b"x" + file.read_bytes()[1:]),
        r"__0_0\.distcp is not as it was written",
    ),
    "missing": (lambda file: file.unlink(), r"trainer/__0_0\.distcp is missing"),
    "foreign": (lambda file: (file.parent / "z").write_bytes(b""), r"trainer/z is not in its manifest"),
    "no manifest": (lambda file: (file.parents[1] / MANIFEST).unlink(), r"has no manifest\.json"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_one_before_a_damaged_checkpoint_is_taken(tmp_path: Path, damage: str) -> None:
    for step in (12, 13):
        write(tmp_path, step)
    do, what = DAMAGES[damage]
    do(tmp_path / CHECKPOINTS / "step-00000013/trainer/__0_0.distcp")
    with pytest.raises(CheckpointError, match=what):
        check(tmp_path / CHECKPOINTS / "step-00000013")
    told: list[str] = []
    newest = Resume(tmp_path).checkpoint(told.append)
    assert newest is not None and newest.step == 12
    assert len(told) == 1 and "step-00000013" in told[0]


def test_another_format_is_refused_by_name(tmp_path: Path) -> None:
    manifest = write(tmp_path, 3) / MANIFEST
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 0}))
    with pytest.raises(CheckpointError, match=f"step-00000003 has format 0; .* reads format {FORMAT}"):
        check(manifest.parent)


@settings(max_examples=40)
@given(st.data())
def test_any_changed_byte_is_noticed(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        directory = write(Path(temporary), 7)
        file = data.draw(st.sampled_from([each for each in sorted(directory.rglob("*")) if each.is_file()]))
        before = file.read_bytes()
        if not before:
            return
        place = data.draw(st.integers(0, len(before) - 1))
        changed = bytearray(before)
        changed[place] ^= data.draw(st.integers(1, 255))
        file.write_bytes(changed)
        with suppress(ValueError):
            if file.name == MANIFEST and json.loads(changed) == json.loads(before):
                return  # white space
        with pytest.raises(CheckpointError):
            check(directory)


def test_a_disk_that_is_full_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1)
    draft = new_draft(tmp_path, 2)
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(StorageError, match="step-00000002: the checkpoint could not be written: .*No space left"):
        commit(draft)
    assert [each.name for each in (tmp_path / CHECKPOINTS).iterdir()] == ["step-00000001"]
