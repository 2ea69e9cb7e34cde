"""Decisions between two processes. About 4 s."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import torch.distributed as dist
from loop_harness import make_publication, make_request
from rank_processes import run_on_ranks

from titan_rl.generation.decisions import LoopAction, LoopDecision
from titan_rl.generation.rank import GlooChannel
from titan_rl.processes import join_world


def decisions() -> list[LoopDecision]:
    few = tuple(make_request(f"a{index}", seed=index) for index in range(2))
    many = tuple(make_request(f"b{index}", prompt=range(12), seed=2**62 + index) for index in range(300))
    return [
        LoopDecision(sequence=0, action=LoopAction.IDLE, digest=2**64 - 1),
        LoopDecision(sequence=1, action=LoopAction.PULL_MODEL_STATE_DICT, publication=make_publication(3)),
        LoopDecision(sequence=2, action=LoopAction.STEP, admit=few, abort=("x",), burst_steps=4),
        LoopDecision(sequence=3, action=LoopAction.STEP, admit=many),
        LoopDecision(sequence=4, action=LoopAction.STEP, abort=tuple(f"request-{index}" for index in range(999))),
        LoopDecision(sequence=5, action=LoopAction.CLOSE),
    ]


def exchange() -> tuple[list[LoopDecision], list[list[str]]]:
    rank = int(os.environ["RANK"])
    join_world("gloo")
    channel = GlooChannel()
    channel.open()
    received = []
    for decision in decisions():
        if rank == 0:
            channel.send(decision)
            received.append(decision)
        else:
            received.append(channel.receive())
    failures = [
        channel.gather_failures(""),
        channel.gather_failures("" if rank == 0 else "rank 1 has no space: ü" * 200),
    ]
    channel.close()
    dist.destroy_process_group()
    return received, failures


def comparable(decision: LoopDecision) -> tuple[object, ...]:
    requests = [
        (request.prompt_token_ids.tolist(), dataclasses.replace(request, prompt_token_ids=np.zeros(0)))
        for request in decision.admit
    ]
    return [(tokens, str(request)) for tokens, request in requests], dataclasses.replace(decision, admit=())


def test_decisions_of_any_length_and_failures_reach_every_rank() -> None:
    (sent, told_0), (received, told_1) = run_on_ranks("test_gloo_channel:exchange", 2)
    assert [comparable(each) for each in received] == [comparable(each) for each in decisions()]
    assert [comparable(each) for each in sent] == [comparable(each) for each in received]
    assert told_0 == told_1
    assert told_0[0] == ["", ""]
    assert told_0[1][0] == "" and told_0[1][1].startswith("rank 1 has no space: ü")
