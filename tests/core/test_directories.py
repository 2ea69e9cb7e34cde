"""No command deletes what somebody else wrote (0.1 s)."""

from pathlib import Path

import pytest

from titan_rl.directories import replacing
from titan_rl.errors import ConfigError


def write(directory: Path, text: str = "1") -> None:
    with replacing(directory) as draft:
        (draft / "weights").write_text(text)


def test_a_new_directory_an_empty_one_and_an_earlier_one_of_ours_are_written(tmp_path: Path) -> None:
    for text in ("1", "2"):
        write(tmp_path / "new" / "one", text)
        assert (tmp_path / "new" / "one" / "weights").read_text() == text
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["empty", "new"], "no draft is left"


@pytest.mark.parametrize("place", [".", "..", "ours", "ours/weights", "others", "../home"])
def test_what_somebody_else_wrote_is_never_replaced(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    write(home / "ours")
    for thesis in (home / "ours" / "thesis", home / "others" / "weights"):
        thesis.parent.mkdir(exist_ok=True)
        thesis.write_text("mine")
    monkeypatch.chdir(home)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError):
        write(Path(place))
    assert sorted(tmp_path.rglob("*")) == before


def test_an_empty_working_directory_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="working directory"):
        write(Path("."))


def test_what_was_written_meanwhile_stays(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="thesis"), replacing(tmp_path / "one"):
        (tmp_path / "one").mkdir()
        (tmp_path / "one" / "thesis").write_text("mine")
    assert (tmp_path / "one" / "thesis").read_text() == "mine" and len([*tmp_path.iterdir()]) == 1
