"""Tokens per second through router, actor and engine loop, against a bare vLLM engine on the same requests.

    python scripts/bench/generation.py [--pairs 5]

One generator (TP 1) behind a router, both generators behind another, and two bare engines in processes of their own:
one with the same linear layers (`generator.linear`: "plain"), one with vLLM's packed weights ("packed"). The contenders
take turns, so that a change of the machine's speed hits all of them; ratios are medians over the rounds.

Two generators get the same requests as one (`two_generators_to_one`), and twice as many, so that each has as much to
do as the one (`two_generators_to_one_full`). What they add is bounded by the cores that client and router leave them.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

from monarch.actor import Actor
from parts.fleet import POLICY, SECONDS, Fleet, fleet, make_request, through_the_router
from parts.table import print_report

from titan_rl.generation.config import GeneratorConfig
from titan_rl.rpc.connection import bounded, endpoint
from titan_rl.types import GenerationRequest


@dataclasses.dataclass(frozen=True)
class Load:
    """One set of requests."""

    name: str
    requests: int
    new_tokens: int


LOADS = (Load("64 × 128 tokens", 64, 128), Load("256 × 6 tokens", 256, 6))
ONE, TWO, TWICE = "one generator", "two generators", "two generators, twice the requests"
BARE = {"bare engine": "plain", "bare engine, packed weights": "packed"}
"""Contender → linear layers of its engine."""


def requests_of(load: Load, round_number: int, contender: str, times: int = 1) -> list[GenerationRequest]:
    """The same in each round for all that are compared with a bare engine. Prompts differ between rounds, and between
    contenders that share a generator, so that no prefix cache helps."""
    seed_of = {TWO: 1, TWICE: 2}
    return [
        make_request(
            f"{contender}-{load.requests}-{round_number}-{index}",
            new_tokens=load.new_tokens,
            seed=(round_number, load.requests, index, seed_of.get(contender, 0)),
        )
        for index in range(load.requests * times)
    ]


class BareEngine(Actor):
    """vLLM's own engine and nothing else: add every request, step until all are done."""

    def __init__(self, config: GeneratorConfig, model_path: str) -> None:
        self._config = config
        self._model_path = model_path
        self._engine: Any = None

    @endpoint
    async def setup(self) -> None:
        from vllm import EngineArgs, LLMEngine

        from titan_rl.generation.vllm.adaptation import adapt_linear
        from titan_rl.generation.vllm.engine import engine_arguments
        from titan_rl.processes import join_world

        adapt_linear(self._config.linear)
        join_world("gloo")
        arguments = engine_arguments(self._config, Path(self._model_path), "cpu")
        self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))

    @endpoint
    async def run(self, requests: list[GenerationRequest]) -> tuple[float, int]:
        """(seconds, tokens) for these requests."""
        from vllm import SamplingParams as VllmSamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        started = time.perf_counter()
        for request in requests:
            params = VllmSamplingParams(
                max_tokens=request.sampling.max_new_tokens,
                seed=request.seed,
                logprobs=0,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            prompt = TokensPrompt(prompt_token_ids=request.prompt_token_ids.tolist())
            self._engine.add_request(request.request_id, prompt, params)
        tokens = 0
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                tokens += len(output.outputs[0].token_ids)
        return time.perf_counter() - started, tokens


async def bare_engines(up: Fleet) -> dict[str, Any]:
    """Contender → handle."""
    handles: dict[str, Any] = {}
    for name, linear in BARE.items():
        place = dataclasses.replace(up.places["generator0"], name=f"bare-{linear}")
        settings = dataclasses.replace(up.config.generator, linear=linear)
        mesh = up.provisioner.spawn(place).spawn("bare", BareEngine, settings, str(up.model_path))
        handles[name] = mesh[0]
    await asyncio.gather(
        *(bounded(each.setup.call_one(), what="bare.setup", seconds=SECONDS) for each in handles.values())
    )
    return handles


async def measure(pairs: int) -> dict[str, dict[str, list[float]]]:
    """Tokens per second by load and contender, one entry per round."""
    speeds: dict[str, dict[str, list[float]]] = {load.name: {} for load in LOADS}
    print("building four engines …", flush=True)
    async with fleet(GeneratorConfig(count=2, max_model_len=POLICY.max_length, max_num_seqs=256)) as up:
        bare = await bare_engines(up)
        routers = {name: up.router(name.replace(" ", "-"), up.config.router, n) for name, n in ((ONE, 1), (TWO, 2))}
        publication = up.checkpoint.publish()
        for router in routers.values():
            await router.pull_model_state_dict(publication)

        async def run(name: str, load: Load, number: int) -> tuple[float, int]:
            if name in bare:
                call = bare[name].run.call_one(requests_of(load, number, name))
                return await bounded(call, what="bare.run", seconds=SECONDS)
            router = routers[ONE if name == ONE else TWO]
            return await through_the_router(router, requests_of(load, number, name, 2 if name == TWICE else 1))

        for number in range(pairs + 1):  # the first round warms everything up
            for load in LOADS:
                for name in (ONE, *bare, TWO, TWICE):
                    seconds, tokens = await run(name, load, number)
                    if tokens != load.requests * load.new_tokens * (2 if name == TWICE else 1):
                        raise RuntimeError(f"{name} sampled {tokens} tokens on {load.name}")
                    if number:
                        speeds[load.name].setdefault(name, []).append(tokens / seconds)
            print(f"round {number} of {pairs} done", flush=True)
    return speeds


def median_ratio(above: list[float], below: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7, help="measured rounds (at least 5 for a figure to quote)")
    pairs = parser.parse_args().pairs
    speeds = asyncio.run(measure(pairs))
    figures: dict[str, Any] = {"pairs": pairs}
    rows = []
    for load, suffix in zip(LOADS, ("", "_short"), strict=True):
        by_name = speeds[load.name]
        one, plain, packed = by_name[ONE], by_name["bare engine"], by_name["bare engine, packed weights"]
        figures[f"ratio_to_bare_engine{suffix}"] = round(median_ratio(one, plain), 3)
        figures[f"ratio_to_packed_engine{suffix}"] = round(median_ratio(one, packed), 3)
        figures[f"bare_plain_to_packed{suffix}"] = round(median_ratio(plain, packed), 3)
        figures[f"two_generators_to_one{suffix}"] = round(median_ratio(by_name[TWO], one), 3)
        figures[f"two_generators_to_one_full{suffix}"] = round(median_ratio(by_name[TWICE], one), 3)
        for name, values in by_name.items():
            contender = name.replace(",", "").replace(" ", "_")
            figures[f"tokens_per_second_{contender}{suffix}"] = round(statistics.median(values))
            ratios = [median_ratio(values, against) for against in (one, plain, packed)]
            rows.append([load.name, name, statistics.median(values), *ratios])
    header = ["requests", "contender", "tokens/s (median)", "÷ one generator", "÷ bare engine", "÷ packed engine"]
    print_report("generation", header, rows, figures)


if __name__ == "__main__":
    main()
