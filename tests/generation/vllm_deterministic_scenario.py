"""What the ranks of test_vllm_deterministic do: the functions themselves, then the same requests in many ways with real
engines. No tests in here.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from loop_harness import make_request
from torch import Tensor
from torch.nn.functional import linear
from vllm import _custom_ops as ops
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import cpu_attn

from titan_rl.errors import ConfigError
from titan_rl.generation.config import GeneratorConfig
from titan_rl.generation.vllm.deterministic import (
    check_rows,
    halved_linear,
    one_token_each,
    row_linear,
)
from titan_rl.generation.vllm.engine import VllmEngine
from titan_rl.types import Completion, GenerationRequest

SHAPES = ((64, 64), (96, 192), (256, 64), (64, 512))
"""(N, K)."""
BATCHES = (*range(1, 50), 63, 64, 65, 100, 128, 129, 300)


def products(dtype: torch.dtype) -> dict[str, Any]:
    torch.manual_seed(0)
    sizes: set[int] = set()
    split, halves, error = True, True, 0.0
    for columns, inner in SHAPES:
        x, weight, bias = torch.randn(300, inner), torch.randn(columns, inner), torch.randn(columns)
        x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
        alone = torch.cat([row_linear(row[None], weight, bias) for row in x])
        for size in BATCHES:
            # the last rows, so that a row stands at every place of a batch
            same = torch.equal(row_linear(x[300 - size :], weight, bias), alone[300 - size :])
            sizes |= set() if same else {size}
        middle, half = columns // 2, inner // 2
        parts = [row_linear(x, weight[:middle], bias[:middle]), row_linear(x, weight[middle:], bias[middle:])]
        split &= torch.equal(torch.cat(parts, 1), alone)
        first = row_linear(x[:, :half].contiguous(), weight[:, :half].contiguous(), bias)
        second = row_linear(x[:, half:].contiguous(), weight[:, half:].contiguous(), None)
        halves &= torch.equal(halved_linear(x, weight, bias), first + second)
        true = linear(x.double(), weight.double(), bias.double())
        for found in (alone, halved_linear(x, weight, bias)):
            error = max(error, float((found.double() - true).abs().max() / true.abs().max()))
    return {"sizes that change rows": sorted(sizes), "split columns": split, "sum of halves": halves, "error": error}


def message(action: Any) -> str:
    try:
        action()
    except ConfigError as error:
        return str(error)
    return ""


def expanded() -> dict[str, Any]:
    """Three requests: 3 tokens that end at position 7, one at 3, two from the beginning."""
    starts = torch.tensor([0, 3, 4, 6], dtype=torch.int32)
    made = one_token_each(
        CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor([7, 3, 2], dtype=torch.int32),
            num_reqs=3,
            num_actual_tokens=6,
            max_query_len=3,
            max_seq_len=7,
            block_table_tensor=torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int32),
            slot_mapping=torch.arange(6),
        )
    )
    assert (made.num_reqs, made.max_query_len) == (6, 1)
    return {
        "query_start_loc": made.query_start_loc.tolist(),
        "seq_lens": made.seq_lens.tolist(),
        "block_table": made.block_table_tensor.tolist(),
    }


def queries_that_tiles_change(length: int = 1024, heads: int = 4, size: int = 128, block: int = 32) -> int:
    """Tokens of one prompt for which vLLM's attention kernel gives something else than token by token."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(length, heads, size) for _ in range(3))
    key_cache, value_cache = (torch.zeros(length // block, heads, block, size) for _ in range(2))
    isa = cpu_attn._get_attn_isa(torch.float32, block, size, "auto")
    ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, torch.arange(length), isa)

    def attend(starts: Tensor, seq_lens: Tensor) -> Tensor:
        count = len(seq_lens)
        metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=count,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=size,
            seq_lens=seq_lens,
            dtype=torch.float32,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=isa,
            enable_kv_split=False,
        )
        blocks = torch.arange(length // block, dtype=torch.int32).repeat(count, 1)
        output = torch.empty_like(query)
        ops.cpu_attention_with_kv_cache(
            query, key_cache, value_cache, output, starts, seq_lens, 0.1, True, None, -1, blocks, 0.0, metadata, None
        )
        return output

    whole = attend(torch.tensor([0, length], dtype=torch.int32), torch.tensor([length], dtype=torch.int32))
    one_by_one = attend(torch.arange(length + 1, dtype=torch.int32), torch.arange(1, length + 1, dtype=torch.int32))
    return int((whole != one_by_one).flatten(1).any(1).sum())


def of_functions() -> dict[str, Any]:
    layer = torch.nn.Linear(192, 64, bias=False)
    layer.cpu_linear = lambda x, weight, bias: linear(x, weight, bias) * len(x)
    return {
        "float32": products(torch.float32),
        "bfloat16": products(torch.bfloat16),
        "refused rows": message(lambda: check_rows(torch.nn.ModuleDict({"proj": layer}))),
        "expanded": expanded(),
        "queries that tiles change": queries_that_tiles_change(),
    }


LENGTH = 1536
"""Positions of the model: past the length from which a tile of keys no longer holds all of them."""
SYMBOLS = 11

Answer = tuple[list[int], bytes]
"""Token ids, and the logprobs bit for bit."""
Answers = dict[str, Answer]


def requests(count: int, *, longest: int, seed: int = 0) -> list[GenerationRequest]:
    """Prompts of random lengths, some of which begin alike, with every way of sampling."""
    rng = random.Random(seed)
    shared = [rng.randrange(2, 2 + SYMBOLS) for _ in range(longest)]
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 3},
        {"top_p": 0.8},
        {"repetition_penalty": 1.2, "min_new_tokens": 4, "stop_token_ids": (3, 4)},
        {"temperature": 1.5, "presence_penalty": 0.5, "stop_token_ids": (1,)},
    ]
    made = []
    for index in range(count):
        alike = rng.choice((0, 0, 40, longest - 1))
        own = [rng.randrange(2, 2 + SYMBOLS) for _ in range(rng.randint(1, longest - alike))]
        made.append(
            make_request(
                f"r{index}",
                prompt=shared[:alike] + own,
                new=rng.randint(6, 40),
                seed=1000 + index,
                **ways[index % len(ways)],
            )
        )
    return made


def config(**overrides: Any) -> GeneratorConfig:
    given = {"deterministic": True, "max_model_len": LENGTH, "max_num_seqs": 64, "kv_cache_bytes": 64 << 20}
    return GeneratorConfig(**{**given, **overrides})


def answer(completion: Completion) -> Answer:
    return completion.token_ids.tolist(), completion.logprobs.tobytes()


def answers(
    engine: VllmEngine, todo: Iterable[GenerationRequest], *, before_step: Callable[[int], None] = lambda step: None
) -> Answers:
    """All at once."""
    for request in todo:
        engine.validate(request)
        engine.add(request)
    done: Answers = {}
    step = 0
    while engine.has_work():
        before_step(step)
        done |= {each.request_id: answer(each) for each in engine.step().finished}
        step += 1
    return done


def one_by_one(engine: VllmEngine, todo: Iterable[GenerationRequest]) -> Answers:
    done: Answers = {}
    for request in todo:
        done |= answers(engine, [request])
        engine.drop_cache()
    return done


def trickling(engine: VllmEngine, todo: Sequence[GenerationRequest]) -> Answers:
    """In random groups, while earlier ones still run."""
    rng = random.Random(1)
    waiting = list(todo)
    rng.shuffle(waiting)
    done: Answers = {}
    while waiting or engine.has_work():
        for _ in range(min(len(waiting), rng.choice((0, 0, 1, 3)))):
            engine.add(waiting.pop())
        done |= {each.request_id: answer(each) for each in engine.step().finished}
    return done


def preempted(engine: VllmEngine, todo: Iterable[GenerationRequest]) -> Answers:
    """All KV is dropped now and then, so that running requests compute their own tokens as a prompt."""
    return answers(engine, todo, before_step=lambda step: engine.drop_cache() if step % 7 == 5 else None)


def resumed(engine: VllmEngine, todo: Iterable[GenerationRequest]) -> Answers:
    """Each request in two parts, the first of which is part of the second's prompt. Without those whose penalty counts
    completions only: it begins anew."""
    rng = random.Random(2)
    todo = {each.request_id: each for each in todo if not each.sampling.presence_penalty}
    cuts = {name: rng.randrange(1, each.sampling.max_new_tokens) for name, each in todo.items()}
    done = answers(engine, [_part(todo[name], (), cut) for name, cut in cuts.items()])
    rest = [
        _part(todo[name], tokens, todo[name].sampling.max_new_tokens - cuts[name])
        for name, (tokens, _) in done.items()
        if len(tokens) == cuts[name] and tokens[-1] not in todo[name].sampling.stop_token_ids
    ]
    engine.drop_cache()
    for name, (tokens, logprobs) in answers(engine, rest).items():
        done[name] = (done[name][0] + tokens, done[name][1] + logprobs)
    return done


def _part(request: GenerationRequest, before: Sequence[int], new: int) -> GenerationRequest:
    prompt = np.array([*request.prompt_token_ids.tolist(), *before], np.int32)
    least = min(max(0, request.sampling.min_new_tokens - len(before)), new)
    sampling = dataclasses.replace(request.sampling, max_new_tokens=new, min_new_tokens=least)
    return dataclasses.replace(request, prompt_token_ids=prompt, sampling=sampling)


def in_all_orders(model: str, overrides: dict[str, Any], *, longest: int, count: int) -> dict[str, Answers]:
    """One engine: alone, together, again with what its cache then holds, backwards, trickling, preempted, resumed."""
    todo = requests(count, longest=longest)
    engine = VllmEngine(config(**overrides), model)
    found = {
        "alone": one_by_one(engine, todo),
        "together": answers(engine, todo),
        "again, from its cache": answers(engine, todo),
    }
    engine.drop_cache()
    found["backwards"] = answers(engine, todo[::-1])
    engine.drop_cache()
    found["trickling"] = trickling(engine, todo)
    engine.drop_cache()
    found["preempted"] = preempted(engine, todo)
    engine.drop_cache()
    found["in two parts"] = resumed(engine, todo)
    engine.close()
    return found


def together(model: str, overrides: dict[str, Any], *, longest: int, count: int) -> dict[str, Answers]:
    """One engine, all at once, and again with what its cache then holds."""
    todo = requests(count, longest=longest)
    engine = VllmEngine(config(**overrides), model)
    found = {"together": answers(engine, todo), "again, from its cache": answers(engine, todo)}
    engine.close()
    return found


def cells(model: str, cells: dict[str, dict[str, Any]], longest: int, count: int) -> dict[str, Any]:
    """Answers by cell; a cell named "orders…" runs in all orders, others all at once."""
    found: dict[str, Any] = {}
    for name, overrides in cells.items():
        run = in_all_orders if name.startswith("orders") else together
        found[name] = run(model, overrides, longest=longest, count=count)
    return found


def one_cell(**arguments: Any) -> dict[str, Any]:
    """`cells`, and what needs the libraries but no engine."""
    return cells(**arguments) | of_functions()
