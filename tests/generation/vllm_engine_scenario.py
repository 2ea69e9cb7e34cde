"""What the one process of test_vllm_engine does with real engines. It returns facts; the tests judge them."""

from __future__ import annotations

import copy
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llvmlite.binding  # noqa: F401 (under numba; vLLM's search for kernels stumbles over it)
import numpy as np
import torch
import torch.distributed as dist
from loop_harness import LONG_PROMPT, PROMPT, SWAPS, SWAPS_OF_CI, make_request
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from vllm import SamplingParams as VllmSamplingParams
from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.triton_utils.dispatcher import _rebind_kernels
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from titan_rl.errors import TitanError
from titan_rl.generation.config import GeneratorConfig
from titan_rl.generation.vllm.cuda import Sampled
from titan_rl.generation.vllm.engine import VllmEngine
from titan_rl.generation.vllm.steps import DecodePlan
from titan_rl.types import Completion, GenerationRequest, PolicyVersion
from titan_rl.weights.fingerprint import BITS
from titan_rl.weights.manifest import EMBEDDING, LM_HEAD, PANELS, TIED, TensorShard
from titan_rl.weights.publisher import SharedMemoryPublisher
from titan_rl.weights.puller import SharedMemoryReader, verify
from titan_rl.weights.ranks import Ranks


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
        before = sum(len(each.tokens) for each in engine._running.values())
        output = engine.step()
        done |= {completion.request_id: completion for completion in output.finished}
        after = sum(len(each.tokens) for each in engine._running.values())
        after += sum(len(each.token_ids) for each in output.finished)
        assert len(output.sampled) == after - before, "every token goes into the digest"
    return done


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
    requests = [
        make_request("greedy", new=24, temperature=0.0),
        make_request("long", prompt=LONG_PROMPT, new=20, temperature=0.0),
        *(make_request(f"seeded{index}", new=24, seed=100 + index) for index in range(4)),
    ]
    completions = drain(engine, requests)
    return {
        "tokens": {name: each.token_ids.tolist() for name, each in completions.items()},
        "logprobs": {name: each.logprobs.tolist() for name, each in completions.items()},
        "prompt": [prompt_logprobs(engine, LONG_PROMPT), prompt_logprobs(engine, PROMPT)],
    }


def served(engine: VllmEngine) -> dict[str, torch.Tensor]:
    """Whole tensors, from one rank that holds everything."""
    whole: dict[str, torch.Tensor] = {}
    elements: Counter[str] = Counter()
    for shard in engine.served_shards():
        assert shard.counted
        elements[shard.name] += shard.data.numel()
        tensor = whole.setdefault(shard.name, torch.empty(shard.global_shape, dtype=shard.data.dtype))
        tensor[shard.slices] = shard.data.reshape(shard.shape)
    assert elements == {name: tensor.numel() for name, tensor in whole.items()}
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
    for step in (1, 2):  # the first load is vLLM's
        engine.load_weights(tensors.items(), PolicyVersion(0, step))
    engine.drop_cache()
    swapped = scores(engine)
    facts = {"before": first, "swapped": swapped, "wrong_after_load": disagreements(engine, tensors)}
    facts |= faults(engine, tensors)
    engine.close()
    engine = VllmEngine(config(dtype=dtype, linear=linear), after)
    facts["fresh"] = scores(engine)
    engine.close()
    return facts


def faults(engine: VllmEngine, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Damage each shard that a real pull has loaded, and look whether verification and the engine see it."""
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    group = dist.new_group(backend="gloo") if ranks > 1 else None
    random = torch.Generator().manual_seed(1)
    old = {name: torch.randn(each.shape, generator=random).to(each.dtype) for name, each in tensors.items()}
    new = {name: each + old[name] / 8 if each.ndim == 1 else each for name, each in tensors.items()}  # norms are ones
    tied = TIED if LM_HEAD not in new else ()
    with tempfile.TemporaryDirectory() as directory:
        publisher = SharedMemoryPublisher(channel="faults", rank=0, group=None, max_live=2, directory=Path(directory))
        publications = [
            publisher.publish(
                PolicyVersion(1, step),
                [TensorShard.whole(name, each) for name, each in weights.items()],
                dtype=next(iter(weights.values())).dtype,
                aliases=tied,
            )
            for step, weights in enumerate((old, new))
        ]
        reader = SharedMemoryReader()
        for publication in publications:
            engine.load_weights(reader.tensors(publication), publication.version)

        def refused() -> str:
            try:
                verify(publications[1], engine.served_shards(), group)
            except TitanError as error:
                return str(error)
            return ""

        def damage(shard: TensorShard, fault: str) -> None:
            data, bits = shard.data, shard.data.view(BITS[shard.data.dtype])
            if fault == "one bit":
                bits[(-1,) * bits.dim()] ^= 1
            elif fault == "exchanged":  # rows, or elements of a vector
                rows = bits[0] if bits.dim() == PANELS else bits
                other = next(at for at, each in enumerate(rows) if not torch.equal(each, rows[-1]))
                rows[[other, -1]] = rows[[-1, other]]
            elif fault == "stale":
                name = EMBEDDING if shard.name == LM_HEAD and tied else shard.name
                data.copy_(old[name][shard.slices].reshape(data.shape))
            else:
                data.neg_()

        right, unseen, unused = refused(), [], []
        expected = prompt_logprobs(engine, PROMPT)
        shards = list(engine.served_shards())
        names = Ranks(group).gather([shard.name for shard in shards])[-1]  # the last rank's memory is damaged
        for index, name in enumerate(names):
            for fault in ("one bit", "exchanged", "stale", "negative"):
                saved = shards[index].data.clone() if rank == ranks - 1 else None
                if saved is not None:
                    damage(shards[index], fault)
                if f"{name} is not what was published" not in refused():
                    unseen.append((name, index, fault))
                if fault == "negative":
                    engine.drop_cache()
                    if prompt_logprobs(engine, PROMPT) == expected:
                        unused.append(name)
                if saved is not None:
                    shards[index].data.copy_(saved)
        publisher.close()
        left = refused()
    return {"refused_without_fault": right + left, "unseen_faults": unseen, "not_computed_with": unused}


def reference_logprobs(model: Path, request: GenerationRequest, completion: Completion) -> torch.Tensor:
    """Of the sampled tokens, as `reference_distribution`."""
    tokens = torch.from_numpy(completion.token_ids).long()
    return reference_distribution(model, request, completion).gather(1, tokens[:, None])[:, 0]


def reference_distribution(model: Path, request: GenerationRequest, completion: Completion) -> torch.Tensor:
    """[T, V] logprobs by transformers, after penalties, temperature and top-k, over what was possible by the
    completion's word."""
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
    if completion.supports is not None:
        rows, vocab = (slice(0, size) for size in logits.shape)
        logits = logits.masked_fill(torch.from_numpy(completion.supports.impossible(rows, vocab)), -torch.inf)
    return logits.log_softmax(-1)


def probabilities(model: Path, request: GenerationRequest, completion: Completion) -> np.ndarray:
    """[T, V] by transformers, after temperature only."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    tokens = torch.from_numpy(np.concatenate([request.prompt_token_ids, completion.token_ids])).long()
    with torch.no_grad():
        logits = policy(tokens[None]).logits[0, len(request.prompt_token_ids) - 1 : -1]
    return (logits / request.sampling.temperature).softmax(-1).numpy()


def prompt_distribution(model: Path, prompt: Sequence[int]) -> torch.Tensor:
    """[T - 1, V] logprobs by transformers, as they are."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return policy(torch.tensor(prompt)[None]).logits[0, :-1].log_softmax(-1)


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

    norms = [module for module in engine.model.modules() if isinstance(module, RMSNorm)]
    facts["norms"] = {norm._forward_method.__func__.__name__ for norm in norms}

    facts["one"] = drain(engine, [make_request("one", new=2)])["one"]

    conventions = [
        make_request("hot", new=24, seed=1, temperature=2.0),
        make_request("cold", new=24, seed=2, temperature=0.3),
        make_request("top3", new=24, seed=3, top_k=3, top_logprobs=5),
        make_request("greedy", new=24, temperature=0.0, top_logprobs=5),
        make_request("repeated", new=24, seed=4, repetition_penalty=1.7, top_logprobs=5),
        make_request("counted", new=24, seed=5, temperature=0.7, presence_penalty=-1.5, frequency_penalty=0.9),
        make_request("kept-going", new=24, seed=6, stop_token_ids=tuple(range(2, 13)), min_new_tokens=9),
        make_request("nucleus", new=24, seed=7, temperature=2.0, top_p=0.8, top_k=9, support=True, top_logprobs=5),
        make_request("likely", new=24, seed=8, temperature=2.0, min_p=0.2, support=True),
        make_request("late", new=9, seed=6, stop_token_ids=tuple(range(2, 13)), min_new_tokens=9, support=True),
        make_request("unasked", new=24, seed=7, temperature=2.0, top_p=0.8, top_k=9),
        make_request("all", new=4, top_logprobs=20),
    ]
    completions = drain(engine, conventions)
    facts["convention"] = {
        request.request_id: (
            completions[request.request_id].logprobs,
            reference_logprobs(model, request, completions[request.request_id]).numpy(),
        )
        for request in conventions
    }

    for name in ("nucleus", "likely", "late"):
        asked, completion = next(each for each in conventions if each.request_id == name), completions[name]
        impossible = completion.supports.impossible(slice(0, len(completion.token_ids)), slice(0, 13))
        facts[name] = ~impossible, probabilities(model, asked, completion), completion.token_ids
    facts["unasked"] = completions["unasked"].supports, completions["unasked"].token_ids

    facts["top"] = {name: completions[name].top_logprobs for name in ("unasked", "all")}
    facts["tokens"] = {name: each.token_ids for name, each in completions.items()}
    for request in conventions:
        if request.sampling.top_logprobs == 5:
            done = completions[request.request_id]
            reference = reference_distribution(model, request, done).numpy()
            facts["top"][request.request_id] = done.top_logprobs, reference, done.logprobs

    before = make_request("before", prompt=(*LONG_PROMPT[:-2], 2), new=2)
    hot = {"temperature": 2.0, "repetition_penalty": 1.7, "top_k": 3, "top_logprobs": 4, "prompt_logprobs": True}
    scored = [make_request("scored", prompt=LONG_PROMPT, new=8, seed=3, **hot), make_request("beside", new=8)]
    scored.append(make_request("one token", prompt=LONG_PROMPT[:1], new=1, prompt_logprobs=True))
    drain(engine, [before])
    told = drain(engine, scored)
    unasked = make_request("unscored", prompt=LONG_PROMPT, new=8, seed=3, **hot | {"prompt_logprobs": False})
    facts["scored"] = {
        "prompt": {name: each.prompt_logprobs for name, each in told.items()},
        "reference": prompt_distribution(model, LONG_PROMPT).numpy(),
        "cached": told["scored"].metrics["generation/cached_tokens"],
        "tokens": [each.token_ids.tolist() for each in (told["scored"], drain(engine, [unasked])["unscored"])],
    }

    kept_going = completions["kept-going"]
    facts["kept_going"] = kept_going.token_ids.tolist(), kept_going.finish_reason

    for name in ("dropped", "preempted"):
        engine.add(make_request(name, new=8))
        engine.step()
        if name == "dropped":
            engine.drop_cache()
        else:  # as vLLM does where the cache is full
            engine.llm_engine.engine_core.reset_prefix_cache(reset_running_requests=True)
    facts["preemptions"] = {
        name: each.metrics.get("generation/preemptions") for name, each in drain(engine, []).items()
    }

    facts["slept"] = engine.sleep()
    engine.wake()

    # A head that no longer shares the embedding's memory, so that vLLM's loader does not reach it.
    tensors = tensors_of(other)
    tie = engine.model.lm_head.weight
    engine.model.lm_head.weight = torch.nn.Parameter(tie.clone(), requires_grad=False)
    facts["untied_head"] = load_error(engine, tensors)
    engine.model.lm_head.weight = tie
    assert load_error(engine, tensors) == ""
    engine.model.lm_head.cpu_linear = lambda x, weight, bias: x
    try:
        served(engine)
    except TitanError as error:
        facts["hidden_copy"] = str(error)
    engine.close()
    return facts


def skipped_tensor(model: Path, other: Path) -> dict[str, Any]:
    """Untied: loads that leave out one tensor each."""
    engine = VllmEngine(config(linear="plain"), model)
    tensors = tensors_of(other)
    facts: dict[str, Any] = {}
    for name in ("lm_head.weight", "model.layers.1.self_attn.k_proj.weight"):
        engine.load_weights(tensors_of(model).items(), PolicyVersion(0, 0))
        engine.load_weights([(each, tensor) for each, tensor in tensors.items() if each != name], PolicyVersion(0, 1))
        facts[name] = disagreements(engine, tensors)
    engine.close()
    return facts


def load_error(engine: VllmEngine, tensors: dict[str, torch.Tensor]) -> str:
    try:
        engine.load_weights(tensors.items(), PolicyVersion(0, 1))
    except TitanError as error:
        return str(error)
    return ""


def faults_of_two_ranks(model: Path, other: Path) -> dict[str, Any]:
    engine = VllmEngine(config(tensor_parallel=2, linear="packed"), model)
    try:
        return faults(engine, tensors_of(other))
    finally:
        engine.close()


WAYS_OF_SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"stop_token_ids": (9,)},
    {"temperature": 0.7, "top_k": 3, "support": True},
    {"temperature": 1.3, "top_p": 0.8, "stop_token_ids": (4, 5), "support": True},
    {"repetition_penalty": 1.3, "temperature": 0.0},
    {"presence_penalty": 0.5, "frequency_penalty": -0.4, "top_k": 5, "top_p": 0.9},
    {"stop_token_ids": (2, 3, 4, 5, 6), "min_new_tokens": 3, "frequency_penalty": 0.3, "support": True},
)


def state(engine: VllmEngine) -> dict[str, Any]:
    """What vLLM's scheduler and model runner keep from one step to the next."""
    core = engine.llm_engine.engine_core.engine_core
    scheduler, runner = core.scheduler, core.model_executor.driver_worker.model_runner
    cache, batch = scheduler.kv_cache_manager, runner.input_batch
    rows = range(batch.num_reqs)
    table = batch.block_table[0]
    return {
        "queues": [[each.request_id for each in queue] for queue in (scheduler.running, scheduler.waiting)],
        "step": scheduler.current_step,
        "last": [set(scheduler.finished_req_ids), set(scheduler.prev_step_scheduled_req_ids)],
        "requests": {
            name: (each.status, each.num_computed_tokens, each.num_in_flight_tokens, list(each.all_token_ids))
            for name, each in scheduler.requests.items()
        },
        "hashes": {name: list(each.block_hashes) for name, each in scheduler.requests.items()},
        "blocks": {name: cache.get_block_ids(name) for name in scheduler.requests},
        "free": [each.block_id for each in cache.block_pool.free_block_queue.get_all_free_blocks()],
        "rows": list(batch.req_ids),
        "tokens": [batch.token_ids_cpu[row, : batch.num_tokens_no_spec[row]].tolist() for row in rows],
        "known": [batch.is_token_ids[row, : batch.num_tokens_no_spec[row]].all() for row in rows],
        "computed": batch.num_computed_tokens_cpu[: batch.num_reqs].tolist(),
        "tables": [table.block_table.np[row, : table.num_blocks_per_row[row]].tolist() for row in rows],
        "cached": {
            name: (each.num_computed_tokens, list(each.output_token_ids), [list(ids) for ids in each.block_ids])
            for name, each in runner.requests.items()
        },
    }


def essence(completion: Completion) -> tuple[Any, ...]:
    numbers = [completion.metrics[name] for name in ("generation/prompt_tokens", "generation/cached_tokens")]
    preemptions = completion.metrics.get("generation/preemptions")
    return (
        completion.token_ids.tolist(),
        completion.logprobs.tolist(),
        completion.versions.tolist(),
        completion.finish_reason,
        numbers,
        preemptions,
        completion.supports and (completion.supports.sizes.tolist(), completion.supports.values.tolist()),
    )


def mixed_life(model: Path, other: Path, *, ours: float) -> dict[str, Any]:
    """Requests of all kinds in a cache that is too small for them, with arrivals, aborts, a dropped cache and new
    weights.

    Args:
        ours: share of the steps that need not be taken as vLLM does.
    """
    ranks = int(os.environ["WORLD_SIZE"])
    small = {"max_num_seqs": 9, "max_num_batched_tokens": 128, "kv_cache_bytes": 6 * (32 << 10) // ranks}
    engine = VllmEngine(config(tensor_parallel=ranks, **small), model)
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    short, is_ours = [0, 0, 0], True
    states: list[dict[str, Any]] = []
    plan_decode = scheduler.plan_decode

    def counted() -> DecodePlan | None:
        plan = plan_decode() if is_ours else None
        if plan is not None:
            short[:] = short[0] + 1, short[1] + (plan.change is not None), short[2] + bool(plan.new_blocks)
        return plan

    def stock_collect(planned: SchedulerOutput, output: ModelRunnerOutput) -> Sampled:
        requests = dict(scheduler.requests)
        taken = scheduler.update_from_output(planned, output)
        outputs = taken[0].outputs if taken else []
        return Sampled(
            [requests[each.request_id] for each in outputs],
            [each.new_token_ids[0] for each in outputs],
            [float(each.new_logprobs.logprobs[0, 0]) for each in outputs],
            [requests[each.request_id] for each in outputs if each.finish_reason is not None],
        )

    scheduler.plan_decode = counted
    if not ours:
        scheduler.collect = stock_collect
    todo = [
        make_request(
            f"r{index}",
            prompt=LONG_PROMPT[: 3 + index * 5 % 38],
            new=max(1 + index * 7 % 24, 3 if index % 8 == 7 else 1),
            seed=index,
            **WAYS_OF_SAMPLING[index % len(WAYS_OF_SAMPLING)],
        )
        for index in range(40)
    ]
    shared = engine._params(todo[0].sampling)
    at_first = copy.deepcopy(shared)
    completions: dict[str, Completion] = {}
    for step in range(300):
        arriving = todo[: 5 if step % 14 == 0 else 0]
        for request in arriving:
            engine.add(request)
        del todo[: len(arriving)]
        completions |= {each.request_id: each for each in engine.abort([f"r{step // 3}"] if step % 11 == 0 else [])}
        if step == 20:
            engine.drop_cache()
        if step == 27:
            engine.load_weights(tensors_of(other).items(), PolicyVersion(0, 1))
        if engine.has_work():
            is_ours = step * ours % 1 < ours
            output = engine.step()
            completions |= {each.request_id: each for each in output.finished}
            states.append(state(engine) | {"sampled": output.sampled.tolist()})
    assert not todo and not engine.running()
    assert engine._params(make_request("", new=1).sampling) is shared
    engine.close()
    ends = {name: essence(each) for name, each in completions.items()}
    return {"states": states, "ends": ends, "short": short, "params_kept": shared == at_first}


def without_vllms_runner(model: Path, other: Path) -> dict[str, Any]:
    """What is different between our steps and completions and vLLM's own, and what the comparison covers."""
    lives = {ours: mixed_life(model, other, ours=ours) for ours in (1.0, 0.6, 0.0)}
    stock = lives[0.0]

    expected = stock["ends"]
    return {
        "steps": {ours: len(life["states"]) for ours, life in lives.items()},
        "different": [
            (ours, step, [name for name in pair[0] if pair[0][name] != pair[1][name]])
            for ours, life in lives.items()
            for step, pair in enumerate(zip(life["states"], stock["states"], strict=False))
            if pair[0] != pair[1]
        ],
        "different_ends": [
            (ours, name) for ours, life in lives.items() for name, end in life["ends"].items() if end != expected[name]
        ],
        "ended": {ours: len(life["ends"]) for ours, life in lives.items()},
        "reasons": {end[3] for end in expected.values()},
        "params_kept": all(life["params_kept"] for life in lives.values()),
        "short": {ours: life["short"] for ours, life in lives.items()},
        "from_cache": sum(end[4][1] > 0 for end in expected.values()),
        "preempted": sum(bool(end[5]) for end in expected.values()),
        "two_versions": sum(len(set(end[2])) > 1 for end in expected.values()),
    }


def everything(models: dict[str, str]) -> dict[str, Any]:
    paths = {name: Path(path) for name, path in models.items()}
    facts: dict[str, Any] = {"upstream": upstream()}
    facts["one_engine"] = one_engine(paths["tied_a"], paths["tied_b"])
    facts["skipped"] = skipped_tensor(paths["untied_a"], paths["untied_b"])
    facts["decode"] = without_vllms_runner(paths["tied_a"], paths["tied_b"])
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
