"""How engines step on CUDA. Contracts are held against vLLM's sources for CUDA, which builds for CPU have too; and its
model runner V2 runs here on a CPU, with its own kernels interpreted, in processes of their own (about 40 s).
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rank_processes import run_on_ranks
from vllm import EngineArgs
from vllm.config.vllm import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from titan_rl.config import PlacementConfig, RunConfig
from titan_rl.generation.config import GeneratorConfig, generator_environment
from titan_rl.generation.vllm import cuda as our_face
from titan_rl.generation.vllm import engine as our_engine
from titan_rl.generation.vllm.engine import engine_arguments
from titan_rl.hosts.facts import HostFacts
from titan_rl.supervision.placement import plan
from titan_rl.supervision.provisioner import _command

VLLM = Path(sys.modules["vllm"].__path__[0])
TOLERANCE = 2e-5
Facts = dict[str, Any]
ON_CUDA = ("vllm_cuda_scenario",)


def functions_of(*path: str) -> set[str]:
    tree = ast.parse(VLLM.joinpath(*path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def on_one_rank(scenario: str, **arguments: Any) -> Any:
    if current_platform.device_type != "cpu":
        pytest.skip("builds of vLLM for CUDA have no engine for CPUs")
    return run_on_ranks(f"vllm_cuda_scenario:{scenario}", 1, modules=ON_CUDA, **arguments)[0]


@pytest.fixture(scope="module")
def life(tiny_models: dict[str, str]) -> Facts:
    return on_one_rank("life", models=tiny_models)


@pytest.fixture(scope="module")
def engine(tiny_models: dict[str, str]) -> Facts:
    return on_one_rank("one_engine", model=Path(tiny_models["tied_a"]))


def test_a_completion_that_goes_on_elsewhere_meets_the_same_noise(life: Facts) -> None:
    whole, rest = life["served"]["whole"], life["rest"]
    assert rest.token_ids.tolist() == whole.token_ids[4:].tolist() and len(set(rest.token_ids.tolist())) > 1
    np.testing.assert_allclose(rest.logprobs, whole.logprobs[4:], atol=TOLERANCE)


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_batch_of_a_deterministic_engine_does_not_choose_how_logits_are_summed(
    tiny_models: dict[str, str], deterministic: bool
) -> None:
    """vLLM takes bfloat16 ones as they are where no request has them processed, and a single row in its padding."""
    settings = {"deterministic": deterministic, "fixed": deterministic}
    rows = on_one_rank("rows_of_logprobs", model=Path(tiny_models["tied_a"]), **settings)
    assert len(rows) == 1 if deterministic else len(rows) > 1


def test_every_token_is_what_its_version_gives_although_steps_overlap(life: Facts) -> None:
    """Weights change five times with a step under way."""
    assert len(life["swaps"]) == 3 and life["errors"] == 0
    for completion, tokens, logprobs in life["swaps"]:
        assert len(set(completion.versions.tolist())) == 5 and np.all(np.diff(completion.versions) >= 0)
        assert completion.token_ids.tolist() == tokens.tolist()
        np.testing.assert_allclose(completion.logprobs, logprobs, atol=TOLERANCE)


def test_what_a_pull_takes_is_counted(life: Facts) -> None:
    cache = life["cache"]
    assert (cache["before"], cache["after"], cache["preemptions"]) == ([0.0, 32.0], 0.0, 1)
    metrics = cache["through"][0].metrics
    old = int(np.argmax(np.diff(cache["through"][0].versions) > 0)) + 1
    assert metrics["generation/recomputed_tokens"] == 5 + old - 1, "prompt and answer, but for the last token's KV"
    assert "generation/preemptions" not in metrics, "the cache was not full"


def test_the_likeliest_tokens_are_told_to_who_asks_beside_others_that_do_not(engine: Facts) -> None:
    top, reference, others = engine["top"]
    assert others == [None, None]
    np.testing.assert_allclose(top["logprob"], -np.sort(-reference)[:, :3], atol=TOLERANCE)
    np.testing.assert_allclose(top["logprob"], np.take_along_axis(reference, top["token"], 1), atol=TOLERANCE)


@pytest.mark.parametrize("name", ["greedy", "hot", "cold", "repeated", "counted", "kept-going"])
def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(engine: Facts, name: str) -> None:
    sampled, reference = engine["convention"][name]
    np.testing.assert_allclose(sampled, reference, atol=TOLERANCE)


def test_the_tokens_of_a_prompt_have_their_logprobs_also_where_it_is_in_the_cache(engine: Facts) -> None:
    (cold, warm, one_token, no_top), reference = engine["scored"]
    for told in (cold, warm):
        assert told.shape == (39, 5)
        np.testing.assert_allclose(told["logprob"], np.take_along_axis(reference, told["token"], 1), atol=TOLERANCE)
        np.testing.assert_allclose(told["logprob"][:, 1:], -np.sort(-reference)[:, :4], atol=TOLERANCE)
    assert one_token is None, "nothing precedes it"
    np.testing.assert_array_equal(no_top, cold[:, :1])
    assert engine["unasked_top"] is None, "attempts of which one has none could not be joined"


def test_a_row_depends_on_its_own_request_alone(engine: Facts) -> None:
    assert engine["runner"] == "AsyncScheduler"
    alone, together = engine["alone"]
    assert alone == together
    assert not set(engine["kept_going"][:5]) & set(range(2, 7)), "no stop token comes before its time"


def test_nothing_of_ours_computes_between_logits_and_token(engine: Facts) -> None:
    """Once it was 316 bytes per logit on CUDA, in 24 operations."""
    of_ours, of_vllm = engine["operations"]
    assert of_ours == 0 and of_vllm > 100
    for dtype, size in (("torch.bfloat16", 2), ("torch.float32", 4)):
        assert size <= engine["traffic"][dtype]["noise"] < 1.1 * size, "vLLM's kernel reads each logit once"
    assert engine["traffic"]["torch.bfloat16"]["with logprobs"] < 12


def test_vllm_samples_with_its_runner_v2_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = generator_environment("cuda", tensor_parallel=4)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    supported: Any = SimpleNamespace(attention_config=SimpleNamespace(hisparse_config=None))
    assert VllmConfig.use_v2_model_runner.fget(supported)
    assert {"get_model", "sample_tokens"} <= functions_of("v1", "worker", "gpu", "model_runner.py")
    assert {"get_model", "sleep", "wake_up"} <= functions_of("v1", "worker", "gpu_worker.py")
    assert variables["VLLM_ALLREDUCE_USE_FLASHINFER"] == "0"


@pytest.mark.parametrize("module", [our_engine, our_face])
def test_no_private_name_of_vllm_is_used(module: ModuleType) -> None:
    tree = ast.parse(inspect.getsource(module))
    private = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr.startswith("_")]
    assert {ast.unparse(node.value) for node in private} <= {"self", "super()"}


@pytest.mark.parametrize(("ranks", "deterministic"), [(1, False), (1, True), (4, False)])
def test_vllm_takes_the_arguments_for_cuda(
    tiny_models: dict[str, str], ranks: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its platform for CPUs refuses sleep mode, and without a GPU none for CUDA is found."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # which it changes, and other tests in this process would find
    config = GeneratorConfig(tensor_parallel=ranks, dtype="bfloat16", deterministic=deterministic)
    arguments = EngineArgs(**engine_arguments(config, Path(tiny_models["tied_a"]), "cuda"))
    assert arguments.async_scheduling and not arguments.enable_sleep_mode
    if current_platform.device_type:
        found = arguments.create_engine_config()
        assert found.parallel_config.tensor_parallel_size == ranks
        assert found.cache_config.gpu_memory_utilization == config.gpu_memory_utilization
        assert found._get_v2_model_runner_unsupported_features() == []
        assert (found.attention_config.backend is AttentionBackendEnum.TRITON_ATTN) == deterministic
        if ranks > 2:
            assert found.compilation_config.pass_config.fuse_allreduce_rms is False, "it adds in any order"


def test_a_generator_that_shares_its_device_asks_for_no_share_of_what_is_free(tiny_models: dict[str, str]) -> None:
    config = GeneratorConfig(shares_device=True, kv_cache_bytes=3 << 20)
    arguments = engine_arguments(config, Path(tiny_models["tied_a"]), "cuda")
    assert arguments["kv_cache_memory_bytes"] == 3 << 20 and arguments["gpu_memory_utilization"] < 0.05


@pytest.mark.parametrize("ranks", [2, 4])
def test_vllms_all_reduce_finds_the_device_of_every_rank_from_every_rank(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """With one visible device per rank it fails: vLLM maps the ranks of the others too."""
    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", ModuleType("kernels, which only builds for CUDA have"))
    cuda = importlib.import_module("vllm.platforms.cuda").NonNvmlCudaPlatform
    config = RunConfig(generator=GeneratorConfig(tensor_parallel=ranks), placement=PlacementConfig(device="cuda"))
    placement = plan(config, HostFacts(cpus=8, cuda_devices=tuple(range(3, 4 + 2 * ranks))))
    host: Any = SimpleNamespace(logs="", scratch=Path("/scratch"), owner=1, name="host0", python="python", variables={})
    for mesh in (placement.meshes["generator0"], placement.meshes["generator1"]):
        for rank in range(ranks):
            environment = _command(mesh, "", host, 0, ranks, SimpleNamespace(rank=rank)).env
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", str(environment["CUDA_VISIBLE_DEVICES"]))
            assert environment["LOCAL_RANK"] == str(rank)
            assert tuple(map(cuda.device_id_to_physical_device_id, range(ranks))) == mesh.devices
            assert [*map(cuda.logical_device_id_to_visible_device_id, range(ranks))] == [*range(ranks)]
    trainer = _command(placement.meshes["trainer"], "", host, 0, 1, SimpleNamespace(rank=0)).env
    assert (trainer["CUDA_VISIBLE_DEVICES"], trainer["LOCAL_RANK"]) == ("3", "0")
