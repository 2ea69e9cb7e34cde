"""What every rank of test_vllm_cuda does: an engine loop over vLLM that steps as on CUDA, at TP 1 or TP 2."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import cuda_on_cpu  # noqa: F401 (before vLLM)
import torch
from loop_harness import LONG_PROMPT, PROMPT, make_request
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor, interpreter_builder
from vllm.v1.worker.gpu.sample import sampler
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm_engine_scenario import config, drain, prompt_distribution, reference_distribution, reference_logprobs
from vllm_loop_scenario import BOUND, Loop, prefix_cache, several_swaps

from titan_rl.generation.vllm.engine import VllmEngine

ROWS, VOCAB = 2, 8192


def life(models: dict[str, str]) -> dict[str, Any]:
    """At TP 2 shorter: the digests of both ranks are compared all the same."""
    this = Loop(models)
    facts: dict[str, Any] = {}
    if os.environ["RANK"] == "0":
        this.pull_next("tied_a").result(timeout=BOUND)
        facts["served"] = this.serve(make_request("whole", new=10, seed=5), make_request("beside", new=6, seed=6))
        if os.environ["WORLD_SIZE"] == "1":
            so_far = facts["served"]["whole"].token_ids[:4].tolist()
            this.pull_next("tied_a").result(timeout=BOUND)  # no KV of the first is left
            facts["rest"] = this.serve(make_request("rest", prompt=[*PROMPT, *so_far], new=6, seed=5))["rest"]
            facts["cache"] = prefix_cache(this)
            facts["swaps"] = several_swaps(this)
    this.close()
    return facts | {"errors": this.collector.errors.qsize()}


class Traffic(TorchDispatchMode):
    """Counts the bytes that torch's operations and Triton's kernels read and write, while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.operations = 0
        load, store = interpreter_builder.create_masked_load, interpreter_builder.create_masked_store

        def loaded(pointers: Any, mask: Any, *rest: Any) -> Any:
            values = load(pointers, mask, *rest)
            self.bytes += int(mask.data.sum()) * values.data.itemsize
            return values

        def stored(pointers: Any, values: Any, mask: Any, *rest: Any) -> Any:
            self.bytes += int(mask.data.sum()) * values.data.itemsize
            return store(pointers, values, mask, *rest)

        interpreter_builder.create_masked_load, interpreter_builder.create_masked_store = loaded, stored
        self.in_kernel, launch = False, GridExecutor.__call__

        def launched(*arguments: Any, **options: Any) -> None:
            self.in_kernel = True  # what torch does now, the interpreter does
            launch(*arguments, **options)
            self.in_kernel = False

        GridExecutor.__call__ = launched  # type: ignore[method-assign]

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        self.operations += 1
        if "empty" not in str(function) and not self.in_kernel:
            self.bytes += sum(each.nbytes for each in (*arguments, result) if isinstance(each, torch.Tensor))
        return result


def per_element(dtype: torch.dtype) -> dict[str, float]:
    """Bytes per logit that vLLM's sampler moves for random rows at temperature 1."""
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = torch.arange(ROWS)
    traffic = Traffic()
    with traffic:
        drawn = gumbel_sample(logits, rows, torch.ones(ROWS), rows + 5, rows + 7, False, False)
        noise = traffic.bytes
        compute_topk_scores(logits, 0, drawn)
    return {"noise": noise / logits.numel(), "with logprobs": traffic.bytes / logits.numel()}


def rows_of_logprobs(model: Path, fixed: bool) -> set[tuple[torch.dtype, int]]:
    """Dtypes of the logits that logprobs are taken of, and the elements from one row to the next; with and without
    requests beside them that have their logits processed."""
    seen, compute = set(), sampler.compute_topk_scores

    def spied(logits: torch.Tensor, *rest: Any, **options: Any) -> Any:
        seen.add((logits.dtype, logits.stride(0)))
        return compute(logits, *rest, **options)

    sampler.compute_topk_scores = spied  # type: ignore[assignment]
    engine = VllmEngine(config(dtype="bfloat16", deterministic=fixed), model)
    plain = [make_request(f"plain{seed}", new=3, seed=seed) for seed in range(2)]
    for beside in ([], plain[1:], [make_request("hot", new=3, temperature=2.0)]):
        drain(engine, [plain[0], *beside])
    engine.close()
    return seen


def one_engine(model: Path) -> dict[str, Any]:
    engine = VllmEngine(config(), model)
    # Without top-k and top-p: the interpreter cannot run that kernel.
    requests = [
        make_request("greedy", new=8, temperature=0.0),
        make_request("hot", new=8, seed=1, temperature=2.0),
        make_request("cold", new=8, seed=2, temperature=0.3),
        make_request("repeated", new=8, seed=3, repetition_penalty=1.7, top_logprobs=3),
        make_request("counted", new=8, seed=4, temperature=0.7, presence_penalty=-1.5, frequency_penalty=0.9),
        make_request("kept-going", new=8, seed=5, stop_token_ids=(2, 3, 4, 5, 6), min_new_tokens=5),
    ]
    together = drain(engine, requests)
    engine.drop_cache()
    alone = drain(engine, requests[1:2])["hot"].token_ids.tolist()
    asked = [make_request(name, prompt=LONG_PROMPT, new=3, top_logprobs=4, prompt_logprobs=True) for name in "ab"]
    asked.append(make_request("one token", prompt=LONG_PROMPT[:1], new=1, prompt_logprobs=True))
    asked.append(make_request("no top", prompt=LONG_PROMPT, new=2, prompt_logprobs=True))
    scored = [drain(engine, [each])[each.request_id] for each in asked]
    engine.add(make_request("counts", new=3))
    ours, get_output = Traffic(), engine._client.get_output
    theirs = 0

    def counted() -> Any:
        nonlocal theirs
        before = ours.operations
        outputs = get_output()
        theirs += ours.operations - before
        return outputs

    engine._client.get_output = counted
    with ours:
        while engine.has_work():
            engine.step()
    engine.close()
    return {
        "runner": type(engine._scheduler).__name__,
        "convention": {
            each.request_id: (
                together[each.request_id].logprobs,
                reference_logprobs(model, each, together[each.request_id]).numpy(),
            )
            for each in requests
        },
        "top": (
            together["repeated"].top_logprobs,
            reference_distribution(model, requests[3], together["repeated"]).numpy(),
            [together[name].top_logprobs for name in ("hot", "greedy")],
        ),
        "scored": ([each.prompt_logprobs for each in scored], prompt_distribution(model, LONG_PROMPT).numpy()),
        "unasked_top": scored[-1].top_logprobs,
        "kept_going": together["kept-going"].token_ids.tolist(),
        "alone": (alone, together["hot"].token_ids.tolist()),
        "operations": (ours.operations - theirs, theirs),
        "traffic": {str(dtype): per_element(dtype) for dtype in (torch.bfloat16, torch.float32)},
    }
