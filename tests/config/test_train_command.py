"""`titan-rl train` up to the point where processes would start (5 s, most of it the import of torch)."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest
import tomli

from titan_rl import cli, train
from titan_rl.config import RunConfig
from titan_rl.config_registry import RECIPES, load_recipe
from titan_rl.launch.placement import TORCHRUN_VARIABLES, HostFacts
from titan_rl.policy.config import TinyPolicyConfig
from titan_rl.policy.tiny_tokenizer import make_tokenizer

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "rl_configs").glob("*.toml"))
TASK = '''
from titan_rl.config import RunConfig
from titan_rl.config_registry import copy4
from titan_rl.environments.base import Environment, Example, Message, Rubric
import dataclasses

class Doubles(Environment):
    """Doubles numbers."""
    def __init__(self, top: int, shift: float = 0.0, seed: int = 0): ...
    def example(self, index):
        return Example(prompt=(Message("user", f"{1000 + index}="),), answer="")
    def held_out(self, count):
        return [Example(prompt=(Message("user", "1="),), answer="")]
    def rubric(self):
        return Rubric(lambda example, transcript: 0.0)

class NoTask: ...

def recipe():
    base = copy4()
    environment = dataclasses.replace(base.environment, name="task.py:Doubles", kwargs={"top": 3})
    return dataclasses.replace(base, environment=environment)

def nothing():
    return None
'''


@pytest.fixture(autouse=True)
def host(monkeypatch):
    """A machine without GPUs, whatever runs the tests."""
    for name in TORCHRUN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(train, "detect_host", lambda: HostFacts(cpus=2))


@pytest.fixture
def task(tmp_path):
    file = tmp_path / "task.py"
    file.write_text(TASK)
    return file


@pytest.fixture
def started(monkeypatch):
    """Runs that were started, in place of starting them."""
    runs: list[tuple[RunConfig, tuple[str, ...]]] = []
    module = types.ModuleType("titan_rl.launch.run")
    module.run = lambda config, imports: runs.append((config, imports)) or 0
    monkeypatch.setitem(sys.modules, "titan_rl.launch.run", module)
    return runs


def resolved(*arguments: str) -> tuple[RunConfig, tuple[str, ...]]:
    return train.resolve(train.parse(arguments))


# --- layers ----------------------------------------------------------------------------------------------------------


def test_the_command_line_wins_over_toml_and_toml_over_the_recipe(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('recipe = "copy4"\n[loop]\nsteps = 7\ngroups_per_step = 4\n')
    config, _ = resolved("--config", str(file), "--loop.steps", "9")
    assert (config.loop.steps, config.loop.groups_per_step) == (9, 4)
    assert config.rollout == load_recipe("copy4").rollout
    assert config.recipe == "copy4"


def test_a_recipe_on_the_command_line_wins_over_that_of_the_file(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('recipe = "copy4"\n[loop]\nsteps = 7\n')
    config, _ = resolved("--config", str(file), "--recipe", "copy4_2x2")
    assert (config.recipe, config.trainer.data_parallel, config.loop.steps) == ("copy4_2x2", 2, 7)


def test_an_option_may_come_before_recipe_and_config():
    config, _ = resolved("--seed", "3", "--recipe", "copy4")
    assert config.seed == 3


def test_a_checkpoint_directory_takes_the_place_of_the_tiny_policy(tmp_path):
    config, _ = resolved("--recipe", "copy4", "--policy.path", str(tmp_path))
    assert config.policy.path == str(tmp_path) and config.policy.tiny is None


def test_a_tiny_policy_takes_the_place_of_a_checkpoint_directory():
    arguments = ["--policy.tiny.dim", "32", "--policy.tiny.max_length", "2048"]
    config, _ = resolved("--recipe", "qwen3_0_6b_alphabet_sort", *arguments)
    assert config.policy.path == "" and config.policy.tiny.dim == 32


def test_another_environment_does_not_inherit_constructor_arguments():
    config, _ = resolved("--recipe", "copy4", "--environment.name", "alphabet_sort")
    assert config.environment.kwargs == {}


# --- recipes, files, round trips -------------------------------------------------------------------------------------


def read_back(output: str, tmp_path: Path) -> RunConfig:
    file = tmp_path / "written.toml"
    file.write_text(output)
    return resolved("--config", str(file))[0]


@pytest.mark.parametrize("name", RECIPES)
def test_a_dry_run_of_a_recipe_prints_toml_that_gives_the_same_config(name, tmp_path, capsys):
    assert train.main(["--recipe", name, "--dry-run"]) == 0
    output = capsys.readouterr().out
    config = resolved("--recipe", name)[0]
    assert read_back(output, tmp_path) == config
    assert f"generator{config.generator.count - 1}" in output and "OMP_NUM_THREADS=1" in output


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_bundled_file_is_enough_for_a_dry_run(file, tmp_path, capsys):
    assert train.main(["--config", str(file), "--dry-run"]) == 0
    assert read_back(capsys.readouterr().out, tmp_path) == resolved("--config", str(file))[0]


def test_there_is_a_file_for_every_recipe():
    assert set(RECIPES) <= {file.stem for file in FILES}
    assert {tomli.loads(file.read_text())["recipe"] for file in FILES} == set(RECIPES)


def test_the_gpu_recipe_loads_anywhere_and_warns_of_what_is_absent(capsys):
    assert train.main(["--recipe", "qwen3_0_6b_alphabet_sort", "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert "cuda:7" in printed.out
    devices, directory = printed.err.splitlines()
    assert "warning: the run needs 8 CUDA devices" in devices
    assert "warning: policy.path: there is no directory" in directory


def test_the_data_of_a_task_starts_at_the_file_that_names_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kwargs = resolved("--config", str(ROOT / "rl_configs" / "qwen3_0_6b_gsm8k.toml"))[0].environment.kwargs
    assert kwargs["train_file"] == str(ROOT / "data" / "gsm8k" / "train.jsonl")
    kwargs = resolved("--recipe", "qwen3_0_6b_gsm8k", "--environment.kwargs.test_file", "mine.jsonl")[
        0
    ].environment.kwargs
    assert kwargs["test_file"] == str(tmp_path / "mine.jsonl")
    assert kwargs["train_file"] == str(tmp_path / "data" / "gsm8k" / "train.jsonl")


def test_a_task_whose_files_or_packages_are_absent_loads_and_is_not_run(tmp_path, monkeypatch, capsys, started):
    monkeypatch.chdir(tmp_path)
    small = ("--recipe", "copy4", "--environment.name", "gsm8k", "--environment.kwargs.train_file", "none.jsonl")
    assert train.main([*small, "--dry-run"]) == 0
    assert "warning: environment.kwargs.train_file: there is no file" in capsys.readouterr().err
    assert train.main(small) == 2 and not started
    assert capsys.readouterr().err.count("there is no file") == 1
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    assert train.main(["--recipe", "reasoning_gym_spell"]) == 2 and not started
    assert "pip install 'titan-rl[reasoning-gym]'" in capsys.readouterr().err


# --- the user's own code ---------------------------------------------------------------------------------------------


def test_a_recipe_in_a_file_is_found_and_imported_everywhere(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config, imports = resolved("--recipe", "task.py:recipe")
    assert config.recipe == f"{task}:recipe"
    assert config.environment.name == f"{task}:Doubles"
    assert imports == (str(task),)


def test_a_recipes_class_file_starts_at_the_recipes_directory(task, monkeypatch):
    monkeypatch.chdir("/")
    assert resolved("--recipe", f"{task}:recipe")[0].environment.name == f"{task}:Doubles"


def test_file_names_in_toml_start_at_its_directory(task, tmp_path, monkeypatch):
    (tmp_path / "mine.toml").write_text(
        'recipe = "task.py:recipe"\n[environment]\nname = "task.py:Doubles"\n[logging]\ndirectory = "out"\n'
    )
    monkeypatch.chdir("/")
    config, imports = resolved("--config", str(tmp_path / "mine.toml"), "--trainer.loss.name", "losses.py:Mine")
    assert config.environment.name == f"{task}:Doubles"
    assert config.environment.kwargs == {"top": 3}, "the same class keeps its arguments"
    assert config.logging.directory == str(tmp_path / "out")
    assert imports == (str(task), "/losses.py")


def test_modules_of_the_user_are_imports_and_bundled_ones_are_not(tmp_path, monkeypatch):
    (tmp_path / "my_recipes.py").write_text("from titan_rl.config_registry import copy4 as mine\n")
    monkeypatch.syspath_prepend(tmp_path)
    _, imports = resolved("--recipe", "my_recipes:mine", "--rollout.rollouter", "titan_rl.rollout.rollouter:Rollouter")
    assert imports == ("my_recipes",)


def test_the_console_command_finds_modules_of_the_working_directory(tmp_path, monkeypatch, capsys):
    (tmp_path / "local_recipes.py").write_text("from titan_rl.config_registry import copy4 as mine\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert cli.main(["train", "--recipe", "local_recipes:mine", "--dry-run"]) == 0


# --- refusals --------------------------------------------------------------------------------------------------------

WRONG = {
    "--recipe copy5": "--recipe copy5: there is no such recipe (did you mean copy4?)",
    "--recipe no.such:thing": "--recipe 'no.such:thing': there is no module 'no.such'",
    "--recipe copy4 --recipe": "--recipe: expected one value, got 'nothing'",
    "": "name a recipe",
    "copy4": "'copy4' belongs to no option",
    "--config nowhere.toml": "nowhere.toml: there is no such file",
    "--recipe copy4 --lop.steps 3": "--lop.steps: there is no such setting (did you mean --loop.steps?)",
    "--recipe copy4 --loop.steps many": "--loop.steps: expected an integer, got 'many'",
    "--recipe copy4 --loop.steps 0": "loop.steps must be at least 1, got 0",
    "--recipe copy4 --dry-run yes": "--dry-run: takes no value, got 'yes'",
    "--recipe copy4 --generator.tensor_parallel 4": (
        "generator.tensor_parallel (4) must divide the policy's kv heads (2)"
    ),
    "--recipe copy4 --trainer.tensor_parallel 3": (
        "trainer.tensor_parallel (3) must divide the policy's heads (4) and kv heads (2)"
    ),
    "--recipe copy4 --policy.tiny.head_dim 16": "policy.tiny.head_dim is 16, and the CPU attention has kernels for 32",
    "--recipe copy4 --policy.tiny.kv_heads 3": "policy.tiny.kv_heads (3) must divide policy.tiny.heads (4)",
    "--recipe copy4 --policy.path /no/such/directory": "policy.path: there is no directory /no/such/directory",
    "--recipe copy4 --placement.device cuda": "the run needs 3 CUDA devices (trainer 1, generators 2 x 1)",
    "--recipe copy4 --trainer.max_tokens_per_microbatch 32": "trainer.max_tokens_per_microbatch (32) must hold",
    "--recipe copy4 --generator.max_model_len 128": "generator.max_model_len (128) is more than policy.tiny.max_length",
    "--recipe copy4 --environment.name kopy": "environment.name: 'kopy' names nothing",
    "--recipe copy4 --environment.kwargs.digit 3": (
        "environment.kwargs.digit: Copy takes no such argument (did you mean digits?)"
    ),
    "--recipe copy4 --environment.kwargs.digits four": "environment.kwargs.digits: expected int, got 'four'",
    "--recipe copy4 --environment.kwargs.digits 1": "environment.kwargs.digits must be at least 2, got 1",
    "--recipe copy4 --trainer.loss.name grqo": "trainer.loss.name: 'grqo' names nothing",
    "--recipe copy4 --trainer.loss.kwargs.clip_hihg 0.3": (
        "trainer.loss.kwargs.clip_hihg: GRPOLoss takes no such argument (did you mean clip_high?)"
    ),
    "--recipe copy4 --trainer.loss.kwargs.clip_low 2": "trainer.loss.kwargs.clip_low must be in [0, 1), got 2",
    "--recipe copy4 --rollout.rollouter no.such:Player": "rollout.rollouter: 'no.such:Player': there is no module",
    "--recipe tool_sum_openai --rollout.agents.gateway false": (
        "tool_sum_openai plays its rollouts by programs, and rollout.agents.gateway is false"
    ),
    "--recipe copy4 --generator.linear fast": "generator.linear: 'fast' names nothing",
}


@pytest.mark.parametrize("line", WRONG)
def test_what_is_wrong_is_said_in_one_line_before_anything_starts(line, capsys, started):
    assert train.main(line.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and started == []
    (sentence,) = printed.err.splitlines()
    assert f": {WRONG[line]}" in sentence


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--environment.kwargs.tip", "1"],
            "environment.kwargs.tip: Doubles takes no such argument (did you mean top?)",
        ),
        (["--environment.kwargs.top", "1.5"], "environment.kwargs.top: expected int, got 1.5"),
        (["--environment.kwargs.shift", "no"], "environment.kwargs.shift: expected float, got 'no'"),
        (["--environment.name", "{task}:NoTask"], "is no subclass of titan_rl.environments.base.Environment"),
        (["--trainer.warmup.steps", "20"], "trainer.warmup.steps is 20, and"),
        (["--environment.name", "{task}:Gone"], "has no 'Gone'"),
        (["--recipe", "{task}:nothing"], "nothing: must return a RunConfig, returned NoneType"),
        (["--recipe", "{task}.py:x"], "no such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_wrong_with_the_users_own_task_is_said_in_one_line(arguments, sentence, task, capsys, started):
    arguments = [argument.format(task=task) for argument in arguments]
    assert train.main(["--recipe", f"{task}:recipe", *arguments] if "--recipe" not in arguments else arguments) == 2
    assert sentence in " ".join(capsys.readouterr().err.splitlines())
    assert started == []


def test_a_missing_constructor_argument_is_named(task, capsys, started):
    assert train.main(["--recipe", "copy4", "--environment.name", f"{task}:Doubles"]) == 2
    assert "environment.kwargs.top: Doubles needs this argument" in capsys.readouterr().err


def checkpoint(directory: Path, **changes: object) -> Path:
    """What of a Qwen3 checkpoint directory is looked at before a run."""
    config = {
        "model_type": "qwen3",
        "vocab_size": 32,
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 128,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "eos_token_id": 1,
    }
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config | changes))
    (directory / "model.safetensors").touch()
    make_tokenizer(TinyPolicyConfig()).save(str(directory / "tokenizer.json"))
    return directory


def test_a_local_checkpoint_directory_is_accepted(tmp_path, started):
    directory = checkpoint(tmp_path / "model")
    assert train.main(["--recipe", "copy4", "--policy.path", str(directory)]) == 0
    assert started[0][0].policy.path == str(directory)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"head_dim": 48}, "is 48, and the CPU attention has kernels for 32"),
        ({"max_position_embeddings": 32}, "generator.max_model_len (64) is more than the 32 positions"),
        ({"model_type": "llama"}, "model_type is 'llama'"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(changes, sentence, tmp_path, capsys, started):
    directory = checkpoint(tmp_path / "model", **changes)
    assert train.main(["--recipe", "copy4", "--policy.path", str(directory), "--dry-run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_checkpoint_that_lacks_a_file_is_refused_and_in_a_dry_run_warned_of(name, tmp_path, capsys, started):
    directory = checkpoint(tmp_path / "model")
    (directory / name).unlink()
    arguments = ["--recipe", "copy4", "--policy.path", str(directory)]
    assert train.main(arguments) == 2
    assert f"policy.path: {directory} has no" in capsys.readouterr().err
    assert train.main([*arguments, "--dry-run"]) == 0
    assert f"warning: policy.path: {directory} has no" in capsys.readouterr().err


def test_a_tokenizer_that_cannot_be_read_is_refused_by_its_file(tmp_path, capsys, started):
    directory = checkpoint(tmp_path / "model")
    (directory / "tokenizer.json").write_text("{}")
    assert train.main(["--recipe", "copy4", "--policy.path", str(directory)]) == 2 and not started
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{directory / 'tokenizer.json'}: not a file of the library `tokenizers`" in line


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_what_a_task_cannot_do_is_refused_by_a_run_and_by_a_dry_run(options, task, capsys, started):
    task.write_text(TASK.replace("lambda example, transcript: 0.0", "lambda example, transcript: 1 / 0"))
    assert train.main(["--recipe", f"{task}:recipe", *options]) == 2 and not started
    (line,) = capsys.readouterr().err.splitlines()
    assert "the policy says" in line and "ZeroDivisionError" in line and f"{task}:" in line


# --- starting --------------------------------------------------------------------------------------------------------


def test_a_real_run_gets_the_config_and_the_imports(task, started):
    assert train.main(["--recipe", f"{task}:recipe", "--seed", "4"]) == 0
    ((config, imports),) = started
    assert config.seed == 4 and imports == (str(task),)


def test_under_torchrun_with_one_process_the_run_starts_without_torchruns_variables(monkeypatch, started):
    for name in TORCHRUN_VARIABLES:
        monkeypatch.setenv(name, "1")
    assert train.main(["--recipe", "copy4"]) == 0
    assert len(started) == 1
    assert not set(TORCHRUN_VARIABLES) & set(train.os.environ)


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_several_processes_of_torchrun_are_refused_once(rank, lines, monkeypatch, capsys, started):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    assert train.main(["--recipe", "copy4"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == lines and all("several hosts are not supported yet" in line for line in said)
    assert started == []


# --- help ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["--recipe", "copy4", "--help"]], ids=" ".join)
def test_help_lists_every_setting_with_its_docstring(arguments, capsys):
    assert train.main(arguments) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for part in ("--dry_run", "--config", "--policy.tiny.head_dim", "--trainer.optimizer.lr", "OpenMP threads per"):
        assert part in text


def test_help_shows_the_values_of_the_recipe(capsys):
    assert train.main(["--recipe", "copy4", "--help"]) == 0
    assert "--environment.kwargs.digits" in capsys.readouterr().out


def test_recipes_lists_recipes_and_tasks_with_a_line_each(capsys):
    assert cli.main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in (*RECIPES, "copy", "alphabet_sort"):
        found = [line for line in lines if line.split()[:1] == [name]]
        assert len(found) == (2 if name in ("tool_sum", "tool_sum_openai") else 1)  # a recipe and its task
        assert all(len(line.split()) > 3 and len(line) <= 120 for line in found)


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
