"""What every rank of test_constraints does: a policy that has learned nothing, made to call a tool."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

import numpy as np

from titan_rl.chat import make_renderer
from titan_rl.chat.renderer import AnswerForm
from titan_rl.errors import RequestError
from titan_rl.generation.config import GeneratorConfig
from titan_rl.generation.vllm.engine import VllmEngine
from titan_rl.types import Completion, FinishReason, GenerationRequest, Message, SamplingParams, ToolSpec

PARAMETERS = {
    "type": "object",
    "properties": {
        "place": {"enum": ["here", "there"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "why": {"type": "string", "maxLength": 8},
    },
    "required": ["place", "count", "why"],
    "additionalProperties": False,
}
TOOLS = (ToolSpec("look", "Looks.", PARAMETERS), ToolSpec("wait", "Waits.", {}))


def finish(engine: VllmEngine) -> dict[str, Completion]:
    done: dict[str, Completion] = {}
    while engine.has_work():
        done |= {each.request_id: each for each in engine.step().finished}
    return done


def everything(model: str, samples: int) -> dict[str, Any]:
    config = GeneratorConfig(
        max_model_len=1024, max_num_seqs=32, kv_cache_bytes=64 << 20, tensor_parallel=int(os.environ["WORLD_SIZE"])
    )
    engine, renderer = VllmEngine(config, model), make_renderer("auto", model, {"enable_thinking": False})
    prompt = np.array(renderer.render([Message("user", "where?")], TOOLS), np.int32)
    form = AnswerForm(schema=None, tools=TOOLS[:1], parallel=False, must_call=True)
    free = SamplingParams(max_new_tokens=120, stop_token_ids=renderer.stop_token_ids)
    forced = replace(free, constraint=renderer.constraint(form))

    def request(name: str, sampling: SamplingParams, number: int, **more: Any) -> GenerationRequest:
        asked = GenerationRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, seed=number)
        return replace(asked, **more)

    for number in range(samples):
        engine.add(request(f"forced {number}", forced, number))
        if number % 4 == 0:
            engine.add(request(f"free {number}", free, number))
    done = finish(engine)
    calls = [
        [call._asdict() for call in renderer.parse(each.token_ids.tolist(), each.finish_reason, (), TOOLS).tool_calls]
        for name, each in done.items()
        if name.startswith("forced")
    ]

    whole = done["forced 0"]
    cut = len(whole.token_ids) // 2
    engine.add(request("cut", forced, 0))
    for _ in range(cut):
        engine.step()
    (part,) = engine.abort(["cut"])
    rest = request(
        "rest",
        replace(forced, max_new_tokens=120 - len(part.token_ids)),
        0,
        prompt_token_ids=np.concatenate([prompt, part.token_ids]),
        sampled=len(part.token_ids),
    )
    engine.add(rest)
    goes_on = [*part.token_ids.tolist(), *finish(engine)["rest"].token_ids.tolist()]

    nothing = {"type": "json_schema", "json_schema": {"$ref": "#"}}  # no value is of this schema
    closed = json.dumps({"type": "structural_tag", "format": nothing})
    engine.add(request("closed", replace(free, constraint=closed, support=True), 0))
    ended = finish(engine)["closed"]

    refused = []
    odd = {"type": "json_schema", "json_schema": {"type": "integer", "multipleOf": 5}}
    cases = [("{", (1,)), (json.dumps({"type": "structural_tag", "format": {}}), (1,)), ("x", ()), ("x" * 40_000, (1,))]
    for constraint, stops in (*cases, (json.dumps({"type": "structural_tag", "format": odd}), (1,))):
        try:
            engine.validate(request("bad", replace(free, constraint=constraint, stop_token_ids=stops), 0))
        except RequestError as error:
            refused.append(str(error))
    tokens = {name: each.token_ids.tolist() for name, each in done.items()}
    engine.close()
    return {
        "calls": calls,
        "stopped": [each.finish_reason is FinishReason.STOP for name, each in done.items() if "forced" in name],
        "free": sum(name.startswith("free") for name in done),
        "logprobs": np.concatenate([each.logprobs for name, each in done.items() if "forced" in name]).tolist(),
        "whole": whole.token_ids.tolist(),
        "goes on": goes_on,
        "refused": refused,
        "closed": (ended.finish_reason is FinishReason.STOP, len(ended.token_ids)),
        "tokens": tokens,
    }
