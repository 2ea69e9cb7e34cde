"""`titan-rl train` up to the point where processes would start (5 s, most of it the import of torch)."""

from __future__ import annotations

import re
import sys
from operator import attrgetter
from pathlib import Path

import pytest

from titan_rl import cli, train
from titan_rl.config import LoggingConfig, RunConfig
from titan_rl.config_registry import RECIPES
from titan_rl.errors import ConfigError, StorageError
from titan_rl.hosts.facts import detect_host
from titan_rl.run.run import make_run_directory, write_config
from titan_rl.supervision.placement import TORCHRUN_VARIABLES, with_devices

ROOT = Path(__file__).resolve().parents[2]
TASKS = ROOT / "rl_configs"
SORTING = TASKS / "alphabet_sort.py"
FILES = sorted(TASKS.glob("*.toml"))


def resolved(*arguments: str) -> RunConfig:
    return train.resolve(train.VERB.read(arguments))


# --- layers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ("--config {file} --loop.steps 9", {"recipe": "copy4", "loop.steps": 9, "loop.groups_per_step": 4, "seed": 0}),
        ("--config {file} --recipe copy4_2x2", {"recipe": "copy4_2x2", "trainer.data_parallel": 2, "loop.steps": 7}),
        ("--seed 3 --recipe copy4 --name first", {"seed": 3, "logging.name": "first"}),
        ("--recipe copy4 --policy.path /model", {"policy.path": "/model", "policy.tiny": None}),
        (
            f"--recipe {SORTING}:qwen3_0_6b --policy.tiny.max_length 2048 --policy.tiny.dim 32",
            {"policy.path": "", "policy.tiny.dim": 32},
        ),
        ("--recipe copy4 --environment.name sort", {"environment.kwargs": {}}),
    ],
)
def test_the_command_line_wins_over_toml_and_toml_over_the_recipe(arguments, settings, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('recipe = "copy4"\n[loop]\nsteps = 7\ngroups_per_step = 4\n')
    config = resolved(*arguments.format(file=file).split())
    assert {name: attrgetter(name)(config) for name in settings} == settings


# --- recipes, files, round trips -------------------------------------------------------------------------------------


def read_back(output: str, tmp_path: Path) -> RunConfig:
    file = tmp_path / "written.toml"
    file.write_text(output)
    return resolved("--config", str(file))


def dry_run_code(config):
    """2: it needs CUDA devices that this host has not."""
    return 2 if with_devices(detect_host(), config).devices_there is not None else 0


@pytest.mark.parametrize("name", RECIPES)
def test_a_dry_run_of_a_recipe_prints_toml_that_gives_the_same_config(name, tmp_path, capsys):
    config = resolved("--recipe", name)
    assert train.main(["--recipe", name, "--dry-run"]) == dry_run_code(config)
    output = capsys.readouterr().out
    assert read_back(output, tmp_path) == config
    assert f"generator{config.generator.count - 1}" in output


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_bundled_file_is_enough_for_a_dry_run(file, tmp_path, capsys):
    code = dry_run_code(resolved("--config", str(file)))
    assert train.main(["--config", str(file), "--dry-run"]) == code
    assert read_back(capsys.readouterr().out, tmp_path) == resolved("--config", str(file))


def test_the_gpu_recipe_loads_anywhere_and_says_what_is_absent(capsys):
    assert train.main(["--recipe", f"{SORTING}:qwen3_0_6b", "--dry-run"]) == 2
    printed = capsys.readouterr()
    assert "cuda:7" in printed.out and "no CUDA devices; drawn as if it had 8)" in printed.out
    devices, directory = printed.err.splitlines()
    assert "warning: the run needs 8 CUDA devices" in devices
    assert "warning: policy.path: there is no directory" in directory


def test_the_data_of_a_task_starts_at_the_file_that_names_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kwargs = resolved("--config", str(ROOT / "rl_configs" / "qwen3_0_6b_gsm8k.toml")).environment.kwargs
    assert kwargs["train_file"] == str(ROOT / "data" / "gsm8k" / "train.jsonl")
    named = resolved("--recipe", f"{TASKS}/gsm8k.py:qwen3_0_6b", "--environment.kwargs.test_file", "mine.jsonl")
    kwargs = named.environment.kwargs
    assert kwargs["test_file"] == str(tmp_path / "mine.jsonl")
    assert kwargs["train_file"] == str(ROOT / "data" / "gsm8k" / "train.jsonl"), "as the recipe's file says"


def test_a_task_whose_files_or_packages_are_absent_loads_and_is_not_run(tmp_path, monkeypatch, capsys, started):
    monkeypatch.chdir(tmp_path)
    small = (
        "--recipe",
        "copy4",
        "--environment.name",
        f"{TASKS}/gsm8k.py:Gsm8k",
        "--environment.kwargs.train_file",
        "none.jsonl",
    )
    assert train.main([*small, "--dry-run"]) == 0
    assert "warning: environment.kwargs.train_file: there is no file" in capsys.readouterr().err
    assert train.main(small) == 2 and not started
    assert capsys.readouterr().err.count("there is no file") == 1
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "reasoning_gym.py").write_text("raise ModuleNotFoundError(name='reasoning_gym')")
    monkeypatch.syspath_prepend(hidden)  # the process that makes the task gets this path
    assert train.main(["--recipe", f"{TASKS}/reasoning.py:spell"]) == 2 and not started
    assert "pip install 'titan-rl[reasoning-gym]'" in capsys.readouterr().err


# --- the user's own code ---------------------------------------------------------------------------------------------


def test_a_recipe_in_a_file_is_found_and_imported_everywhere(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = resolved("--recipe", "task.py:recipe")
    assert config.recipe == f"{task}:recipe"
    assert config.environment.name == f"{task}:Doubles"
    assert config.user_modules == (str(task),)


def test_a_recipes_class_file_starts_at_the_recipes_directory(task, monkeypatch):
    monkeypatch.chdir("/")
    assert resolved("--recipe", f"{task}:recipe").environment.name == f"{task}:Doubles"


def test_file_names_in_toml_start_at_its_directory(task, tmp_path, monkeypatch):
    (tmp_path / "mine.toml").write_text(
        'recipe = "task.py:recipe"\n[environment]\nname = "task.py:Doubles"\n[logging]\ndirectory = "out"\n'
    )
    monkeypatch.chdir("/")
    config = resolved("--config", str(tmp_path / "mine.toml"), "--trainer.loss.name", "losses.py:Mine")
    assert config.environment.name == f"{task}:Doubles"
    assert config.environment.kwargs == {"top": 3}, "the same class keeps its arguments"
    assert config.logging.directory == str(tmp_path / "out")
    assert config.user_modules == (str(task), "/losses.py")


def test_modules_of_the_user_are_imported_and_bundled_ones_are_not(tmp_path, monkeypatch):
    (tmp_path / "my_recipes.py").write_text("from titan_rl.config_registry import copy4 as mine\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = resolved("--recipe", "my_recipes:mine", "--rollout.rollouter", "titan_rl.rollout.rollouter:Rollouter")
    assert config.user_modules == ("my_recipes",)


def test_the_console_command_finds_modules_of_the_working_directory(tmp_path, monkeypatch, capsys):
    (tmp_path / "local_recipes.py").write_text("from titan_rl.config_registry import copy4 as mine\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert cli.main(["train", "--recipe", "local_recipes:mine", "--dry-run"]) == 0


@pytest.mark.parametrize(
    ("recipe", "name", "begins"),
    [
        ("copy4", "", "copy4-"),
        ("{task}:recipe", "", "task-"),
        ("titan_rl.config_registry:copy4", "", "config_registry-"),
        ("{task}:recipe", "my run", "my run-"),
        ("", "", "run-"),
    ],
)
def test_a_run_is_named_after_its_recipe_or_the_file_that_holds_it(recipe, name, begins, tmp_path, task):
    logging = LoggingConfig(directory=str(tmp_path / "runs"), name=name)
    directory = make_run_directory(RunConfig(recipe=recipe.format(task=task), logging=logging))
    assert directory.name.startswith(begins) and directory.parent == tmp_path / "runs"


def test_a_run_directory_that_cannot_be_made_is_refused_with_its_setting():
    with pytest.raises(ConfigError, match=r"logging\.directory: /dev/null/runs.* cannot be made: Not a directory"):
        make_run_directory(RunConfig(recipe="copy4", logging=LoggingConfig(directory="/dev/null/runs")))


def test_a_strategy_of_ones_own_is_found_from_the_working_directory(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = resolved("--recipe", "copy4", "--router.strategy", "mine.py:Mine")
    assert config.router.strategy == f"{tmp_path}/mine.py:Mine" and config.user_modules == (f"{tmp_path}/mine.py",)
    for settings in (("--policy.tiny.architecture",), ("--policy.path", "x", "--policy.architecture")):
        config = resolved("--recipe", "copy4", *settings, "mine.py:Mine")
        assert config.policy.family == f"{tmp_path}/mine.py:Mine" and config.user_modules == (f"{tmp_path}/mine.py",)


# --- starting --------------------------------------------------------------------------------------------------------


def test_a_real_run_gets_the_config_and_the_modules_of_the_user(task, started):
    assert train.main(["--recipe", f"{task}:recipe", "--seed", "4"]) == 0
    (config,) = started
    assert config.seed == 4 and config.user_modules == (str(task),)


def test_under_torchrun_with_one_process_the_run_starts_without_torchruns_variables(monkeypatch, started):
    for name in TORCHRUN_VARIABLES:
        monkeypatch.setenv(name, "1")
    assert train.main(["--recipe", "copy4"]) == 0
    assert len(started) == 1
    assert not set(TORCHRUN_VARIABLES) & set(train.os.environ)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "0"}, "use --nproc-per-node 1"),
        ({"WORLD_SIZE": "8"}, "there is no RANK, MASTER_ADDR, MASTER_PORT"),
    ],
)
def test_what_torchrun_cannot_mean_is_refused(variables, words, monkeypatch, capsys, started):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert train.main(["--recipe", "copy4"]) == 2 and started == []
    assert words in capsys.readouterr().err


def test_workers_with_devices_need_none_on_the_controllers_host(capsys, started):
    where = ["--hosts", "10.0.0.2:17000", "--trusted-network", "--placement.device", "cuda"]
    assert train.main(["--recipe", "copy4", *where]) == 0, capsys.readouterr().err
    assert started[0].placement.device == "cuda"


def test_hosts_on_a_network_are_refused_unless_it_is_trusted(capsys, started):
    assert train.main(["--recipe", "copy4", "--hosts", "10.0.0.2:17000,10.0.0.3:17000"]) == 2
    assert "without --trusted-network" in capsys.readouterr().err
    assert train.main(["--recipe", "copy4", "--hosts", "10.0.0.2:17000,10.0.0.3:17000", "--trusted-network"]) == 0
    assert started[0].placement.hosts == ("10.0.0.2:17000", "10.0.0.3:17000")


# --- help ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["--recipe", "copy4", "--help"]], ids=" ".join)
def test_help_lists_every_setting_with_its_docstring(arguments, capsys):
    assert train.main(arguments) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for part in ("--dry-run", "--name", "--policy.tiny.head-dim", "--trainer.optimizer.lr", "OpenMP threads per"):
        assert part in text
    options = set(re.findall(r"--[\w.-]+", text))
    assert not [option for option in options if "_" in option.partition("kwargs.")[0]], "kebab-case everywhere"


def test_help_shows_the_values_of_the_recipe(capsys):
    assert train.main(["--recipe", "copy4", "--help"]) == 0
    assert "--environment.kwargs.digits" in capsys.readouterr().out


def test_recipes_lists_recipes_and_tasks_with_a_line_each(capsys):
    assert cli.main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in (*RECIPES, "copy", "dataset"):
        found = [line for line in lines if line.split()[:1] == [name]]
        assert len(found) == 1
        assert len(found[0].split()) > 3 and len(found[0]) <= 120


@pytest.mark.parametrize("verb", [("train", "--recipe", "copy4"), ("serve", "--recipe", "copy4"), ("plan",)])
def test_every_verb_reads_its_words_alike(verb, capsys):
    for wrong, said in {
        **({"--help please": "--help: takes no value, got 'please'"} if verb[0] != "train" else {}),  # it takes a task
        "--config": "--config: expected one value, got 'nothing'",
        "--config nowhere.toml": "nowhere.toml: there is no such file",
        "--lop.steps 3": "--lop.steps: there is no such setting",
        "--seed many": "--seed: expected an integer",
    }.items():
        assert cli.main([*verb, *wrong.split()]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"titan-rl {verb[0]}: ") and said in line
    assert cli.main([verb[0], "-h"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: titan-rl {verb[0]} ") and "\n  --seed " in printed


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--help"], 0, "usage: titan-rl"),
        ([], 2, "usage: titan-rl"),
        (["--version"], 0, "titan-rl 0."),
        (["trian"], 2, "there is no verb 'trian' (did you mean train?)"),
        (["recipes", "all"], 2, "takes no arguments"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_console_command_answers(arguments, code, said, capsys):
    assert cli.main(arguments) == code
    printed = capsys.readouterr()
    assert said in printed.out + printed.err


def test_a_config_that_finds_no_room_is_named_and_the_one_that_is_there_stays(tmp_path):
    (tmp_path / "config.toml").write_text("before")
    (tmp_path / ".config.toml").symlink_to("/dev/full")
    with pytest.raises(StorageError, match="config.toml cannot be written: No space left on device"):
        write_config(tmp_path, RunConfig())
    assert (tmp_path / "config.toml").read_text() == "before"
