"""Rows as tasks: from lists, files and the config (0.3 s)."""

import json

import pytest

from titan_rl.environments.base import DatasetEnvironment, Environment, Message, Transcript, exact_match
from titan_rl.environments.dataset import is_held_out
from titan_rl.errors import ConfigError
from titan_rl.types import FinishReason

ROWS = [{"question": f"{number}+1=", "result": number + 1} for number in range(200)]


def right(example, transcript):
    return {"right": transcript.answer == str(example.answer), "length": len(transcript.answer)}


COLUMNS = {"prompt": "question", "answer": "result"}


def prompts(task) -> list[str]:
    return [task.example(index).prompt[-1].content for index in range(task.size)]


def test_a_tenth_of_the_rows_is_held_out_by_its_prompt_whatever_the_seed_and_the_order():
    Task = Environment.from_examples(ROWS, right, **COLUMNS)
    first, other = Task(seed=1), Environment.from_examples(reversed(ROWS), right, **COLUMNS)(seed=2)
    held_out = {example.prompt for example in first.held_out(200)}
    assert held_out == {example.prompt for example in other.held_out(200)}
    assert {prompt.content for (prompt,) in held_out} == {r["question"] for r in ROWS if is_held_out(r["question"])}
    assert sorted(prompts(first)) == sorted(prompts(other)) and prompts(first) != prompts(other)
    assert prompts(first) == prompts(Task(seed=1)) and len(held_out) + first.size == 200
    assert len(first.held_out(5)) == 5


def test_the_reward_finds_the_answer_and_names_its_scores():
    task = Environment.from_examples(ROWS, right, **COLUMNS, system="Add.")()
    example = task.example(0)
    assert example.prompt[0] == Message("system", "Add.")
    said = Transcript((*example.prompt, Message("assistant", str(example.answer))), (FinishReason.STOP,))
    assert task.rubric().score(example, said) == (1.0, {"right": 1.0, "length": len(str(example.answer))})


def test_without_an_answer_column_the_reward_finds_the_whole_row():
    assert Environment.from_examples(ROWS[:5], right, prompt="question", answer="")().example(0).answer in ROWS


def test_prompts_may_be_lists_of_messages():
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    task = Environment.from_examples([{"prompt": messages, "answer": 3}], right)()
    assert task.size == 1 and task.example(7).prompt == (Message("user", "1"), Message("assistant", "2"))


@pytest.mark.parametrize("repeated", ["0+1=", "14+1="])  # trained, and held out
def test_rows_of_one_prompt_stay_examples_of_their_own_on_one_side(repeated):
    assert is_held_out(repeated) == (repeated == "14+1=")
    rows = [*ROWS[2:12], *({"question": repeated, "result": number} for number in range(50))]
    task = Environment.from_examples(rows, right, **COLUMNS)()
    trained, held_out = [task.example(index) for index in range(task.size)], task.held_out(100)
    assert sorted(each.answer for each in trained + held_out) == sorted(row["result"] for row in rows)
    assert not {each.prompt for each in trained} & {each.prompt for each in held_out}
    said = "49 of 60 rows repeat the prompt of an earlier row, which is right only if a prompt has several answers"
    assert task.warning == f"the task's rows: {said}"


def test_rows_that_are_all_held_out_are_refused():
    with pytest.raises(ConfigError, match="all rows are held out; 2 of 3 rows repeat"):
        Environment.from_examples([{"prompt": "14+1=", "answer": 15}] * 3, right)()


def test_files_and_data_sets_hold_the_same(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n\n".join(map(json.dumps, ROWS)))
    (tmp_path / "reward.py").write_text("def right(example, transcript):\n    return 1.0\n")
    wanted = prompts(Environment.from_examples(ROWS, right, **COLUMNS)())
    reward = f"{tmp_path / 'reward.py'}:right"
    assert prompts(DatasetEnvironment(str(tmp_path / "rows.jsonl"), reward, **COLUMNS)) == wanted
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    assert prompts(DatasetEnvironment(tmp_path / "rows.parquet", right, **COLUMNS)) == wanted


def test_a_data_set_of_the_library_is_rows():
    datasets = pytest.importorskip("datasets")
    task = Environment.from_examples(datasets.Dataset.from_list(ROWS), right, **COLUMNS)()
    assert prompts(task) == prompts(Environment.from_examples(ROWS, right, **COLUMNS)())


def test_rows_to_test_on_are_never_trained_on():
    task = Environment.from_examples(ROWS, right, **COLUMNS, test_path=ROWS[:20])()
    assert len(task.held_out(100)) == 20 and task.size == 180
    assert task.warning == "the task's rows: prompts of test_path are in 20 of 200 rows: not trained"
    assert not Environment.from_examples(ROWS, right, **COLUMNS)().warning


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "rows.jsonl:1: expected an object with prompt and answer"),
        ('{"question": "1"}', "with prompt and answer .prompt= and answer= name them.: {'question': '1'}"),
        ('{"prompt": 1, "answer": 1}', "the prompt is 1; it must be a text"),
        ('{"prompt": [{"content": "1"}], "answer": 1}', "has no 'role'"),
        ("\n{", "rows.jsonl:2: not a line of JSON"),
        ("\n", "environment.kwargs.path: .*rows.jsonl has no rows"),
    ],
)
def test_a_row_that_is_none_is_refused_with_its_place(text, words, tmp_path):
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=words):
        DatasetEnvironment(str(tmp_path / "rows.jsonl"), right)


def test_what_is_no_text_is_neither_right_nor_rejected():
    rows = [{"prompt": f"{number}=", "answer": ["a"], "worse": None} for number in range(20)]
    task = DatasetEnvironment(rows, rejected="worse")
    silence = Transcript((Message("assistant", ""),), (FinishReason.STOP,))
    assert task.example(0).rejected == "" and exact_match(task.example(0), silence) == 0.0
