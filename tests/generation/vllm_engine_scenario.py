"""What the one process of test_vllm_engine does with real engines. It returns facts; the tests judge them."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llvmlite.binding  # noqa: F401 (under numba; vLLM's search for kernels stumbles over it)
import torch
from loop_harness import PROMPT, SWAPS, SWAPS_OF_CI, make_request
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from vllm import SamplingParams as VllmSamplingParams
from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.triton_utils.dispatcher import _rebind_kernels
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from titan_rl.errors import TitanError
from titan_rl.generation.config import GeneratorConfig
from titan_rl.generation.vllm.engine import VllmEngine
from titan_rl.generation.vllm.imports import LEFT_OUT
from titan_rl.generation.vllm.scheduler import Sampled
from titan_rl.types import Completion, GenerationRequest, PolicyVersion

LONG_PROMPT = tuple(2 + index * 7 % 11 for index in range(40))
"""Longer than a KV block, so that the prefix cache has something to keep."""
_linear_calls = 0


def counted_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A linear function of a user's own."""
    global _linear_calls
    _linear_calls += 1
    return torch.nn.functional.linear(x, weight, bias)


def config(**overrides: Any) -> GeneratorConfig:
    return GeneratorConfig(**{"max_model_len": 64, "max_num_seqs": 16, "kv_cache_bytes": 64 << 20, **overrides})


def tensors_of(model: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: tensor.to(dtype) for name, tensor in load_file(model / "model.safetensors").items()}


def drain(engine: VllmEngine, requests: Sequence[GenerationRequest]) -> dict[str, Completion]:
    for request in requests:
        engine.validate(request)
        engine.add(request)
    done: dict[str, Completion] = {}
    while engine.has_work():
        done |= {completion.request_id: completion for completion in engine.step().finished}
    return done


def standard_requests(suffix: str = "") -> list[GenerationRequest]:
    return [
        make_request(f"greedy{suffix}", new=24, temperature=0.0),
        make_request(f"long{suffix}", prompt=LONG_PROMPT, new=20, temperature=0.0),
        *(make_request(f"seeded{index}{suffix}", new=24, seed=100 + index) for index in range(4)),
    ]


def prompt_logprobs(engine: VllmEngine, prompt: Sequence[int]) -> list[float]:
    """Scored by vLLM itself."""
    llm = engine.llm_engine
    params = VllmSamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0, detokenize=False, ignore_eos=True)
    llm.add_request("score", {"prompt_token_ids": list(prompt)}, params)
    outputs = []
    while llm.has_unfinished_requests():
        outputs += llm.step()
    positions = outputs[-1].prompt_logprobs
    assert positions is not None and positions[0] is None
    return [next(iter(position.values())).logprob for position in positions[1:]]


def scores(engine: VllmEngine) -> dict[str, Any]:
    completions = drain(engine, standard_requests())
    return {
        "tokens": {name: each.token_ids.tolist() for name, each in completions.items()},
        "logprobs": {name: each.logprobs.tolist() for name, each in completions.items()},
        "prompt": [prompt_logprobs(engine, LONG_PROMPT), prompt_logprobs(engine, PROMPT)],
    }


def served(engine: VllmEngine) -> dict[str, torch.Tensor]:
    """Whole tensors, from one rank that holds everything."""
    whole = {}
    for shard in engine.served_shards():
        assert shard.name not in whole and shard.counted
        assert shard.global_shape == tuple(shard.data.shape) and set(shard.offset) == {0}
        whole[shard.name] = shard.data
    return whole


def disagreements(engine: VllmEngine, expected: dict[str, torch.Tensor]) -> list[str]:
    """Names whose served bytes are not the expected ones."""
    shown = served(engine)
    expected = {"lm_head.weight": expected["model.embed_tokens.weight"], **expected}
    assert shown.keys() == expected.keys(), shown.keys() ^ expected.keys()
    return sorted(name for name in expected if not torch.equal(shown[name], expected[name]))


def swap_equals_fresh(before: Path, after: Path, dtype: str, linear: str) -> dict[str, Any]:
    """Load new weights into an engine that has worked; build another one from the same weights."""
    tensors = tensors_of(after, getattr(torch, dtype))
    engine = VllmEngine(config(dtype=dtype, linear=linear), before)
    first = scores(engine)
    engine.load_weights(tensors.items(), PolicyVersion(0, 1))
    not_dropped = drain(engine, [make_request("stale", prompt=LONG_PROMPT, new=20, temperature=0.0)])["stale"]
    engine.drop_cache()
    swapped = scores(engine)
    facts = {"before": first, "swapped": swapped, "wrong_after_load": disagreements(engine, tensors)}
    facts["stale_logprobs"] = not_dropped.logprobs.tolist()
    engine.close()
    engine = VllmEngine(config(dtype=dtype, linear=linear), after)
    facts["fresh"] = scores(engine)
    engine.close()
    return facts


def reference_logprobs(model: Path, request: GenerationRequest, completion: Completion) -> torch.Tensor:
    """By transformers, after penalties, temperature and top-k."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    prompt = torch.from_numpy(request.prompt_token_ids).long()
    tokens = torch.from_numpy(completion.token_ids).long()
    with torch.no_grad():
        logits = policy(torch.cat([prompt, tokens])[None]).logits[0, len(prompt) - 1 : -1]
    for position in range(len(tokens)):
        logits[position] = penalised(logits[position], request, tokens[:position])
    if request.sampling.temperature > 0:
        logits = logits / request.sampling.temperature
    if request.sampling.top_k > 0:
        lowest = logits.topk(request.sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    return logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def penalised(logits: torch.Tensor, request: GenerationRequest, so_far: torch.Tensor) -> torch.Tensor:
    """As `SamplingParams` describes it. [V] -> [V]"""
    sampling = request.sampling
    seen = torch.cat([torch.from_numpy(request.prompt_token_ids).long(), so_far]).unique()
    repeated = torch.where(logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty)
    logits = logits.scatter(0, seen, repeated[seen])
    counts = torch.bincount(so_far, minlength=len(logits))
    logits = logits - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
    if len(so_far) < sampling.min_new_tokens:
        logits = logits.index_fill(0, torch.tensor(sampling.stop_token_ids), -torch.inf)
    return logits


def upstream() -> dict[str, Any]:
    """vLLM as it is, before any adaptation."""
    layer = torch.nn.Linear(64, 128, bias=False).requires_grad_(False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    os.environ.setdefault("VLLM_DIST_IDENT", "//")
    communicator = SimpleNamespace(unique_name="tp:0", ranks=[0, 1])
    try:
        _rebind_kernels([])
        stumbled = ""
    except AttributeError as error:
        stumbled = str(error)
    return {
        "kernel_search_stumbled_over": stumbled,
        "weight_left_after_packing": layer.weight.numel(),
        "group_name": _CPUSHMDistributed.make_group_name(communicator),
    }


def one_engine(model: Path, other: Path) -> dict[str, Any]:
    """Everything that needs no second engine."""
    engine = VllmEngine(config(), model)
    facts: dict[str, Any] = {"identity": os.environ["VLLM_DIST_IDENT"]}
    communicator = SimpleNamespace(unique_name="tp:0", ranks=[0, 1])
    facts["adapted_group_name"] = _CPUSHMDistributed.make_group_name(communicator)

    together = drain(engine, standard_requests())
    alone: dict[str, Completion] = {}
    for request in standard_requests("-alone"):
        alone |= drain(engine, [request])
    facts["together"], facts["alone"] = together, alone

    conventions = [
        make_request("hot", new=24, seed=1, temperature=2.0),
        make_request("cold", new=24, seed=2, temperature=0.3),
        make_request("top3", new=24, seed=3, top_k=3),
        make_request("greedy", new=24, temperature=0.0),
        make_request("repeated", new=24, seed=4, repetition_penalty=1.7),
        make_request("counted", new=24, seed=5, temperature=0.7, presence_penalty=-1.5, frequency_penalty=0.9),
        make_request("kept-going", new=24, seed=6, stop_token_ids=tuple(range(2, 13)), min_new_tokens=9),
    ]
    completions = drain(engine, conventions)
    facts["convention"] = {
        request.request_id: (
            completions[request.request_id].logprobs,
            reference_logprobs(model, request, completions[request.request_id]).numpy(),
        )
        for request in conventions
    }

    kept_going = completions["kept-going"]
    facts["kept_going"] = kept_going.token_ids.tolist(), kept_going.finish_reason

    stop = int(together["seeded0"].token_ids[10])
    facts["stop_token"] = stop
    facts["stopped"] = drain(engine, [make_request("s", new=24, seed=100, stop_token_ids=(stop,))])["s"]

    engine.drop_cache()
    cold = drain(engine, [make_request("cold", prompt=LONG_PROMPT, new=2)])["cold"]
    warm = drain(engine, [make_request("warm", prompt=LONG_PROMPT, new=2)])["warm"]
    engine.drop_cache()
    dropped = drain(engine, [make_request("dropped", prompt=LONG_PROMPT, new=2)])["dropped"]
    facts["cached"] = [each.metrics["cached_tokens"] for each in (cold, warm, dropped)]
    facts["metrics"] = warm.metrics
    for name in ("dropped", "preempted"):
        engine.add(make_request(name, new=8))
        engine.step()
        if name == "dropped":
            engine.drop_cache()
        else:  # as vLLM does where the cache is full
            engine.llm_engine.engine_core.reset_prefix_cache(reset_running_requests=True)
    facts["preemptions"] = {name: each.metrics.get("preemptions") for name, each in drain(engine, []).items()}

    for name in ("kept", "aborted"):
        engine.add(make_request(name, new=24, seed=100))
    for _ in range(7):
        engine.step()
    facts["aborted"] = engine.abort(["aborted", "unknown"])
    engine.drop_cache()  # the one that stays recomputes its KV
    facts["kept"] = drain(engine, [])["kept"]
    facts["after_abort"] = drain(engine, [make_request("again", new=24, seed=100)])["again"]
    facts["slept"] = engine.sleep()
    engine.wake()

    # A head that no longer shares the embedding's memory, and a load that leaves it out.
    tensors = tensors_of(other)
    engine.model.lm_head.weight = torch.nn.Parameter(engine.model.lm_head.weight.clone(), requires_grad=False)
    engine.load_weights(tensors.items(), PolicyVersion(0, 1))
    facts["stale_head"] = disagreements(engine, tensors)
    engine.model.lm_head.cpu_linear = lambda x, weight, bias: x
    try:
        served(engine)
    except TitanError as error:
        facts["hidden_copy"] = str(error)
    engine.close()
    return facts


def skipped_tensor(model: Path, other: Path) -> dict[str, Any]:
    """Untied: loads that leave out one tensor each."""
    engine = VllmEngine(config(linear="vllm_engine_scenario:counted_linear", max_num_batched_tokens=64), model)
    tensors = tensors_of(other)
    facts: dict[str, Any] = {}
    for name in ("lm_head.weight", "model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight"):
        engine.load_weights(tensors_of(model).items(), PolicyVersion(0, 0))
        engine.load_weights([(each, tensor) for each, tensor in tensors.items() if each != name], PolicyVersion(0, 1))
        facts[name] = disagreements(engine, tensors)
    # More prompt tokens than one step may prefill, every request seeded.
    crowd = [make_request(f"r{index}", prompt=LONG_PROMPT[index:], new=4, seed=index) for index in range(10)]
    facts["crowd"] = sorted(drain(engine, crowd))
    facts["linear_calls"] = _linear_calls
    engine.close()
    return facts


def stale_copy(model: Path, other: Path) -> str:
    """New weights that did not reach a packed copy."""
    engine = VllmEngine(config(linear="packed"), model)
    head = engine.model.lm_head
    old = head.cpu_linear
    engine.load_weights(tensors_of(other).items(), PolicyVersion(0, 1))
    head.cpu_linear = old
    try:
        served(engine)
    except TitanError as error:
        return str(error)
    finally:
        engine.close()
    return ""


def mixed_life(model: Path, *, stock: bool) -> dict[str, Any]:
    """Requests of all lengths in a cache that is too small for them, with arrivals, aborts and a dropped cache.

    Args:
        stock: plan and take in as vLLM does.
    """
    engine = VllmEngine(config(max_num_seqs=9, max_num_batched_tokens=128, kv_cache_bytes=6 * (32 << 10)), model)
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    plans: list[SchedulerOutput] = []
    short = 0
    plan, plan_decode = scheduler.schedule if stock else scheduler.plan, scheduler._plan_decode

    def counted() -> SchedulerOutput | None:
        nonlocal short
        decode = plan_decode()
        short += decode is not None
        return decode

    def recorded() -> SchedulerOutput:
        planned = plan()
        plans.append(copy.deepcopy(planned))
        return planned

    def stock_take(planned: SchedulerOutput, output: ModelRunnerOutput) -> Sampled:
        requests = dict(scheduler.requests)
        taken = scheduler.update_from_output(planned, output)
        outputs = taken[0].outputs if taken else []
        for each in outputs:
            requests[each.request_id].prefill_stats = each.prefill_stats
        return Sampled(
            [requests[each.request_id] for each in outputs],
            [each.new_token_ids[0] for each in outputs],
            [float(each.new_logprobs.logprobs[0, 0]) for each in outputs],
            [requests[each.request_id] for each in outputs if each.finish_reason is not None],
        )

    scheduler.plan, scheduler._plan_decode = recorded, counted
    if stock:
        scheduler.take = stock_take
    todo = [
        make_request(
            f"r{index}",
            prompt=LONG_PROMPT[: 3 + index * 5 % 38],
            new=1 + index * 7 % 24,
            seed=index,
            stop_token_ids=() if index % 4 else (9,),
        )
        for index in range(40)
    ]
    shared = engine._params(todo[0].sampling)
    at_first = copy.deepcopy(shared)
    completions: dict[str, Completion] = {}
    for step in range(200):
        for request in todo[: 5 if step % 6 == 0 else 0]:
            engine.add(request)
        del todo[: 5 if step % 6 == 0 else 0]
        completions |= {each.request_id: each for each in engine.abort([f"r{step - 4}"] if step % 11 == 0 else [])}
        if step == 20:
            engine.drop_cache()
        if engine.has_work():
            completions |= {each.request_id: each for each in engine.step().finished}
    assert not todo and not engine.running()
    assert engine._params(make_request("", new=1, stop_token_ids=(9,)).sampling) is shared
    engine.close()
    return {"plans": plans, "completions": completions, "short": short, "params_kept": shared == at_first}


def planned(model: Path) -> dict[str, Any]:
    """What is different between our plans and completions and vLLM's own, and what the comparison covers."""
    ours, theirs = mixed_life(model, stock=False), mixed_life(model, stock=True)

    def essence(completion: Completion) -> tuple[Any, ...]:
        numbers = [completion.metrics[name] for name in ("prompt_tokens", "cached_tokens")]
        preemptions = completion.metrics.get("preemptions")
        return (
            completion.token_ids.tolist(),
            completion.logprobs.tolist(),
            completion.finish_reason,
            numbers,
            preemptions,
        )

    ends = [{name: essence(each) for name, each in life["completions"].items()} for life in (ours, theirs)]
    cached = [plan.scheduled_cached_reqs for plan in ours["plans"]]
    return {
        "steps": [len(ours["plans"]), len(theirs["plans"])],
        "different": [
            i for i, pair in enumerate(zip(ours["plans"], theirs["plans"], strict=False)) if pair[0] != pair[1]
        ],
        "different_ends": sorted(name for name in ends[1] if ends[0].get(name) != ends[1][name]),
        "ended": len(ends[0]),
        "reasons": {end[2] for end in ends[0].values()},
        "params_kept": ours["params_kept"],
        "short": [ours["short"], theirs["short"]],
        "new_blocks": sum(any(blocks for blocks in each.new_block_ids) for each in cached),
        "resumed": sum(len(each.resumed_req_ids) for each in cached),
        "from_cache": sum(end[3][1] > 0 for end in ends[0].values()),
        "preempted": sum(bool(end[4]) for end in ends[0].values()),
    }


def everything(models: dict[str, str]) -> dict[str, Any]:
    paths = {name: Path(path) for name, path in models.items()}
    facts: dict[str, Any] = {"upstream": upstream()}
    facts["one_engine"] = one_engine(paths["tied_a"], paths["tied_b"])
    facts["skipped"] = skipped_tensor(paths["untied_a"], paths["untied_b"])
    facts["stale_copy"] = stale_copy(paths["tied_a"], paths["tied_b"])
    facts["planned"] = planned(paths["tied_a"])
    facts["not_imported"] = [name for name in LEFT_OUT if name not in sys.modules]
    return facts | swaps(models, SWAPS_OF_CI)


def other_swaps(models: dict[str, str]) -> dict[str, Any]:
    return swaps(models, [swap for swap in SWAPS if swap not in SWAPS_OF_CI])


def swaps(models: dict[str, str], which: Iterable[tuple[str, str, str]]) -> dict[str, Any]:
    return {
        f"{tying}-{dtype}-{linear}": swap_equals_fresh(
            Path(models[f"{tying}_a"]), Path(models[f"{tying}_b"]), dtype, linear
        )
        for tying, dtype, linear in which
    }
