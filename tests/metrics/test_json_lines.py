"""Files of lines: appended to whole or not at all, cut where a line ends, read from their end."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.metrics.json_lines import TAIL, JsonLines, encode_lines, json_lines


@given(st.text("x\n", max_size=60), st.integers(0, 70))
def test_a_cut_keeps_the_whole_lines_of_the_bytes_that_are_kept(text: str, keep: int):
    with TemporaryDirectory() as directory:
        file = Path(directory) / "lines"
        file.write_text(text)
        expected = text[:keep].rpartition("\n")
        assert JsonLines(file).cut(keep) == len(expected[0] + expected[1])
        assert file.read_text() == expected[0] + expected[1]


def test_a_file_is_made_once_and_its_removal_is_noticed(tmp_path: Path):
    file = JsonLines(tmp_path / "lines")
    assert file.nbytes == file.cut() == 0
    file.append(encode_lines([{"step": 1}, {"step": 2}]))
    file.append(b"")
    assert [record["step"] for _, record in json_lines(tmp_path / "lines")] == [1, 2]
    (tmp_path / "lines").unlink()
    with pytest.raises(FileNotFoundError):
        file.append(b"{}\n")
    with pytest.raises(ValueError):
        encode_lines([{"loss": float("nan")}])


def test_only_the_end_of_a_long_file_of_lines_is_read(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    lines = [json.dumps({"step": step, "said": "4" * 1000}) for step in range(2 * TAIL // 1000)]
    file.write_text("\n".join(lines) + "\n")
    steps = [record["step"] for _, record in json_lines(file, start=-TAIL)]
    assert len(lines) // 4 < len(steps) < len(lines) and steps == [*range(len(lines) - len(steps), len(lines))]
    assert [*json_lines(tmp_path / "none", start=-TAIL)] == []
