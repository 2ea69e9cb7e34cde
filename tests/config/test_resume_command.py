"""Which run `--resume` means, and which settings may be others than before."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from titan_rl import train
from titan_rl.config import RunConfig
from titan_rl.config_registry import copy4
from titan_rl.directories import CONFIG, ENDING, SUMMARY, lock_run
from titan_rl.errors import CheckpointError, ConfigError
from titan_rl.loop.checkpoint_files import CHECKPOINTS, checkpoints, commit, new_draft
from titan_rl.overrides import to_toml
from titan_rl.run.runs import CLOSE, MAY_CHANGE, begun, check_differences, differences, find, how_to_go_on, unfinished


def config(*arguments: str) -> RunConfig:
    return train.resolve(train.VERB.read(["--recipe", "copy4", *arguments]))


def make_run(directory: Path, *arguments: str, steps: tuple[int, ...] = (), done: bool = False, at: int = 0) -> Path:
    """A run directory, with checkpoints of these steps."""
    directory.mkdir(parents=True)
    (directory / CONFIG).write_text(to_toml(config(*arguments)))
    os.utime(directory / CONFIG, (at, at))
    for step in steps:
        draft = new_draft(directory, step)
        (draft / "ledger.msgpack").write_bytes(b"ledger")
        commit(draft)
    if done:
        (directory / SUMMARY).write_text("{}")
    return directory


def damage(checkpoint: Path) -> None:
    (checkpoint / "ledger.msgpack").write_bytes(b"redgel")


# --- which run -------------------------------------------------------------------------------------------------------


def test_a_run_directory_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=(2, 4))
    resume = find(run)
    checkpoint = resume.checkpoint(pytest.fail)
    assert (resume.run, checkpoint and checkpoint.step) == (run, 4)
    assert len(checkpoints(run)) == 2


def test_an_empty_table_of_a_group_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "it.toml"
    file.write_text('recipe = "copy4"\n[policy]\n[policy.tiny]\n')
    assert train.resolve(train.VERB.read(["--config", str(file)])).policy == copy4().policy


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=(2, 4))
    damage(checkpoints(run)[1])
    said: list[str] = []
    checkpoint = find(run).checkpoint(said.append)
    assert checkpoint is not None and checkpoint.step == 2
    (sentence,) = said
    assert "step-00000004 is damaged: ledger.msgpack" in sentence and "passed over" in sentence
    assert len(checkpoints(run)) == 2, "nothing is removed before the run has gone on"
    begun(run, checkpoint)
    assert [each.name for each in checkpoints(run)] == ["step-00000002"]


def unreadable(directory: Path) -> None:
    if directory.name.endswith("4"):
        raise CheckpointError(f"{directory} was written by another version")


def test_a_checkpoint_that_this_version_cannot_read_is_named_and_the_one_before_is_taken(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=(2, 4))
    said: list[str] = []
    checkpoint = find(run).checkpoint(said.append, unreadable)
    assert checkpoint is not None and checkpoint.step == 2
    assert "step-00000004 was written by another version; it is passed over" in said[0]
    with pytest.raises(ConfigError, match="--resume: .*step-00000004 was written by another version"):
        find(checkpoints(run)[1]).checkpoint(said.append, unreadable)


def test_auto_passes_over_a_run_of_which_no_checkpoint_can_be_read(tmp_path: Path, capsys: Any) -> None:
    runs = ("--logging.directory", str(tmp_path))
    make_run(tmp_path / "newer", *runs, steps=(2,), at=2)  # its ledger is no pickle
    make_run(tmp_path / "older", *runs, at=1)
    command = train.VERB.read(["--recipe", "copy4", *runs, "--resume", "auto"])
    resume = train._what_to_run(command, "titan-rl train")[1]
    assert resume is not None and resume.run == tmp_path / "older"
    assert "newer is passed over: " in capsys.readouterr().err


def test_a_run_of_which_no_checkpoint_can_be_read_does_not_start_over(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=(2, 4))
    for checkpoint in checkpoints(run):
        damage(checkpoint)
    said: list[str] = []
    with pytest.raises(ConfigError, match="none of its checkpoints can be read"):
        find(run).checkpoint(said.append)
    assert len(said) == len(checkpoints(run)) == 2


def test_a_run_without_a_checkpoint_starts_over(tmp_path: Path) -> None:
    assert find(make_run(tmp_path / "run")).checkpoint(pytest.fail) is None


def test_a_checkpoint_that_is_named_is_taken_and_those_after_it_are_removed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=(2, 4, 6))
    checkpoint = find(checkpoints(run)[1]).checkpoint(pytest.fail)
    assert checkpoint is not None and checkpoint.step == 4
    begun(run, checkpoint)
    assert [each.name for each in checkpoints(run)] == ["step-00000002", "step-00000004"]


def test_a_damaged_checkpoint_that_is_named_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=(2, 4))
    damage(checkpoints(run)[1])
    with pytest.raises(ConfigError, match=r"--resume: .*step-00000004 is damaged: ledger\.msgpack"):
        find(checkpoints(run)[1])
    assert len(checkpoints(run)) == 2


@pytest.mark.parametrize("name", ["absent", ".", f"run/{CHECKPOINTS}", f"run/{CHECKPOINTS}/step-00000009"])
def test_what_is_neither_a_run_nor_a_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    make_run(tmp_path / "run", steps=(2,))
    with pytest.raises(ConfigError, match=str(tmp_path)):
        find(tmp_path / name)


def test_a_run_may_be_named_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", steps=(2,))
    monkeypatch.chdir(tmp_path)
    assert find(Path("run")).run == run
    assert find(Path("run/checkpoints/step-00000002/")).run == run


def test_a_checkpoint_that_lies_elsewhere_is_no_run_that_starts_over(tmp_path: Path) -> None:
    (checkpoint,) = checkpoints(make_run(tmp_path / "run", steps=(2,)))
    (checkpoint / CONFIG).write_text(to_toml(config()))
    elsewhere = checkpoint.rename(tmp_path / "kept")
    with pytest.raises(ConfigError, match="a checkpoint goes on in its run"):
        find(elsewhere)


def test_checkpoints_may_lie_on_another_disk(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=(2,))
    (run / CHECKPOINTS).rename(tmp_path / "large")
    (run / CHECKPOINTS).symlink_to(tmp_path / "large")
    assert find(checkpoints(run)[0]).run == run


def test_runs_that_are_not_done_come_newest_first(tmp_path: Path) -> None:
    old = make_run(tmp_path / "z-old", at=10)
    new = make_run(tmp_path / "a-new", at=30)
    make_run(tmp_path / "b-done", at=40, done=True)
    (tmp_path / "no run").mkdir()
    assert list(unfinished(tmp_path)) == [new, old]
    assert list(unfinished(tmp_path / "absent")) == []


def test_a_run_that_failed_at_its_start_hides_no_run_that_has_a_checkpoint(tmp_path: Path) -> None:
    failed = make_run(tmp_path / "failed", at=50)
    trained = [make_run(tmp_path / f"trained{at}", at=at, steps=(2,)) for at in (30, 10)]
    assert list(unfinished(tmp_path)) == [*trained, failed]


def test_a_run_is_locked_once(tmp_path: Path) -> None:
    lock = lock_run(tmp_path)
    with pytest.raises(ConfigError, match="still going on"):
        lock_run(tmp_path)
    os.close(lock)
    os.close(lock_run(tmp_path))


# --- settings --------------------------------------------------------------------------------------------------------


def changes(*arguments: str) -> dict[str, bool]:
    """Whether each setting that the arguments change may change."""
    return {each.setting: each.allowed for each in differences(config(), config(*arguments))}


def test_the_same_settings_do_not_differ() -> None:
    assert differences(config(), config()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("--loop.steps", "7"),
        ("--generator.count", "1"),
        ("--generator.tensor_parallel", "2"),
        ("--evaluation.every", "3"),
        ("--logging.tensorboard", "false"),
        ("--router.strategy", "round_robin"),
        ("--checkpoint.every", "1"),
        ("--weights.max_live", "4"),
    ],
)
def test_what_a_deterministic_run_does_not_depend_on_may_change(arguments: tuple[str, str]) -> None:
    name = arguments[0].removeprefix("--")
    assert changes(*arguments) == {name: True}
    (difference,) = differences(config(), config(*arguments))
    assert "not bitwise" not in str(difference)
    check_differences([difference], Path("run"))


def test_another_layout_of_the_trainer_may_be_taken_and_is_only_close() -> None:
    (difference,) = differences(config(), config("--trainer.data_parallel", "2"))
    assert difference.allowed and "not bitwise" in str(difference)
    assert str(difference).startswith("trainer.data_parallel 1 → 2 (")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--seed", "1"),
        ("--deterministic", "true"),
        ("--loop.groups_per_step", "8"),
        ("--loop.max_staleness", "1"),
        ("--rollout.samples_per_group", "4"),
        ("--trainer.optimizer.lr", "1e-4"),
        ("--policy.tiny.dim", "32"),
        ("--environment.kwargs.digits", "3"),
        ("--generator.dtype", "bfloat16"),
    ],
)
def test_what_decides_what_is_computed_may_not_change(arguments: tuple[str, str]) -> None:
    refused = {name for name, allowed in changes(*arguments).items() if not allowed}
    assert arguments[0].removeprefix("--") in refused


def test_the_refusal_names_every_setting_that_may_not_change_and_no_other() -> None:
    found = differences(config(), config("--seed", "1", "--loop.steps", "7", "--environment.kwargs.digits", "3"))
    with pytest.raises(
        ConfigError, match=r"run cannot go on .*: seed 0 → 1, environment.kwargs.digits 4 → 3; "
    ) as refusal:
        check_differences(found, Path("run"))
    assert "steps" not in str(refusal.value)


def settings(values: Any, prefix: str = "") -> list[str]:
    if not dataclasses.is_dataclass(values):
        return [prefix.removesuffix(".")]
    return [
        name
        for field in dataclasses.fields(values)
        for name in settings(getattr(values, field.name), f"{prefix}{field.name}.")
    ]


@pytest.mark.parametrize("name", [*MAY_CHANGE, *CLOSE])
def test_every_setting_that_may_change_exists_and_covers_no_other_by_its_beginning(name: str) -> None:
    known = settings(config())
    if name.endswith("."):
        assert any(setting.startswith(name) for setting in known)
    else:
        assert [setting for setting in known if setting.startswith(name)] == [name]
        attrgetter(name)(config())


# --- the command -----------------------------------------------------------------------------------------------------


def resumed(*arguments: str) -> Any:
    return train._what_to_run(train.VERB.read(["--resume", *arguments]), "titan-rl train")


def test_the_settings_of_a_run_need_not_be_repeated_and_new_ones_win(tmp_path: Path, capsys: Any) -> None:
    run = make_run(tmp_path / "run", "--loop.groups_per_step", "8", "--seed", "5", steps=(2,))
    found, resume = resumed(str(run), "--loop.steps", "9")
    assert (found.loop.groups_per_step, found.seed, found.loop.steps) == (8, 5, 9)
    assert resume.run == run
    assert capsys.readouterr().err == "titan-rl train: loop.steps 150 → 9\n"


def test_the_same_command_line_with_resume_is_the_same_run(tmp_path: Path, capsys: Any) -> None:
    run = make_run(tmp_path / "run", "--seed", "5")
    assert resumed(str(run), "--recipe", "copy4", "--seed", "5")[0] == config("--seed", "5")
    assert capsys.readouterr().err == ""


def test_a_run_that_is_done_goes_on_only_with_more_steps(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=(150,), done=True)
    with pytest.raises(ConfigError, match=r"is done; to train it further, ask for more steps: --loop\.steps"):
        resumed(str(run))
    assert resumed(str(run), "--loop.steps", "200")[0].loop.steps == 200


@pytest.mark.parametrize(("of", "steps", "refused"), [("", 3, True), ("", 4, False), ("step-00000002", 3, False)])
def test_a_run_does_not_go_on_for_fewer_steps_than_it_has_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, of: str, steps: int, refused: bool
) -> None:
    run = make_run(tmp_path / "run", steps=(2, 4))
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    monkeypatch.setattr(train, "check_and_run", lambda *_, **__: 0)
    where = run / CHECKPOINTS / of if of else run
    assert train.main(["--resume", str(where), "--loop.steps", str(steps)]) == (2 if refused else 0)
    assert ("loop.steps = 3 is less than" in capsys.readouterr().err) == refused
    assert before == {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}


FAILS = """
import sys
from pathlib import Path
from titan_rl.errors import HostLost
from titan_rl.run.run import conduct
from titan_rl.train import config_of_run

async def work(directory, run_end):
    raise HostLost("host1 does not answer")

run = Path(sys.argv[1])
code, *_ = conduct(config_of_run(run), work, say=print, stopping="", directory=run)
sys.exit(code)
"""


@pytest.mark.parametrize("done", [True, False])
def test_a_run_that_is_over_stays_so_when_it_could_not_go_on(tmp_path: Path, done: bool) -> None:
    run = make_run(tmp_path / "run", steps=(2,), done=done)
    (run / ENDING).write_text("how it ended")
    assert subprocess.run([sys.executable, "-c", FAILS, str(run)], timeout=60, check=False).returncode == 1
    assert ((run / ENDING).read_text() == "how it ended") == done


def test_weights_that_could_not_be_saved_at_the_end_are_refused_at_the_start(tmp_path: Path, capsys: Any) -> None:
    run = make_run(tmp_path / "run", steps=(2,))
    (run / "checkpoint").mkdir()
    (run / "checkpoint" / "notes").touch()
    assert train.main(["--resume", str(run)]) == 2
    assert "checkpoint holds notes, which would be deleted" in capsys.readouterr().err


def test_the_last_line_promises_only_what_a_run_that_is_done_can_do(tmp_path: Path) -> None:
    assert how_to_go_on(make_run(tmp_path / "kept", steps=(2,), done=True)).endswith("--loop.steps N trains it further")
    bare = make_run(tmp_path / "bare", done=True)
    assert how_to_go_on(bare) == "it cannot be trained further"
    (bare / "checkpoint").mkdir()
    assert how_to_go_on(bare) == "a new run goes on from its weights"


def test_a_run_that_is_done_without_a_checkpoint_does_not_start_over(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", done=True)
    with pytest.raises(ConfigError, match=r"has no checkpoint to go on from; .* --policy\.path .*run/checkpoint"):
        resumed(str(run), "--loop.steps", "200")


def auto(runs: Path, *arguments: str) -> Any:
    return resumed("auto", "--recipe", "copy4", "--logging.directory", str(runs), *arguments)


def test_auto_takes_the_newest_unfinished_run_of_this_recipe_and_config(tmp_path: Path, capsys: Any) -> None:
    runs = ("--logging.directory", str(tmp_path))
    make_run(tmp_path / "older", *runs, at=10)
    run = make_run(tmp_path / "newer", *runs, at=20)
    make_run(tmp_path / "done", *runs, at=30, done=True)
    make_run(tmp_path / "other", *runs, "--seed", "3", at=40)
    (make_run(tmp_path / "unreadable", at=50) / CONFIG).write_text("recipe = 'gone'\n")
    found, resume = auto(tmp_path, "--loop.steps", "7")
    assert resume.run == run and found.loop.steps == 7
    said = capsys.readouterr().err
    assert "unreadable is passed over" in said and f"going on with {run}" in said


def test_auto_starts_a_new_run_where_there_is_none(tmp_path: Path, capsys: Any) -> None:
    make_run(tmp_path / "done", done=True)
    make_run(tmp_path / "other", "--seed", "3")
    found, resume = auto(tmp_path)
    assert resume is None and found == config("--logging.directory", str(tmp_path))
    assert "a new one starts" in capsys.readouterr().err
