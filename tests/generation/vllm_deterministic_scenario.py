"""What the ranks of test_vllm_deterministic do: the same requests in many ways with real engines. No tests in here."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from loop_harness import make_request

from titan_rl.generation.config import GeneratorConfig
from titan_rl.generation.vllm.engine import VllmEngine
from titan_rl.types import Completion, GenerationRequest

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
