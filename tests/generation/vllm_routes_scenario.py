"""What test_vllm_routes does in a generator: one engine loop over a mixture of experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from loop_harness import LONG_PROMPT, PROMPT, make_request
from torch import Tensor
from vllm_loop_scenario import BOUND, Loop

from titan_rl.errors import GeneratorNotServing, WeightsError
from titan_rl.routing.attempts import OpenRequest, next_attempt, stitch
from titan_rl.types import Completion

EXPERT, ROUTER = "model.layers.1.mlp.experts.3.up_proj.weight", "model.layers.0.mlp.gate.weight"

Wire = Callable[[str, Tensor], Iterator[tuple[str, Tensor]]]


def without_an_expert(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if name != EXPERT:
        yield name, tensor


def router_in_bfloat16(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield name, tensor[()].bfloat16().float() if name == ROUTER else tensor


def ask(name: str, **settings: Any) -> Any:
    return make_request(name, routes=True, **settings)


def swapped(this: Loop) -> Completion:
    """Through a change of weights, after which all its KV is computed anew."""
    this.engine.hold_in(10)
    this.loop.submit([ask("through", prompt=LONG_PROMPT, new=20, temperature=0.0)])
    this.engine.wait_until_held()
    pull = this.pull_next("tied_b")
    this.engine.let_go()
    pull.result(timeout=BOUND)
    return this.collector.wait_for("through")[0]


def continued(this: Loop) -> Completion:
    """Interrupted after a few tokens, and gone on with by other weights."""
    request = OpenRequest(original=ask("part", prompt=PROMPT, new=24, seed=5), attempts=1)
    this.engine.hold_in(6)
    this.loop.submit([request.original])
    this.engine.wait_until_held()
    this.loop.abort(["part"])
    this.engine.let_go()
    request.segments = tuple(this.collector.wait_for("part"))
    this.pull_next("tied_a").result(timeout=BOUND)
    rest = next_attempt(request)
    return stitch(request, this.serve(rest)[rest.request_id])


def refused(this: Loop, wire: Wire) -> tuple[str, str]:
    """What a pull over this wire is refused with, and a request after it."""
    stock = this.engine.load_weights

    def damaged(tensors: Iterable[tuple[str, Tensor]], *rest: Any) -> None:
        stock([each for entry in tensors for each in wire(*entry)], *rest)

    said = ["", ""]
    this.engine.load_weights = damaged
    try:
        this.pull_next("tied_b").result(timeout=BOUND)
    except WeightsError as error:
        said[0] = str(error)
    this.engine.load_weights = stock
    try:
        this.loop.submit([make_request(f"after {wire.__name__}")])
    except GeneratorNotServing as error:
        said[1] = str(error)
    this.pull_next("tied_a").result(timeout=BOUND)
    return said[0], said[1]


def life(models: dict[str, str]) -> dict[str, Any]:
    this = Loop(models)
    this.pull_next("tied_a").result(timeout=BOUND)
    facts: dict[str, Any] = this.serve(ask("cold", prompt=LONG_PROMPT, new=8, seed=1))
    facts |= this.serve(ask("warm", prompt=(*LONG_PROMPT, 3), new=8, seed=2), ask("beside", new=24, seed=5))
    facts |= this.serve(dataclasses.replace(ask("later", prompt=(*LONG_PROMPT, 3), new=8, seed=2), routes_from=5))
    facts |= this.serve(make_request("unasked", new=24, seed=5))
    facts["through"] = swapped(this)
    facts["continued"] = continued(this)
    facts["weights"] = this.weights_of
    for wire in (without_an_expert, router_in_bfloat16):
        facts["refused", wire.__name__] = refused(this, wire)
    facts["after"] = this.serve(ask("after", new=24, seed=5))["after"]
    this.close()
    assert dataclasses.is_dataclass(facts["cold"]) and not this.collector.errors.qsize()
    return facts
